"""The folder of a run: who holds it, whether a run may be written there, and from which checkpoint it goes on."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.checkpoint import checkpoints
from engine.settings_fields import SettingsError


def prepare_output(folder: Path, *, resume: bool) -> None:
    """`folder` exists and can be written to afterwards. Raises SettingsError when it cannot be written to or holds a run that is
    not to be gone on with."""
    saved = checkpoints(folder / "checkpoints")
    if saved and not resume:
        raise SettingsError(
            f"run.output: {folder} holds a run with checkpoints; leave out --no-resume to go on with it, or choose another folder"
        )
    if not saved and (folder / "drafter").exists():
        raise SettingsError(
            f"run.output: {folder} holds a trained drafter, but no checkpoint to go on from; choose another folder"
        )
    for file, what in (("dataset.json", "a dataset"), ("model.safetensors", "a model")):
        if not saved and (folder / file).exists():
            raise SettingsError(f"run.output: expected a folder for the run, found {what} in {folder}; choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"run.output: expected a folder that can be written to, found {folder} ({error.strerror}); choose another"
        ) from error


@contextmanager
def alone_in(folder: Path, name: str = "run.output", other: str = "run") -> Iterator[None]:
    """Holds `folder` for this process; the system lets go of it when the process ends, however it ends. Raises SettingsError,
    which says `name` of the folder and what `other` is, when another one is at work there. Where a file system has no locks,
    nothing is held."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingsError(
                f"{name}: another {other} is writing to {folder}; wait for its end, or choose another folder"
            ) from error
        except OSError:
            pass
        yield
    finally:
        os.close(handle)
