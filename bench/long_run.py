"""A training run that is watched for minutes: every step's time, and memory, threads, files and objects every few seconds."""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from buffers.batching import Batch
from engine.run import TrainingRun
from engine.settings import Settings
from engine.train import take_steps

MIB = 2**20
EVALUATION, CHECKPOINT = 1, 2
_ROOM = 1 << 18  # steps; taken beforehand, so that what is noted of a step takes no new memory


class StepLog:
    """Milliseconds of each step from the end of the one before to its own: between events of the stream on CUDA, on the CPU by
    the host's clock less the time in which the thread was ready and another process had its core."""

    def __init__(self, device: torch.device) -> None:
        self.count = 0
        self.buckets: list[str] = []
        self._cuda = device.type == "cuda"
        self._ms, self._tokens = np.zeros(_ROOM, np.float32), np.zeros(_ROOM, np.int32)
        self._bucket, self._aside = np.zeros(_ROOM, np.int16), np.zeros(_ROOM, np.uint8)
        for array in (self._ms, self._tokens, self._bucket, self._aside):
            array.fill(1)  # touched, so that it is in memory from now on
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._timed = 0
        self._spare: list[torch.cuda.Event] = []
        self._before: Any = self._stamp()

    def ended(self, batches: tuple[Batch, ...], aside: int) -> None:
        """A step over these batches was queued; aside: what was done since the one before."""
        name = " + ".join(sorted({batch.bucket.name for batch in batches}))
        if name not in self.buckets:
            self.buckets.append(name)
        if self.count == _ROOM:
            raise ValueError(f"expected at most {_ROOM} steps in a watched run; lower --minutes")
        at = self.count
        self._tokens[at] = sum(batch.useful_tokens for batch in batches)
        self._bucket[at], self._aside[at] = self.buckets.index(name), aside
        self.count += 1
        now = self._stamp()
        if self._cuda:
            self._pending.append((self._before, now))
            self._harvest()
        else:
            self._ms[at] = now - self._before
            self._timed += 1
        self._before = now

    def go_on(self) -> None:
        """On the CPU what was done since the last step's end does not count for the next."""
        if not self._cuda:
            self._before = self._stamp()

    def ms(self) -> NDArray[np.float32]:
        """Of all steps so far; waits for the device."""
        self._harvest(wait=True)
        return self._ms[: self.count]

    def tokens(self) -> NDArray[np.int32]:
        """Useful tokens of each step."""
        return self._tokens[: self.count]

    def bucket(self) -> NDArray[np.int16]:
        """Of each step, an index into `buckets`."""
        return self._bucket[: self.count]

    def aside(self) -> NDArray[np.uint8]:
        """EVALUATION and CHECKPOINT, where they came before a step."""
        return self._aside[: self.count]

    def _stamp(self) -> Any:
        if not self._cuda:
            return _own_ms()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _harvest(self, *, wait: bool = False) -> None:
        while self._pending and (wait or self._pending[0][1].query()):
            before, now = self._pending.popleft()
            now.synchronize()
            self._ms[self._timed] = before.elapsed_time(now)
            self._timed += 1
            self._spare.append(before)


class Samples:
    """What the process holds, looked at every few seconds. Columns: NAMES."""

    NAMES = (
        "seconds",
        "step",
        "host_mib",
        "host_anonymous_mib",
        "threads",
        "files",
        "objects",
        "device_reserved_mib",
        "device_allocated_mib",
        "device_used_mib",
    )

    def __init__(self, device: torch.device, every_s: float) -> None:
        self._device, self._every_s = device, every_s
        self._rows = np.full((1 << 14, len(self.NAMES)), np.nan)
        self._count, self._next_s = 0, 0.0

    def due(self) -> bool:
        """Whether it is time for the next."""
        return time.perf_counter() >= self._next_s

    def take(self, step: int) -> None:
        """Looks now."""
        if self._count == len(self._rows):
            raise ValueError(f"expected at most {len(self._rows)} samples of a watched run; raise --every")
        now = time.perf_counter()
        host = host_mib()
        counts = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        self._rows[self._count] = (now, step, *host, *counts, len(gc.get_objects()), *device_mib(self._device))
        self._count += 1
        self._next_s = now + self._every_s

    def columns(self, first_step: int = 0) -> dict[str, NDArray[np.float64]]:
        """By name, from a step on; seconds count from the first of them, device memory is nan without a device."""
        rows = self._rows[: self._count]
        rows = rows[rows[:, 1] >= first_step].copy()
        if len(rows):
            rows[:, 0] -= rows[0, 0]
        return dict(zip(self.NAMES, rows.T, strict=True))


class WatchedRun(TrainingRun):
    """A TrainingRun that notes its steps, and ends `minutes` after its warm-up, if that comes before its last step.

    The warm-up is the first tenth of the steps, warm_up_s at most; an epoch, whose pages of the dataset are in memory from
    then on; and where the settings have them, an evaluation and two checkpoints."""

    def __init__(self, settings: Settings, *, minutes: float | None, every_s: float, warm_up_s: float) -> None:
        super().__init__(settings, resume=False, quiet=True)
        self.minutes, self.warm_up_s = minutes, warm_up_s
        self.step_log = StepLog(self.engine.device)
        self.samples = Samples(self.engine.device, every_s)
        self.warm_from: int | None = None
        self._began_steps_s = self._warm_s = time.perf_counter()
        self._aside = self._evaluations = self._checkpoints = 0

    def steps(self) -> Iterator[tuple[Batch, ...]]:
        """Those of the run, until the minutes are over."""
        self.step_log.go_on()
        for batches in super().steps():
            yield batches
            if self._over():
                self.total_steps = self.progress.step
                break
        self.samples.take(self.progress.step)

    def took(self, batches: tuple[Batch, ...]) -> None:
        """A step was queued."""
        super().took(batches)
        self.step_log.ended(batches, self._aside)
        self._aside = 0
        if self.warm_from is None and self._is_warm():
            self.warm_from, self._warm_s = self.progress.step, time.perf_counter()
            self.samples.take(self.progress.step)
        elif self.samples.due():
            self.samples.take(self.progress.step)
        self.step_log.go_on()

    def evaluate(self) -> None:
        """Notes it."""
        super().evaluate()
        self._aside |= EVALUATION
        self._evaluations += 1

    def save(self) -> None:
        """Notes it."""
        super().save()
        self._aside |= CHECKPOINT
        self._checkpoints += 1

    def _is_warm(self) -> bool:
        run, step = self.settings.run, self.progress.step
        evaluated = self._evaluations or not run.eval_every or self.intake.held_out is None
        saved = self._checkpoints >= 2 or not run.save_every
        enough = step >= self.total_steps // 10 or time.perf_counter() - self._began_steps_s > self.warm_up_s
        return bool(evaluated and saved and enough and self.progress.epoch > 0)

    def _over(self) -> bool:
        if self.minutes is None or self.warm_from is None:
            return False
        return time.perf_counter() - self._warm_s >= 60 * self.minutes


def watch(
    settings: Settings, *, minutes: float | None = None, every_s: float = 2.0, warm_up_s: float = 30.0
) -> tuple[WatchedRun, dict[str, Any]]:
    """Trains as the settings say, in a run.output that holds no run, and returns the run, closed, and its figures. Raises
    ValueError when it ends before it is warm."""
    with WatchedRun(settings, minutes=minutes, every_s=every_s, warm_up_s=warm_up_s) as run:
        figures = take_steps(run)
    if run.warm_from is None:
        raise ValueError(
            "expected a run with steps after an epoch, an evaluation and two checkpoints, found one of "
            f"{run.progress.step} steps; raise --steps, or lower run.eval_every and run.save_every"
        )
    return run, figures


def host_mib() -> tuple[float, float]:
    """What the process has in memory, and how much of it is no file's, MiB."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    page = os.sysconf("SC_PAGE_SIZE") / MIB
    return int(resident) * page, (int(resident) - int(shared)) * page


def device_mib(device: torch.device) -> tuple[float, float, float]:
    """What torch holds and has allocated on the device, and what is in use there by anybody, MiB; nan on the CPU."""
    if device.type != "cuda":
        return (np.nan,) * 3
    free, total = torch.cuda.mem_get_info(device)
    held, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return held / MIB, allocated / MIB, (total - free) / MIB


def _own_ms() -> float:
    """The host's clock less what the thread has waited for a core."""
    waited = waited_for_core_ms()
    while True:
        now, before = time.perf_counter() * 1e3, waited
        waited = waited_for_core_ms()
        if waited == before:  # else it waited between the two clocks
            return now - waited


def waited_for_core_ms() -> float:
    """How long this thread has been ready and without a core so far; 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6
    except (OSError, IndexError):
        return 0.0
