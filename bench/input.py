"""`dflash-engine bench input`: training steps with their samples from disk. Does the device ever wait for the next batch?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.fed_steps import fed_steps
from bench.page_cache import cached_share, drop_from_cache
from bench.plots import check_plot, plot_bars
from bench.ratios import CPU_NOTE, without_speeds
from bench.subjects import trained_from_disk
from bench.temporary_data import samples_that_fit, temporary_samples
from bench.timed_step import check_replay
from bench.timing import provenance, write_result
from bench.workloads import Workload, chosen_workloads
from engine.assemble import resolve_device
from engine.reports import make_console, print_table
from engine.settings import Settings

_WARM_UPS = 3


def run(
    settings: Settings,
    *,
    workloads: Sequence[str] = (),
    repeats: int = 20,
    out: Path | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Measures and prints; returns (and writes to `out`) two records a workload: samples from the disk, then from the page cache.

    Raises ValueError when the replay differs from the eager step.
    """
    check_plot(plot)
    device = resolve_device(settings.run.device)
    rows: list[dict[str, Any]] = []
    for workload in chosen_workloads(workloads, device, default=("W2",)):
        rows += _workload(workload, settings, device, repeats)
    figures: dict[str, Any] = {"where": provenance(), "input": rows}
    if device.type == "cpu":
        figures |= {"note": CPU_NOTE, "input": [without_speeds(row) for row in rows]}
    _print(figures)
    write_result(figures, out)
    if plot is not None:
        names = [f"{row['workload']}, {row['read_from']}" for row in rows]
        shares = {"device idle between steps": [row["device_idle_share"] * 100 for row in rows]}
        plot_bars(plot, f"{figures['where']['gpu'] or 'CPU'}: waiting for input", names, shares, unit="% of the time")
    return figures


def _workload(workload: Workload, settings: Settings, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    count = samples_that_fit(workload)
    repeats = repeats if device.type == "cuda" else min(repeats, 5)
    rows = []
    with temporary_samples(workload, [workload.S] * count, device) as folder:
        shards = sorted(folder.glob("shard-*.safetensors"))
        drop_from_cache(shards)
        cached = cached_share(shards)
        with trained_from_disk(folder, workload, settings, device) as subjects:
            check_replay(subjects.subject(workload.bucket))
            # Every sample is read once; what the comparison read is one of them.
            steps = min(repeats, count - _WARM_UPS)
            rows.append(fed_steps(subjects, repeats=steps, warm_ups=_WARM_UPS, epochs=1).figures())
            rows[0] |= {
                "read_from": "disk" if cached < 0.5 else "page cache",
                "cached_share_before": cached,
                "steps": steps,
            }
            rows.append(fed_steps(subjects, repeats=repeats, warm_ups=_WARM_UPS).figures())
            rows[1] |= {"read_from": "page cache", "cached_share_before": cached_share(shards), "steps": repeats}
            about = {
                "workload": workload.name,
                "bucket": workload.bucket.name,
                "how": subjects.engine.executor.how,
                "equals_eager": True,
                "sample_mib": workload.S * workload.config().num_taps * workload.hidden_size * 2 / 2**20,
                "samples": count,
            }
            del subjects
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return [{**about, **row} for row in rows]


def _print(figures: dict[str, Any]) -> None:
    where = figures["where"]

    def number(row: dict[str, Any], key: str, form: str) -> str:
        return "-" if row[key] is None else format(row[key], form)

    print_table(
        make_console(),
        f"{where['gpu'] or 'CPU'}, torch {where['torch']}, {where['commit']}"
        + (f"; {figures['note']}" if "note" in figures else ""),
        (
            "workload",
            "read from",
            "cached",
            "steps",
            "step ms",
            "device idle",
            "host work ms",
            "launch ms",
            "loader wait ms",
        ),
        (
            (
                f"{row['workload']} {row['bucket']}",
                row["read_from"],
                f"{row['cached_share_before']:.0%}",
                str(row["steps"]),
                number(row, "step_ms", ".2f"),
                f"{row['device_idle_share']:.2%}",
                number(row, "host_work_ms", ".3f"),
                number(row, "launch_ms", ".3f"),
                number(row, "loader_wait_ms", ".3f"),
            )
            for row in figures["input"]
        ),
    )
