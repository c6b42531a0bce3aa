"""Checkpoints written beside the training: the loop takes a snapshot, a thread puts it on disk.

One at a time: a checkpoint that is asked for while another is being written waits for it, and the memory of the snapshot serves
them all. What the thread fails with, the loop raises at its next step.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buffers.stages import stage
from engine.checkpoint import (
    FORMAT_VERSION,
    STATE_FILE,
    TRAINING_FILE,
    Position,
    checkpoint_folder,
    checkpoints,
    nonfinite_error,
    seal,
    step_of,
)
from engine.drafter_config import DrafterConfig
from engine.publish import clear_away, publish_folder, remove_folder
from engine.snapshot import Snapshot
from engine.tensor_file import NonFinite, write_tensors

_ABANDON_S = 1.0  # a flush to a slow disk cannot be broken off; the process may end without it
_ROWS_A_TURN = 2048  # turned into numbers while the interpreter's lock is held: less than a millisecond


class _Abandoned(BaseException):
    """Nobody waits for this checkpoint any more."""


class CheckpointWriter:
    """Owns the thread and what it is writing. One caller thread."""

    def __init__(self, root: Path, snapshot: Snapshot, config: DrafterConfig) -> None:
        """root: the folder of the checkpoints."""
        self._root, self._snapshot, self._config = root, snapshot, config
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._give_up = threading.Event()
        self.under_way: int | None = None
        self.on_disk = -1  # the step of the newest checkpoint that is

    def save(self, position: Position, about: Mapping[str, Any], *, keep: int) -> None:
        """Begins a checkpoint of what the engine holds once the steps queued so far are done, and returns; it will be
        root/step-<step>, and of the older ones keep - 1 stay. about: more entries for its state.json. Waits for the checkpoint
        before, and raises what came of it."""
        self.wait()
        self._snapshot.take()
        self.under_way = position.step
        arguments = (position, {"format_version": FORMAT_VERSION, **about}, keep)
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written. Raises OSError, and ValueError when a weight or moment is not finite: what the last
        checkpoint came to."""
        if self._thread is not None:
            with stage("checkpoint", f"until that of step {self.under_way} is written"):
                self._thread.join()
            self._thread = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what a checkpoint has failed with since the last call; waits for nothing."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Leaves the checkpoint under way unfinished, without a wait worth the name."""
        self._give_up.set()
        if self._thread is not None:
            self._thread.join(_ABANDON_S)

    def _run(self, position: Position, state: dict[str, Any], keep: int) -> None:
        """The thread."""
        try:
            with stage("checkpoint", f"step {position.step}"):
                try:
                    self._write(position, state, keep)
                except OSError as error:
                    if not isinstance(error.__cause__ or error, FileNotFoundError):
                        raise
                    # The run's folder was deleted or moved away in the middle of it; it is made again with the file.
                    self._write(position, state, keep)
            self.on_disk = position.step
        except _Abandoned:
            pass
        except Exception as error:
            self._error = error
        self.under_way = None

    def _write(self, position: Position, state: dict[str, Any], keep: int) -> None:
        folder = checkpoint_folder(self._root, position.step)
        state |= {
            "step": position.step,
            "epoch": position.epoch,
            "data": asdict(position.data),
            "logged": None if position.logged is None else asdict(position.logged),
            "config": self._config.to_json(),
        }
        tensors = self._snapshot.tensors() | {"consumed": _rows(position.consumed)}
        self._snapshot.wait()

        def write(into: Path) -> None:
            try:
                written = write_tensors(into / TRAINING_FILE, tensors, self._go_on)
            except NonFinite as error:
                raise nonfinite_error(folder, error.names) from error
            files = {TRAINING_FILE: asdict(written)}
            (into / STATE_FILE).write_text(seal(json.loads(json.dumps(state | {"files": files}))))

        for unfinished in self._root.glob(".step-*"):
            clear_away(unfinished)
        publish_folder(folder, write)
        older = [other for other in checkpoints(self._root) if step_of(other) < position.step]
        for old in older[: len(older) - (keep - 1)]:
            remove_folder(old)

    def _go_on(self) -> None:
        if self._give_up.is_set():
            raise _Abandoned


def _rows(consumed: tuple[tuple[int, int], ...]) -> Tensor:
    """int64 [n, 2]."""
    rows = torch.empty(len(consumed), 2, dtype=torch.int64)
    for first in range(0, len(consumed), _ROWS_A_TURN):
        rows[first : first + _ROWS_A_TURN] = torch.tensor(consumed[first : first + _ROWS_A_TURN])
    return rows
