"""Folders that appear whole or not at all: the order of flushes and renames, a death between them, and the mode of files."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.failures import message_of
from engine.publish import publish_folder, restore_folder
from tests.run_helpers import files_under


def write(into: Path) -> None:
    (into / "a").write_text("new a")
    (into / "b").write_text("new b")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """What is flushed and what is renamed, by name."""
    done: list[tuple[str, str]] = []
    rename, fsync = Path.rename, os.fsync

    def note_flush(handle: int) -> None:
        done.append(("flush", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def note_rename(self: Path, target: Any) -> Path:
        done.append(("rename", self.name))
        return rename(self, target)

    monkeypatch.setattr("os.fsync", note_flush)
    monkeypatch.setattr(Path, "rename", note_rename)
    yield done


def test_everything_is_on_disk_before_it_has_its_name(tmp_path: Path, order: list[tuple[str, str]]) -> None:
    folder = tmp_path / "run" / "checkpoints" / "x"
    publish_folder(folder, write)
    # The folders above are entries of theirs.
    assert sorted(order[:2]) == [("flush", "run"), ("flush", tmp_path.name)]
    assert sorted(order[2:4]) == [("flush", "a"), ("flush", "b")]
    assert order[4:] == [("flush", ".x.writing"), ("rename", ".x.writing"), ("flush", "checkpoints")]


class Dies(BaseException):
    """Nothing is done after it."""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_death_leaves_the_old_content_or_the_new(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "a").write_text("old a")
    left, rename = iter(range(renames)), Path.rename
    dead: list[bool] = []

    def dies(self: Path, target: Any) -> Path:
        if dead or next(left, None) is None:
            dead.append(True)
            raise Dies
        return rename(self, target)

    def unless_dead(*args: Any, **kwargs: Any) -> None:
        if not dead:
            shutil_rmtree(*args, **kwargs)

    shutil_rmtree = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        patch.setattr(shutil, "rmtree", unless_dead)
        if renames < 2:
            with pytest.raises(Dies):
                publish_folder(folder, write)
        else:
            publish_folder(folder, write)
    restore_folder(folder)
    old, new = {"a": b"old a"}, {"a": b"new a", "b": b"new b"}
    assert files_under(folder) == (new if renames == 2 else old)
    publish_folder(folder, write)
    assert files_under(folder) == new and [path.name for path in tmp_path.iterdir()] == ["x"]


def test_files_have_the_mode_that_the_user_set_and_nobody_changes_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def private(into: Path) -> None:
        (into / "a").touch(mode=0o600)

    # Another thread would make its files under the mask that is set for a moment.
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the mask of all threads was set"))
    publish_folder(tmp_path / "x", private)
    monkeypatch.undo()
    (tmp_path / "plain").touch()
    assert (tmp_path / "x" / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError("said already")])
def test_a_disk_that_is_full_only_when_it_is_flushed_is_named(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise error

    (tmp_path / "x").mkdir()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError) as caught:
        publish_folder(tmp_path / "x", write)
    told = f"{tmp_path / '.x.writing'}: No space left on device. Make room there; the same command goes on."
    assert message_of(caught.value) == (told if error.errno else "said already")
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and files_under(tmp_path / "x") == {}
