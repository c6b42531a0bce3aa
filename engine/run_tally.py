"""What a run counts over its generations: batches and times by bucket, samples left out, waits for the loader."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from buffers.batching import Batch
from buffers.shapes import Bucket
from engine.engine import Engine
from engine.intake import Intake
from engine.reports import BucketCount, bucket_rows


class RunTally:
    """The counts of the generation under way, and what is kept of those before it."""

    def __init__(self) -> None:
        self._counts: dict[Bucket, BucketCount] = defaultdict(BucketCount)
        self._rows: list[dict[str, Any]] = []
        self._skipped: set[int] = set()
        self._wait_ms = 0.0

    def add(self, batch: Batch) -> None:
        """Counts a batch that a step took."""
        self._counts[batch.bucket].add(batch)

    @property
    def counts(self) -> Mapping[Bucket, BucketCount]:
        """By bucket, of the generation under way."""
        return self._counts

    def rows(self, engine: Engine) -> list[dict[str, Any]]:
        """A row for every bucket of every generation so far. Waits for the device."""
        times, how_of = engine.executor.times.read(wait=True), engine.executor.how_of
        return self._rows + bucket_rows(engine.buckets, self._counts, times, how_of, generation=engine.generation)

    def end_times(self, rows: list[dict[str, Any]]) -> None:
        """The executor's times have ended; these were the rows until then."""
        self._rows = rows
        self._counts.clear()

    def end_intake(self, intake: Intake) -> None:
        """Keeps the figures of an intake that ends."""
        self._skipped.update(intake.skipped)
        self._wait_ms += intake.inputs.wait_ms

    def skipped(self, intake: Intake) -> list[int]:
        """All training samples that were left out because they are not finite, with those of the intake under way."""
        return sorted(self._skipped.union(intake.skipped))

    def wait_ms(self, intake: Intake) -> float:
        """All waits for a loader."""
        return self._wait_ms + intake.inputs.wait_ms
