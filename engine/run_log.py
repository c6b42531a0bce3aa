"""The lines of metrics.jsonl and of the terminal, written without stopping the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.engine import Engine
from engine.metrics import MetricsSnapshot, MetricSums
from engine.reports import MetricsLog


@dataclass(frozen=True)
class _Asked:
    """A line that waits for its numbers."""

    head: dict[str, Any]
    snapshot: MetricsSnapshot
    at_s: float


class RunLog:
    """A line is asked for at one step and written at a later one, when its numbers have come over."""

    def __init__(
        self,
        engine: Engine,
        file: MetricsLog,
        say: Callable[[str], None],
        *,
        logged: MetricSums | None,
        total_steps: int,
    ) -> None:
        """logged: the metrics' sums at the last line of an interrupted run, so that the next line is the uninterrupted
        run's."""
        now = engine.metrics.snapshot().read()
        self.sums = now if logged is None else logged
        self.means: dict[str, Any] = file.last("loss")
        self.step: int = self.means.get("step", 0)
        self._engine, self._file, self._say, self.total_steps = engine, file, say, total_steps
        self._asked: _Asked | None = None
        self._seen_tokens, self._written_s = now.sums["useful_tokens"], time.perf_counter()

    def ask(self, *, step: int, epoch: int, lr: float) -> None:
        """Notes the metrics as they stand in the queue, and writes the line asked for before."""
        self.write()
        optimizer = self._engine.optimizer
        assert optimizer is not None
        snapshot = self._engine.metrics.snapshot(optimizer.grad_norm, optimizer.skipped)
        self.step = step
        self._asked = _Asked({"step": step, "epoch": epoch, "lr": lr}, snapshot, time.perf_counter())
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
        tokens_per_s = (sums.sums["useful_tokens"] - self._seen_tokens) / max(1e-9, asked.at_s - self._written_s)
        self.sums, self._seen_tokens, self._written_s = sums, sums.sums["useful_tokens"], asked.at_s
        self.means = asked.head | means
        self._file.write(
            self.means | {"grad_norm": grad_norm, "skipped_steps": int(skipped), "tokens_per_s": tokens_per_s}
        )
        bad = f", {int(skipped)} steps skipped" if skipped else ""
        self._say(
            f"step {asked.head['step']}/{self.total_steps}: loss {means['loss']:.4f}, accuracy {means['accuracy']:.3f}, "
            f"accepted length {means['accept_len']:.3f}, {tokens_per_s:,.0f} tokens/s{bad}"
        )
