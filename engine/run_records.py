"""metrics.jsonl of a run read back, of one that was interrupted or is under way too; damaged lines are counted and left out."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Points = list[tuple[float, float | None]]


@dataclass
class BucketTotal:
    """A bucket of one generation over all lines. device_ms is that of the `timed` batches."""

    batches: float = 0.0
    useful_tokens: float = 0.0
    slot_tokens: float = 0.0
    device_ms: float = 0.0
    timed: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Useful tokens per second of device time; None where no batch was timed."""
        if not (self.batches and self.device_ms):
            return None
        return self.useful_tokens / self.batches * self.timed / self.device_ms * 1e3


@dataclass(frozen=True)
class RunRecords:
    """training, held_out, events: the records in the order of their lines. damaged: lines that are no record."""

    training: list[Record] = field(default_factory=list)
    held_out: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    damaged: int = 0

    @property
    def step(self) -> int:
        """The last step that anything is known of."""
        return max((r["step"] for r in (*self.training, *self.held_out, *self.events)), default=0)

    def summed(self, *path: str) -> dict[str, float]:
        """The numbers of a table in the training lines, added up by name."""
        sums: dict[str, float] = defaultdict(float)
        for record in self.training:
            for name, value in table(record, *path).items():
                sums[name] += number(value) or 0.0
        return dict(sums)

    def buckets(self) -> dict[tuple[int, str], BucketTotal]:
        """By generation and name."""
        totals: dict[tuple[int, str], BucketTotal] = defaultdict(BucketTotal)
        for record in self.training:
            generation = int(number(table(record, "machine").get("generation")) or 1)
            for name in table(record, "machine", "buckets"):
                add(totals[generation, name], table(record, "machine", "buckets", name))
        return dict(sorted(totals.items()))


def read_records(path: Path) -> RunRecords:
    """Raises ValueError when there is no such file or it holds no record."""
    found, damaged = RunRecords(), 0
    try:
        with path.open("rb") as file:
            for line in file:
                record = _record(line)
                if record is None:
                    damaged += 1
                elif "event" in record:
                    found.events.append(record)
                elif "eval_loss" in record:
                    found.held_out.append(record)
                elif "loss" in record:
                    found.training.append(record)
    except OSError as error:
        raise ValueError(
            f"{path}: expected the metrics of a run, found none to read ({error.strerror}); name the folder that is "
            "run.output of a run"
        ) from error
    if not (found.training or found.held_out or found.events):
        raise ValueError(f"{path}: expected at least one line of metrics, found none; the run has not come that far")
    return RunRecords(found.training, found.held_out, found.events, damaged)


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def number(value: Any) -> float | None:
    """A finite number that can be drawn, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None  # NaN is not less than anything


def table(record: Record, *path: str) -> Record:
    """The table in the record under these names, {} where there is none."""
    for name in path:
        inner = record.get(name)
        if not isinstance(inner, dict):
            return {}
        record = inner
    return record


def add(total: BucketTotal, figures: Record) -> BucketTotal:
    """Adds the figures that there are."""
    for name in vars(total):
        setattr(total, name, getattr(total, name) + (number(figures.get(name)) or 0.0))
    return total


def points(records: Iterable[Record], *path: str) -> Points:
    """(step, number) of every record; the last name of the path is the number's."""
    return [(r["step"], number(table(r, *path[:-1]).get(path[-1]))) for r in records]


def slot_points(records: Sequence[Record], key: str) -> list[Points]:
    """The same for a list of numbers: one line for each place in it."""
    lists = [(r["step"], r[key]) for r in records if isinstance(r.get(key), list)]
    count = max((len(values) for _, values in lists), default=0)
    return [[(step, number(values[k])) for step, values in lists if k < len(values)] for k in range(count)]
