"""The chip's clock, power and temperature while work runs on it, as nvidia-smi tells them ten times a second."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

# What is asked for: under today's names, and under those of drivers before 535, whose power is a mean over a second.
QUERIES = (
    "clocks.sm,clocks.max.sm,power.draw.instant,power.limit,temperature.gpu,clocks_event_reasons.active",
    "clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu,clocks_throttle_reasons.active",
)
# Bits of nvmlDeviceGetCurrentClocksEventReasons, nvml.h.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
_POWER = 0x4 | 0x80
_EVERY_MS, _FIRST_SAMPLE_S = 100, 10.0


@dataclass(frozen=True)
class Sample:
    """One line of nvidia-smi and when it came, by time.perf_counter. None is what the chip does not tell."""

    at_s: float
    clock_mhz: float | None
    max_clock_mhz: float | None
    power_w: float | None
    limit_w: float | None
    temperature_c: float | None
    reasons: int | None


def parse(line: str, at_s: float) -> Sample | None:
    """A line of csv,noheader,nounits with the fields of QUERIES; None for what is no such line."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 6:
        return None
    clock, most, power, limit, celsius = (_number(field) for field in fields[:5])
    if clock is None and power is None:
        return None
    reasons = int(fields[5], 16) if fields[5].startswith("0x") else None
    return Sample(at_s, clock, most, power, limit, celsius, reasons)


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians; the highest temperature; the share of samples under a power cap, and under each reason to hold the clock."""
    told = [sample.reasons for sample in samples if sample.reasons is not None]

    def median(name: str) -> float | None:
        values = [value for sample in samples if (value := getattr(sample, name)) is not None]
        return statistics.median(values) if values else None

    def share(bits: int) -> float | None:
        return sum(bool(reasons & bits) for reasons in told) / len(told) if told else None

    return {
        "samples": len(samples),
        "clock_mhz": median("clock_mhz"),
        "max_clock_mhz": median("max_clock_mhz"),
        "power_w": median("power_w"),
        "power_limit_w": median("limit_w"),
        "temperature_c": max((s.temperature_c for s in samples if s.temperature_c is not None), default=None),
        "power_capped_share": share(_POWER),
        "reasons": {name: share(bit) for bit, name in REASONS.items() if share(bit)},
    }


class ChipLog:
    """nvidia-smi in the background, about one GPU. Where it cannot be had, `why` says so and nothing is measured."""

    def __init__(self, uuid: str, program: str = "nvidia-smi") -> None:
        """uuid: as torch.cuda.get_device_properties gives it, so that CUDA_VISIBLE_DEVICES changes nothing."""
        self.why = ""
        self._gpu = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._program = program
        self._samples: list[Sample] = []
        self._first = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        found = shutil.which(self._program)
        query = next((query for query in QUERIES if self._is_answered(query)), None) if found else None
        if query is None:
            self.why = f"{self._program} does not tell clock and power" if found else f"no {self._program} here"
            return self
        # A terminal of its own: into a pipe it might write by blocks of many lines, long after their time.
        ours, its = os.openpty()
        self._process = subprocess.Popen(
            [*self._ask(query), "-lms", str(_EVERY_MS)],
            stdin=subprocess.DEVNULL,
            stdout=its,
            stderr=subprocess.DEVNULL,
        )
        os.close(its)
        self._thread = threading.Thread(target=self._read, args=(ours,), name="chip log", daemon=True)
        self._thread.start()
        if not self._first.wait(_FIRST_SAMPLE_S):
            self.why = f"{self._program} gave nothing in {_FIRST_SAMPLE_S:.0f} s"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    def figures(self, begin_s: float, end_s: float) -> dict[str, Any]:
        """`summary` of the samples between two moments of time.perf_counter, or why there are none, under `skipped`."""
        samples = [sample for sample in self._samples if begin_s <= sample.at_s <= end_s]
        if self.why or not samples:
            return {"skipped": self.why or f"no sample in {end_s - begin_s:.2f} s"}
        return summary(samples)

    def _ask(self, query: str) -> list[str]:
        return [self._program, "-i", self._gpu, f"--query-gpu={query}", "--format=csv,noheader,nounits"]

    def _is_answered(self, query: str) -> bool:
        with suppress(OSError, subprocess.TimeoutExpired):
            told = subprocess.run(self._ask(query), capture_output=True, text=True, timeout=30)
            return told.returncode == 0 and parse(told.stdout, 0.0) is not None
        return False

    def _read(self, terminal: int) -> None:
        with suppress(OSError), open(terminal, errors="replace") as lines:  # the terminal's end is an OSError
            for line in lines:
                sample = parse(line, time.perf_counter())
                if sample is not None:
                    self._samples.append(sample)
                    self._first.set()


def chip_log(device: torch.device) -> ChipLog:
    """That of a CUDA device."""
    return ChipLog(str(torch.cuda.get_device_properties(device).uuid))


def sustained(
    work: Callable[[], object],
    device: torch.device,
    log: ChipLog,
    *,
    settle_s: float = 1.0,
    seconds: float = 3.0,
) -> dict[str, Any]:
    """Milliseconds of a call among calls in a row for `seconds`, after `settle_s` of the same in which clock and temperature
    settle, and the chip's figures of these seconds."""

    def calls(count: int) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            work()
        _synchronize(device)
        return time.perf_counter() - start

    one_s = calls(3) / 3
    one_s = calls(max(1, round(settle_s / one_s))) / max(1, round(settle_s / one_s))
    count = max(1, round(seconds / one_s))
    begin_s = time.perf_counter()
    spent_s = calls(count)
    return {"ms": spent_s / count * 1e3, "calls": count, **log.figures(begin_s, begin_s + spent_s)}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _number(field: str) -> float | None:
    with suppress(ValueError):
        return float(field)
    return None
