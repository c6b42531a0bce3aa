"""Training steps as the loop takes them, with their batches from the loader: what the device and the host do between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.subjects import DatasetSubjects
from bench.timing import spread
from bench.whole_step import LR, batches_for_ever

Stamp = Callable[[], Any]


@dataclass(frozen=True)
class FedSteps:
    """Milliseconds by step: step_ms from the end of the step before to its own; idle_ms of it the device waited before its first
    kernel, the copy into the static inputs included; host_ms the training thread was at work; launch_ms from the start of its
    launches to their end, waits for the interpreter included. loader_wait_ms: of all steps, where the loader was behind."""

    step_ms: list[float]
    idle_ms: list[float]
    host_ms: list[float]
    launch_ms: list[float]
    loader_wait_ms: float

    @property
    def idle_share(self) -> float:
        """Of the whole time."""
        return sum(self.idle_ms) / sum(self.step_ms)

    @property
    def mean_ms(self) -> float:
        """Of a step: what throughput is made of."""
        return statistics.fmean(self.step_ms)

    def figures(self) -> dict[str, Any]:
        """For a record."""
        return {
            "step_ms": self.mean_ms,
            "step_spread": spread(self.step_ms),
            "device_idle_ms": statistics.fmean(self.idle_ms),
            "device_idle_share": self.idle_share,
            "host_work_ms": statistics.median(self.host_ms),
            "launch_ms": statistics.median(self.launch_ms),
            "loader_wait_ms": self.loader_wait_ms / len(self.step_ms),
        }


def fed_steps(
    subjects: DatasetSubjects, *, repeats: int, warm_ups: int = 3, eager: bool = False, epochs: int = 0
) -> FedSteps:
    """Whole steps over the batches of `subjects`, again and again (epochs 1: once). eager: called instead of replayed.

    Raises ValueError when the batches end before `repeats` steps after the warm-ups.
    """
    engine, inputs = subjects.engine, subjects.inputs
    run = engine.executor.call if eager else engine.executor.run
    stamp = _stamp(engine.device)
    assert engine.optimizer is not None, "a step needs an update"
    engine.zero_()
    inputs.start(subjects.batches if epochs == 1 else batches_for_ever(subjects.batches))
    starts: list[Any] = []
    ends: list[Any] = []
    host: list[float] = []
    launch: list[float] = []
    waits: list[float] = []
    for _ in range(warm_ups + repeats):
        waited, worked = inputs.wait_ms, time.thread_time()
        batch = inputs.next()
        if batch is None:
            raise ValueError(f"expected {warm_ups + repeats} batches, found {len(ends)}; lower --repeats")
        launched = time.perf_counter()
        starts.append(stamp())
        run(f"train {batch.bucket.name}")
        engine.optimizer.lr.fill_(LR)
        run("update")
        ends.append(stamp())
        launch.append((time.perf_counter() - launched) * 1e3)
        host.append((time.thread_time() - worked) * 1e3)
        waits.append(inputs.wait_ms - waited)
    inputs.stop()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    first = max(1, warm_ups)
    pairs = list(zip(ends, starts[1:], strict=False))[first - 1 :]
    return FedSteps(
        [_between(a, b) for a, b in zip(ends[first - 1 :], ends[first:], strict=False)],
        [_between(end, start) for end, start in pairs],
        host[first:],
        launch[first:],
        sum(waits[first:]),
    )


def _stamp(device: torch.device) -> Stamp:
    """A mark on the stream, or on the host's clock where steps are called."""
    if device.type == "cpu":
        return lambda: time.perf_counter() * 1e3

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    return event


def _between(a: Any, b: Any) -> float:
    """Milliseconds from one mark to the other."""
    return b - a if isinstance(a, float) else a.elapsed_time(b)
