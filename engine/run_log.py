"""The lines of metrics.jsonl, and what is told of them, written without stopping the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from engine.engine import Engine
from engine.metrics import MetricsSnapshot, MetricSums
from engine.reports import MetricsLog


@dataclass(frozen=True)
class _Asked:
    """A line that waits for its numbers."""

    head: dict[str, Any]
    snapshot: MetricsSnapshot
    machine: dict[str, Any]
    at_s: float


class RunLog:
    """A line is asked for at one step and written at a later one, when its numbers have come over."""

    def __init__(
        self,
        engine: Engine,
        file: MetricsLog,
        *,
        watch: Callable[[], dict[str, Any]],
        tell: Callable[[dict[str, Any]], None],
        logged: MetricSums | None,
    ) -> None:
        """watch: the machine's figures since it was last asked (engine/watch.py); tell: gets every line that was written.
        logged: the metrics' sums at the last line of an interrupted run, so that the next line is the uninterrupted run's."""
        now = engine.metrics.snapshot().read()
        self.sums = now if logged is None else logged
        self.means: dict[str, Any] = file.last("loss")
        self.step: int = self.means.get("step", 0)
        self._engine, self._file, self._watch, self._tell = engine, file, watch, tell
        self._asked: _Asked | None = None
        self._takes_part = False
        self._first_tokens = self._seen_tokens = now.sums["useful_tokens"]
        self._began_s = time.perf_counter()

    def started(self, step: int, total_steps: int, seconds: Mapping[str, float], why: str) -> None:
        """Notes that a process takes the run up, after what seconds by phase; a run that is at its end is left as it is."""
        self._takes_part = step < total_steps
        if not self._takes_part:
            return
        engine = self._engine
        self._event(
            step,
            "started",
            why,
            generation=engine.generation,
            how=engine.executor.how,
            total_steps=total_steps,
            seconds=dict(seconds),
        )

    def ended(self, step: int, error: BaseException | None) -> None:
        """Notes that the process leaves the run, and why."""
        if not self._takes_part:
            return
        why = "finished" if error is None else " ".join(f"{type(error).__name__}: {error}".split())
        self._event(step, "ended", "interrupted" if isinstance(error, KeyboardInterrupt) else why)

    def ask(self, *, step: int, epoch: int, lr: float) -> None:
        """Notes the metrics as they stand in the queue, and writes the line asked for before."""
        self.write()
        optimizer = self._engine.optimizer
        assert optimizer is not None
        snapshot = self._engine.metrics.snapshot(optimizer.grad_norm, optimizer.skipped)
        self.step = step
        self._asked = _Asked({"step": step, "epoch": epoch, "lr": lr}, snapshot, self._watch(), time.perf_counter())
        if snapshot.ready():  # always on the CPU; on a GPU the step is still in the queue
            self.write()

    def write(self) -> None:
        """Writes the line that was asked for, if there is one; waits for its numbers."""
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        sums = asked.snapshot.read()
        grad_norm, skipped = asked.snapshot.beside()
        means = (sums - self.sums).means()
        # Now: of the steps alone. The mean has evaluations and checkpoints in it.
        stepping_s = asked.machine["seconds"] - asked.machine["aside_s"]
        tokens_per_s = (sums.sums["useful_tokens"] - self._seen_tokens) / max(1e-9, stepping_s)
        mean = (sums.sums["useful_tokens"] - self._first_tokens) / max(1e-9, asked.at_s - self._began_s)
        self.sums, self._seen_tokens = sums, sums.sums["useful_tokens"]
        self.means = asked.head | means
        record = self.means | {
            "grad_norm": grad_norm,
            "skipped_steps": int(skipped),
            "tokens_per_s": tokens_per_s,
            "machine": asked.machine | {"tokens_per_s_mean": mean},
        }
        self._file.write(record)
        self._tell(record)

    def _event(self, step: int, event: str, why: str, **more: Any) -> None:
        # The wall clock is for people; nothing is reckoned from it.
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._file.write({"step": step, "event": event, "time": now, "why": why, **more})
