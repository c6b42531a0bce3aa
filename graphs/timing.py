"""Device and host time of every named step, from events that are read when they have passed: never by waiting."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

_MAX_PENDING = 4096


@dataclass
class StepTime:
    """count steps took host_ms in the calling thread, and `timed` of them, whose end was seen, device_ms on the device; sums."""

    count: int = 0
    device_ms: float = 0.0
    host_ms: float = 0.0
    timed: int = 0
    samples_ms: deque[float] = field(default_factory=lambda: deque(maxlen=1024))

    def __add__(self, other: StepTime) -> StepTime:
        """Both steps' times as one's; the samples of the first come first."""
        samples = deque([*self.samples_ms, *other.samples_ms], maxlen=1024)
        return StepTime(
            self.count + other.count,
            self.device_ms + other.device_ms,
            self.host_ms + other.host_ms,
            self.timed + other.timed,
            samples,
        )


class StepTimes:
    """Times by step name. On the CPU (device None) the device's time is the call's."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._times: dict[str, StepTime] = defaultdict(StepTime)
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Around one step."""
        begin = self._record()
        start = time.perf_counter()
        yield
        elapsed_ms = (time.perf_counter() - start) * 1e3
        of_step = self._times[name]
        of_step.count += 1
        of_step.host_ms += elapsed_ms
        if begin is None:
            of_step.device_ms += elapsed_ms
            of_step.timed += 1
            of_step.samples_ms.append(elapsed_ms)
            return
        end = self._record()
        assert end is not None
        self._pending.append((name, begin, end))
        self._harvest(wait=len(self._pending) > _MAX_PENDING)

    def read(self, *, wait: bool = False) -> dict[str, StepTime]:
        """Sums so far; with wait, of all steps begun (the device is waited for)."""
        self._harvest(wait=wait)
        return dict(self._times)

    def unfinished(self) -> str:
        """The oldest step that the device has not finished, or "": for another thread that wonders."""
        for name, _, end in tuple(self._pending):
            if not end.query():
                return name
        return ""

    def clear(self) -> None:
        """Forgets everything measured."""
        self._harvest(wait=True)
        self._times.clear()

    def _record(self) -> torch.cuda.Event | None:
        if self._device is None:
            return None
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _harvest(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0][2].query()):
            name, begin, end = self._pending.popleft()
            end.synchronize()
            elapsed_ms = begin.elapsed_time(end)
            self._times[name].device_ms += elapsed_ms
            self._times[name].timed += 1
            self._times[name].samples_ms.append(elapsed_ms)
            self._spare += [begin, end]
