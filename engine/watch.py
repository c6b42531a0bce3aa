"""What the machine does while a run trains: seconds by phase, batches and time by bucket, memory. Read without a wait."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from buffers.shapes import Bucket
from engine.engine import Engine
from engine.reports import BucketCount
from graphs.pool_model import MIB

_PHASES = {"train": "forward and backward", "add": "forward and backward", "update": "update", "eval": "evaluation"}


class Watch:
    """Figures of the time between two readings. Device times are those of the steps whose end has been seen by then: a reading
    waits for none, so the last few steps of the queue count in the next one."""

    def __init__(self) -> None:
        self._last_s = time.perf_counter()
        self._aside_s: dict[str, float] = defaultdict(float)
        self._before: dict[tuple[str | int, ...], float] = {}

    @contextmanager
    def aside(self, name: str, *, after: torch.device | None = None) -> Iterator[None]:
        """Around what the loop does beside its steps: its seconds count under `name`. after: what waits for this device anyway
        does so first, so that the steps in its queue count as steps."""
        if after is not None and after.type == "cuda":
            torch.cuda.synchronize(after)
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._aside_s[name] += time.perf_counter() - began_s

    def read(self, engine: Engine, counts: Mapping[Bucket, BucketCount], wait_ms: float) -> dict[str, Any]:
        """Since the last reading: seconds, aside_s of them beside the steps; device_s by phase; host_s that the loop's thread
        spent on launching, waiting for input and each thing aside; memory_mib held now; and of each bucket batches,
        useful_tokens, slot_tokens, and device_ms of the `timed` batches. counts and wait_ms: those of the run so far."""
        now_s = time.perf_counter()
        seconds, self._last_s = now_s - self._last_s, now_s
        of = engine.generation
        device_s: dict[str, float] = defaultdict(float)
        host_s: dict[str, float] = defaultdict(float)
        buckets: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for bucket, count in counts.items():
            for name, value in vars(count).items():
                buckets[bucket.name][name] = self._since((of, bucket.name, name), value)
        for step, spent in engine.executor.times.read().items():
            kind, _, bucket_name = step.partition(" ")
            device_ms = self._since((of, step, "device_ms"), spent.device_ms)
            device_s[_PHASES[kind]] += device_ms / 1e3
            if kind != "eval":  # those stand under "evaluation", with their reading
                host_s["launching"] += self._since((of, step, "host_ms"), spent.host_ms) / 1e3
            if kind in ("train", "add"):
                buckets[bucket_name]["device_ms"] += device_ms
                buckets[bucket_name]["timed"] += self._since((of, step, "timed"), spent.timed)
        host_s["waiting for input"] = self._since(("wait",), wait_ms) / 1e3
        asides = {name: self._since(("aside", name), aside_s) for name, aside_s in self._aside_s.items()}
        return {
            "generation": of,
            "seconds": seconds,
            "aside_s": sum(asides.values()),
            "device_s": dict(device_s),
            "host_s": dict(host_s) | asides,
            "memory_mib": memory_mib(engine.device),
            "buckets": {name: dict(figures) for name, figures in buckets.items() if figures.get("batches")},
        }

    def _since(self, key: tuple[str | int, ...], now: float) -> float:
        before, self._before[key] = self._before.get(key, 0), now
        return now - before if now >= before else now  # less than before: counted anew


def memory_mib(device: torch.device) -> dict[str, float]:
    """What torch holds on the device and what the process has in memory (its mapped files included), as far as it is known."""
    found = {}
    if device.type == "cuda":
        found["device"] = torch.cuda.memory_reserved(device) / MIB
    resident = Path("/proc/self/statm")
    if resident.is_file():
        found["host"] = int(resident.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
    return found


def device_share(machine: Mapping[str, Any]) -> float:
    """The part of the time in which the device was at work; at most 1."""
    return min(1.0, sum(machine["device_s"].values()) / max(1e-9, machine["seconds"]))
