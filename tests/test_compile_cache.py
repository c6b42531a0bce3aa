"""The folder of compiled kernels: one for each combination of software, and none of another version's is used."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

import engine.compile_cache as cache
from engine.compile_cache import FILE, base_folder, open_cache, use_compile_cache
from engine.settings import load_settings
from engine.settings_fields import SettingsError
from tests.drafter_helpers import CPU

FIELDS = {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "driver": "580.1", "gpu": "NVIDIA H200, 9.0"}


def never(text: str) -> None:
    raise AssertionError(f"said: {text}")


def kernel(folder: Path) -> Path:
    """A file as Triton might have left it."""
    (folder / "triton").mkdir(exist_ok=True)
    path = folder / "triton" / "kernel.cubin"
    path.write_text("code")
    return path


def test_the_same_software_finds_its_kernels_again(tmp_path: Path) -> None:
    folder = open_cache(tmp_path / "cache", FIELDS, never)
    path = kernel(folder)
    assert open_cache(tmp_path / "cache", FIELDS, never) == folder
    assert path.exists()
    for name in FIELDS:
        assert open_cache(tmp_path / "cache", FIELDS | {name: "other"}, never) != folder
    assert json.loads((folder / FILE).read_text())["software"] == FIELDS


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda text: text.replace('"version": 1', '"version": 99'), "another version"),
        (lambda text: text[:20], "something else"),
        (lambda text: text.replace("2.11.0", "2.12.0"), "something else"),
    ],
)
def test_what_another_version_wrote_is_ignored_and_rebuilt(tmp_path: Path, change: object, what: str) -> None:
    folder = open_cache(tmp_path, FIELDS, never)
    path, said = kernel(folder), list[str]()
    (folder / FILE).write_text(change((folder / FILE).read_text()))  # type: ignore[operator]
    (folder / "notes.txt").write_text("not ours")
    assert open_cache(tmp_path, FIELDS, said.append) == folder
    assert said == [f"{folder}: compiled kernels of {what} are not used and are compiled again"]
    assert not path.exists()
    assert (folder / "notes.txt").exists()
    kernel(folder)
    open_cache(tmp_path, FIELDS, never)


def test_the_compilers_are_pointed_there_unless_the_user_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "software_fields", lambda device: FIELDS)
    monkeypatch.setattr(cache, "_set", {})
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    named = threading.Semaphore(0)
    monkeypatch.setattr(cache, "_name_triton", named.release)
    cuda = torch.device("cuda", 0)
    for name in ("one", "two"):
        folder = use_compile_cache(load_settings(None, [f"run.cache={tmp_path / name}"]), cuda, never)
        assert folder is not None and folder.parent == tmp_path / name
        assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton"), "a second run of a process has its own"
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
        assert named.acquire(timeout=10), "Triton's own hash is reckoned aside"
    assert use_compile_cache(load_settings(None), CPU, never) is None


@pytest.mark.parametrize(("attention", "loaded"), [("flex", True), ("triton", False)])
def test_the_compiler_is_loaded_aside_where_it_will_be_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str, loaded: bool
) -> None:
    seen, done = list[str](), threading.Event()

    def note() -> None:
        seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        done.set()

    monkeypatch.setattr(cache, "software_fields", lambda device: FIELDS)
    monkeypatch.setattr(cache, "_set", {})
    monkeypatch.setattr(cache, "_name_triton", lambda: None)
    monkeypatch.setattr(cache, "_load_compiler", note)
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    settings = load_settings(None, [f"run.cache={tmp_path}", f"model.attention={attention}"])
    folder = use_compile_cache(settings, torch.device("cuda", 0), never)
    assert done.wait(10 if loaded else 0.2) == loaded
    assert seen == ([str(folder / "inductor")] if loaded and folder else []), "it finds the folder of its kernels"


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert base_folder(load_settings(None)) == tmp_path / "dflash-engine"
    assert base_folder(load_settings(None, ["run.cache=here"])) == Path("here").absolute()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="run.cache: expected a folder that can be written to, found .*file"):
        open_cache(tmp_path / "file", FIELDS, never)
