"""What a watched run shows: is memory flat, are steps even, did it learn. Rows of docs/reliability.md, with what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.long_run import CHECKPOINT, EVALUATION, Samples, StepLog
from bench.trend import floor_rise, trend

MOST_DRIFT_MIB, MOST_SLOWNESS = 8.0, 3.0
# Python's objects come and go by hundreds: a line of metrics, a batch plan.
MOST_NEW_OBJECTS, MOST_NEW_OBJECTS_SHARE = 1000, 0.01
MEMORY = {
    "host_mib": "host memory (RSS)",
    "host_anonymous_mib": "host memory that is no file's",
    "device_reserved_mib": "device memory held by torch",
    "device_allocated_mib": "device memory allocated in torch",
    "device_used_mib": "device memory in use (cudaMemGetInfo)",
}


@dataclass(frozen=True)
class Verdict:
    """One thing that was looked at; holds is None for what is told only."""

    what: str
    measured: str
    allowed: str
    holds: bool | None

    def row(self) -> dict[str, str]:
        """A row of the page."""
        holds = "-" if self.holds is None else "yes" if self.holds else "**no**"
        return {"what": self.what, "measured": self.measured, "allowed": self.allowed, "holds": holds}


def verdicts(log: StepLog, samples: Samples, warm_from: int, lines: list[dict[str, Any]]) -> list[Verdict]:
    """Everything that a run is judged by, after its warm-up. lines: of metrics.jsonl."""
    return [
        *_about(log, samples, warm_from),
        *_memory(samples, warm_from),
        *_counts(samples, warm_from),
        *_steps(log, warm_from),
        _losses(lines),
    ]


def slow_steps(log: StepLog, warm_from: int) -> dict[str, Any]:
    """Of the steps after warm_from: how many took more than MOST_SLOWNESS times the median of their bucket, apart for those that
    an evaluation (or both), or a checkpoint alone came before, and the slowest of each in such medians. The medians are those of
    the others."""
    ms, bucket, aside = log.ms()[warm_from:], log.bucket()[warm_from:], log.aside()[warm_from:]
    over = np.full(len(ms), np.nan)
    medians: dict[str, float] = {}
    for index, name in enumerate(log.buckets):
        plain = ms[(bucket == index) & (aside == 0)]
        if len(plain):
            medians[name] = float(np.median(plain))
            over[bucket == index] = ms[bucket == index] / medians[name]
    found: dict[str, Any] = {"median_ms": medians}
    for name, chosen in (
        ("steps", aside == 0),
        ("after_evaluation", (aside & EVALUATION) > 0),
        ("after_checkpoint", aside == CHECKPOINT),
    ):
        here = over[chosen & ~np.isnan(over)]
        slow = int((here > MOST_SLOWNESS).sum())
        found[name] = {
            "count": len(here),
            "slow": slow,
            "slow_share": slow / max(1, len(here)),
            "slowest": float(here.max()) if len(here) else None,
        }
    return found


def rates(log: StepLog, warm_from: int) -> tuple[float, float, float]:
    """Useful tokens/s in the first and in the last minute after the warm-up, and how long those are: a third of it at most."""
    ms, tokens = log.ms()[warm_from:].astype(np.float64), log.tokens()[warm_from:]
    ends_s = ms.cumsum() / 1e3
    window = min(60.0, float(ends_s[-1]) / 3)
    first, last = ends_s <= window, ends_s > ends_s[-1] - window
    return (
        float(tokens[first].sum() / max(1e-9, ms[first].sum() / 1e3)),
        float(tokens[last].sum() / max(1e-9, ms[last].sum() / 1e3)),
        window,
    )


def read_lines(metrics: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def _about(log: StepLog, samples: Samples, warm_from: int) -> Iterator[Verdict]:
    aside, seen = log.aside(), samples.columns(warm_from)
    counts = {name: int(((aside & bit) > 0).sum()) for name, bit in (("e", EVALUATION), ("c", CHECKPOINT))}
    said = (
        f"{log.count:,} in {len(log.buckets)} buckets, {counts['e']} evaluations and {counts['c']} checkpoints between them; "
        f"{log.count - warm_from:,} steps, {seen['seconds'][-1]:.0f} s and {len(seen['seconds'])} samples after the warm-up"
    )
    yield Verdict("steps", said, "-", None)


def _memory(samples: Samples, warm_from: int) -> Iterator[Verdict]:
    seen = samples.columns(warm_from)
    for name, what in MEMORY.items():
        if np.isnan(seen[name]).any():
            continue
        line = trend(seen["seconds"], seen[name])
        yield Verdict(
            what,
            f"{line.slope_per_minute:+.2f} ± {line.standard_error:.2f} MiB a minute, {line.drift:+.1f} MiB in all; "
            f"{line.first:,.0f} MiB at first, {line.last:,.0f} at last, {line.most:,.0f} at most",
            f"a slope of 2 standard errors, or {MOST_DRIFT_MIB:.0f} MiB in all",
            not line.grows(tolerance=MOST_DRIFT_MIB),
        )


def _counts(samples: Samples, warm_from: int) -> Iterator[Verdict]:
    seen = samples.columns(warm_from)
    for name, what in (("threads", "threads"), ("files", "open files"), ("objects", "Python's objects")):
        values, rise = seen[name], floor_rise(seen[name])
        most = max(MOST_NEW_OBJECTS, MOST_NEW_OBJECTS_SHARE * values[0]) if name == "objects" else 0
        yield Verdict(
            what,
            f"{values.min():,.0f} to {values.max():,.0f}; the fewest rose by {rise:,.0f} from the first to the last quarter",
            f"{most:,.0f} more",
            bool(rise <= most),
        )


def _steps(log: StepLog, warm_from: int) -> Iterator[Verdict]:
    found = slow_steps(log, warm_from)
    for name, what in (
        ("steps", "steps slower than 3 times their bucket's median"),
        ("after_evaluation", "the same, an evaluation before them included"),
        ("after_checkpoint", "the same, a checkpoint before them included"),
    ):
        row = found[name]
        if not row["count"]:
            continue
        measured = (
            f"{row['slow']} of {row['count']:,} ({row['slow_share']:.2%}), the slowest {row['slowest']:.1f} times"
        )
        plain = name == "steps"
        yield Verdict(what, measured, "none" if plain else "-", row["slow"] == 0 if plain else None)
    first, last, window = rates(log, warm_from)
    yield Verdict(
        f"useful tokens/s of the last {window:.0f} s over those of the first", f"{last / first:.3f}", "-", None
    )


def _losses(lines: list[dict[str, Any]]) -> Verdict:
    losses = [line["loss"] for line in lines if "loss" in line]
    skipped = max((line.get("skipped_steps", 0) for line in lines), default=0)
    return Verdict(
        "loss",
        f"{len(losses)} lines, {losses[0]:.3f} at first, {losses[-1]:.3f} at last; {skipped} steps skipped",
        "all finite, no step skipped",
        bool(losses) and all(math.isfinite(loss) for loss in losses) and not skipped,
    )
