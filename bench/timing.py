"""Times of repeated device work, and what a result file must say about where it came from."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def median_ms(step: Callable[[], object], device: torch.device, *, repeats: int, warm_ups: int = 3) -> float:
    """Median of times_ms."""
    return statistics.median(times_ms(step, device, repeats=repeats, warm_ups=warm_ups))


def times_ms(step: Callable[[], object], device: torch.device, *, repeats: int, warm_ups: int = 3) -> list[float]:
    """Milliseconds of each of `repeats` calls: between device events on CUDA, by the host's clock on the CPU."""
    for _ in range(warm_ups):
        step()
    times = []
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda.synchronize(device)
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def spread(samples_ms: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, smallest and largest, and how many."""
    ordered = sorted(samples_ms)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "min": ordered[0],
        "max": ordered[-1],
        "repeats": len(ordered),
    }


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The replay of a graph of one call, so that no launch is counted; on the CPU the call."""
    if device.type == "cpu":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    replay: Callable[[], object] = graph.replay
    return replay


def graph_ms(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median milliseconds of `captured`."""
    return median_ms(captured(work, device), device, repeats=repeats, warm_ups=3 if device.type == "cuda" else 1)


def host_ms(step: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median milliseconds until a call returns, the device idle when it begins."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def matmul_tflops(device: torch.device, size: int = 8192) -> float:
    """The ceiling: bf16 matmul of random square matrices, TFLOP/s."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b, device, repeats=10) / 1e9


def copy_gb_per_s(device: torch.device, nbytes: int = 2**31) -> float:
    """The other ceiling: a copy of nbytes on the device, GB/s of bytes read and written."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / median_ms(lambda: target.copy_(source), device, repeats=10) / 1e6


def provenance() -> dict[str, Any]:
    """GPU, versions, commit, command and time of a measurement."""
    import triton

    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": _commit(),
        "command": " ".join([_program(), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_result(figures: dict[str, Any], out: Path | None) -> None:
    """Writes a result as JSON, if a file is wanted."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(figures, indent=1) + "\n")


def _program() -> str:
    """How this process was called, without the machine's paths."""
    script = Path(sys.argv[0])
    module = script.parent.name == "bench" and script.stem not in ("cli", "__main__")
    return f"python -m bench.{script.stem}" if module else "dflash-engine"


def _commit() -> str:
    """DFLASH_COMMIT, by which a copy without history is told its commit; else that of the checkout, "+changes" when it has
    uncommitted ones."""
    if told := os.environ.get("DFLASH_COMMIT"):
        return told
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
