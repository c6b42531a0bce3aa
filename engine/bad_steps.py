"""Steps without a finite gradient change nothing but a counter; after too many in a row the run stops and names their samples."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffers.batching import Batch
from buffers.dataset import SampleSource
from engine.engine import Engine
from engine.left_out import named_samples, spoken_samples
from engine.metrics import MetricsSnapshot

BAD_STEPS_FILE = "bad_steps.json"
# Steps that the host may be ahead of the numbers it reads, besides those between two looks.
_AHEAD = 64


class TooManyBadSteps(ValueError):
    """The line for the user; the file that it names has the rest."""


@dataclass(frozen=True)
class _Look:
    """Numbers that were asked for after a step, and are on their way."""

    step: int
    snapshot: MetricsSnapshot


class BadSteps:
    """Looks every few steps at the device's count of bad steps in a row, when it has come over: no step waits for it. The last
    steps' batches are remembered for when it is too high."""

    def __init__(self, engine: Engine, dataset: SampleSource, folder: Path, limit: Callable[[], int]) -> None:
        """limit: run.max_bad_steps, asked in every step; 0 is never."""
        self._engine, self._dataset, self._file, self._limit = engine, dataset, folder / BAD_STEPS_FILE, limit
        self._recent: deque[tuple[int, tuple[Batch, ...]]] = deque()
        self._seen: deque[dict[str, Any]] = deque(maxlen=16)
        self._asked: _Look | None = None
        self._before = engine.metrics.snapshot().read()

    def took(self, step: int, batches: tuple[Batch, ...]) -> None:
        """A step over these batches was queued. Raises TooManyBadSteps, with bad_steps.json written, when at least `limit` in a
        row are known to have been bad."""
        limit, optimizer = self._limit(), self._engine.optimizer
        if not limit:
            self._recent.clear()
            return
        assert optimizer is not None, "steps without an optimizer"
        self._recent.append((step, batches))
        while len(self._recent) > 2 * limit + _AHEAD:
            self._recent.popleft()
        if self._asked is None and step % max(1, limit // 4) == 0:
            self._asked = _Look(step, self._engine.metrics.snapshot(optimizer.bad_in_row, optimizer.grad_norm))
        if self._asked is not None and self._asked.snapshot.ready():
            look, self._asked = self._asked, None
            self._read(look, limit)

    def _read(self, look: _Look, limit: int) -> None:
        sums = look.snapshot.read()
        in_a_row, grad_norm = look.snapshot.beside()
        means, self._before = (sums - self._before).means(), sums
        self._seen.append(
            {
                "step": look.step,
                "grad_norm": _written(grad_norm),
                "loss": _written(means["loss"]),
                "bad_micro_batches": int(means["bad_micro_batches"]),
            }
        )
        if in_a_row >= limit:
            raise TooManyBadSteps(self._told(look.step, int(in_a_row), limit, grad_norm))

    def _told(self, last: int, in_a_row: int, limit: int, grad_norm: float) -> str:
        """Writes the file, and says what is in it."""
        bad = [(step, batches) for step, batches in self._recent if last - in_a_row < step <= last]
        record = {
            "step": last,
            "in_a_row": in_a_row,
            "max_bad_steps": limit,
            "seen": [seen for seen in self._seen if seen["step"] > last - in_a_row],
            "steps": [{"step": step, "batches": [self._batch(batch) for batch in batches]} for step, batches in bad],
        }
        try:
            self._file.write_text(json.dumps(record, indent=1) + "\n")
            where = f"{self._file} names their samples"
        except OSError as error:
            where = f"{self._file} could not be written ({error.strerror})"
        step, batches = bad[0]
        ids = [document.sample_id for batch in batches for document in batch.documents]
        first = spoken_samples(named_samples(self._dataset, ids))
        return (
            f"expected a finite gradient in one of {limit} steps (run.max_bad_steps), found none in the {in_a_row} up to "
            f"step {last} (the last one's norm is {grad_norm}); nothing but a counter has changed in them. {where}, those of "
            f"step {step}: {first}. Look at these, lower optimizer.lr, or set run.max_bad_steps to 0 to go on whatever comes"
        )

    def _batch(self, batch: Batch) -> dict[str, Any]:
        return {
            "bucket": batch.bucket.name,
            "epoch": batch.epoch,
            "samples": [
                {
                    "sample": named_samples(self._dataset, [document.sample_id])[0],
                    "piece": document.piece,
                    "tokens": [document.start, document.stop],
                }
                for document in batch.documents
            ],
        }


def _written(value: float) -> float | str:
    """JSON has no word for a number that is not finite."""
    return value if math.isfinite(value) else str(value)
