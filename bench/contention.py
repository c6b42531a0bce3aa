"""`dflash-engine bench contention`: training steps with busy pure-Python threads in the process, eager beside replay."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.fed_steps import FedSteps, fed_steps
from bench.plots import check_plot, plot_bars
from bench.ratios import CPU_NOTE, without_speeds
from bench.subjects import DatasetSubjects, trained_from_disk
from bench.temporary_data import samples_that_fit, temporary_samples
from bench.timed_step import check_replay
from bench.timing import provenance, write_result
from bench.workloads import Workload, chosen_workloads
from engine.assemble import resolve_device
from engine.reports import make_console, print_table
from engine.settings import Settings
from engine.turns import short_turns

THREADS = {"cuda": (0, 1, 2, 4, 8), "cpu": (0, 1, 2)}
# Eager steps slower than this are not waited for with even more threads.
_MOST_EAGER_MS = 3000.0
_EAGER_STEPS = 3


def run(
    settings: Settings,
    *,
    workloads: Sequence[str] = (),
    threads: Sequence[int] = (),
    repeats: int = 20,
    out: Path | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Measures and prints; returns (and writes to `out`) a record a number of busy threads, THREADS without `threads`.

    Raises ValueError when the replay differs from the eager step.
    """
    check_plot(plot)
    device = resolve_device(settings.run.device)
    (workload,) = chosen_workloads(workloads[:1], device, default=("W2",))
    rows = _measure(workload, settings, device, threads or THREADS[device.type], repeats)
    figures: dict[str, Any] = {
        "where": provenance(),
        "workload": workload.name,
        "bucket": workload.bucket.name,
        "equals_eager": True,
        "contention": rows,
    }
    if device.type == "cpu":
        figures |= {"note": CPU_NOTE, "contention": [without_speeds(row) for row in rows]}
    _print(figures)
    write_result(figures, out)
    if plot is not None:
        _plot(figures, plot)
    return figures


def _measure(
    workload: Workload, settings: Settings, device: torch.device, threads: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    interval = settings.run.switch_interval_ms
    repeats, warm_ups = (repeats, 4) if device.type == "cuda" else (min(repeats, 5), 1)
    rows: list[dict[str, Any]] = []
    counts = sorted({0, *threads})
    lengths = [workload.S] * samples_that_fit(workload)
    with (
        temporary_samples(workload, lengths, device) as folder,
        trained_from_disk(folder, workload, settings, device) as subjects,
    ):
        check_replay(subjects.subject(workload.bucket))
        with short_turns(interval):
            eager_ms: list[float] = []
            for count in counts:
                with busy_threads(count):
                    rows.append(_row(count, interval, fed_steps(subjects, repeats=repeats, warm_ups=warm_ups), rows))
                    if device.type == "cuda" and (not eager_ms or eager_ms[-1] < _MOST_EAGER_MS):
                        eager = fed_steps(subjects, repeats=_EAGER_STEPS, warm_ups=1, eager=True)
                        eager_ms.append(eager.mean_ms)
                        rows[-1] |= {
                            "eager_step_ms": eager.mean_ms,
                            "eager_throughput_left": eager_ms[0] / eager.mean_ms,
                        }
        if counts[-1]:
            rows.append(_with_pythons_own_turns(subjects, counts[-1], rows))
        del subjects
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _with_pythons_own_turns(subjects: DatasetSubjects, count: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the setting is for: the same with a switch interval of 5 ms, in few steps."""
    with short_turns(5.0), busy_threads(count):
        return _row(count, 5.0, fed_steps(subjects, repeats=2, warm_ups=1), rows)


def _row(count: int, interval: float, steps: FedSteps, rows: list[dict[str, Any]]) -> dict[str, Any]:
    alone_ms = rows[0]["step_ms"] if rows else steps.mean_ms
    return {
        "threads": count,
        "switch_interval_ms": interval,
        **steps.figures(),
        "throughput_left": alone_ms / steps.mean_ms,
    }


@contextmanager
def busy_threads(count: int) -> Iterator[None]:
    """Inside, so many threads run Python without ever waiting for anything but their turn."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            for _ in range(1000):
                pass

    threads = [threading.Thread(target=spin, name=f"busy {i}", daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _print(figures: dict[str, Any]) -> None:
    where = figures["where"]

    def number(row: dict[str, Any], key: str, form: str) -> str:
        return "-" if row.get(key) is None else format(row[key], form)

    print_table(
        make_console(),
        f"{figures['workload']} {figures['bucket']}, {where['gpu'] or 'CPU'}, torch {where['torch']}, {where['commit']}"
        + (f"; {figures['note']}" if "note" in figures else ""),
        (
            "busy threads",
            "turns ms",
            "step ms",
            "throughput left",
            "device idle",
            "launch ms",
            "eager ms",
            "throughput left",
        ),
        (
            (
                str(row["threads"]),
                f"{row['switch_interval_ms']:g}",
                number(row, "step_ms", ".2f"),
                f"{row['throughput_left']:.1%}",
                f"{row['device_idle_share']:.2%}",
                number(row, "launch_ms", ".2f"),
                number(row, "eager_step_ms", ".1f"),
                number(row, "eager_throughput_left", ".1%"),
            )
            for row in figures["contention"]
        ),
    )


def _plot(figures: dict[str, Any], plot: Path) -> None:
    rows = figures["contention"]
    groups = [f"{row['threads']} threads\nturns of {row['switch_interval_ms']:g} ms" for row in rows]
    series = {
        name: [None if row.get(key) is None else row[key] * 100 for row in rows]
        for name, key in (("replay", "throughput_left"), ("eager", "eager_throughput_left"))
    }
    title = f"{figures['where']['gpu'] or 'CPU'}, {figures['workload']}: throughput beside busy Python threads"
    plot_bars(plot, title, groups, series, unit="% of that without them")
