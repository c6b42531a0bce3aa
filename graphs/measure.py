"""Device and host milliseconds of a step, for the question whether replaying it pays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepCost:
    """Medians: from one call's end to the next one's on the device, and until the call returns to an idle device."""

    device_ms: float
    host_ms: float


def step_cost(step: Callable[[], object], device: torch.device, *, repeats: int = 5) -> StepCost:
    """What calling `step` costs on a CUDA device; it is called 2 * repeats + 2 times."""
    for _ in range(2):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    device_ms = [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
    host_ms = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        host_ms.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize(device)
    return StepCost(statistics.median(device_ms), statistics.median(host_ms))
