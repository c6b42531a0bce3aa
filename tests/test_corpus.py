"""The corpus: what belongs to it, and a split that depends on the path alone."""

from pathlib import Path

import pytest

from engine.corpus import corpus_files, is_held_out, read_documents, stdlib_root


def test_standard_library_is_split_once_and_sorted() -> None:
    root = stdlib_root()
    train, held = corpus_files("train"), corpus_files("heldout")
    names = [path.relative_to(root).as_posix() for path in train + held]
    assert len(set(names)) == len(names) and len(train) > 200
    assert [path.relative_to(root).as_posix() for path in train] == sorted(names[: len(train)])
    assert 0.01 < len(held) / len(names) < 0.12
    assert not any({"test", "tests", "site-packages", "encodings"} & set(n.split("/")[:-1]) for n in names)
    assert not any("sysconfigdata" in name for name in names)
    assert b"import" in b"".join(read_documents(train[:20]))


def test_the_split_is_stable() -> None:
    names = ("argparse.py", "ast.py", "dataclasses.py", "email/charset.py", "json/decoder.py", "socket.py", "typing.py")
    assert [name for name in names if is_held_out(name)] == ["dataclasses.py", "email/charset.py", "socket.py"]
    assert 30 < sum(is_held_out(f"module_{i}.py") for i in range(1000)) < 75


def test_folders_and_files_that_do_not_belong(tmp_path: Path) -> None:
    kept = ("a.py", "b/c.py", "b-/d.py", "test.py")
    for name in (*kept, "test/x.py", "b/tests/y.py", "site-packages/z.py", "_sysconfigdata__linux.py", "readme.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(name.encode())
    (tmp_path / "e.py").mkdir()
    files = corpus_files("train", tmp_path) + corpus_files("heldout", tmp_path)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in files) == sorted(kept)
    assert sorted(read_documents(files)) == sorted(name.encode() for name in kept)


def test_messages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='corpus split: expected "train" or "heldout", found \'test\''):
        corpus_files("test")
    with pytest.raises(ValueError, match="standard library: expected source files .* found none"):
        corpus_files("train", tmp_path)
