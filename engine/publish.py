"""A folder that appears whole or not at all, whenever the process or the machine dies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from buffers.manifest import flush, make_readable
from buffers.naming import naming


def publish_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """write(temporary folder), flush to disk, then rename: whoever looks finds the old content or the new, never a part. The
    temporary folder of a write that raises is removed."""
    _make_parents(folder.parent)
    restore_folder(folder)
    temporary = folder.with_name(f".{folder.name}.writing")
    clear_away(temporary)
    temporary.mkdir()
    try:
        with naming(temporary):
            write(temporary)
            for path in temporary.iterdir():
                make_readable(path)
                flush(path)
            flush(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    old = folder.with_name(f".{folder.name}.old")
    clear_away(old)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    flush(folder.parent)
    clear_away(old)


def restore_folder(folder: Path) -> None:
    """Undoes half a publish_folder: where a process died between its two renames, the old content is put back."""
    old = folder.with_name(f".{folder.name}.old")
    if old.is_dir() and not folder.exists():
        old.rename(folder)


def remove_folder(folder: Path) -> None:
    """Removes a folder at once for whoever looks; what a death leaves of it bears a dot and no longer its name."""
    going = folder.with_name(f".{folder.name}.removing")
    clear_away(going)
    folder.rename(going)
    clear_away(going)


def clear_away(path: Path) -> None:
    """Nothing has this name any more. What a link leads to stays: it is not the run's."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _make_parents(folder: Path) -> None:
    """The folder and those above it, on disk: an entry that is not flushed is lost with the power, and what lies under it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush(path.parent)
