"""`dflash-engine bench start`: the seconds before a training run's first step, with empty caches of compiled kernels and full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.plots import check_plot, plot_bars
from bench.ratios import CPU_NOTE, without_speeds
from bench.temporary_data import temporary_samples
from bench.timing import provenance, write_result
from bench.workloads import chosen_workloads
from engine.assemble import resolve_device
from engine.reports import make_console, print_table
from engine.settings import Settings

# Six buckets, and twelve: a sample of each length is enough for a run to be built.
LENGTHS = (512, 1024, 1536, 2048, 3072, 4096)
TWELVE = (256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
_ROOT = Path(__file__).parent.parent


def run(
    settings: Settings,
    *,
    workloads: Sequence[str] = (),
    buckets: int = 6,
    repeats: int = 1,
    out: Path | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Measures and prints; returns (and writes to `out`) a record a start: one cold, then `repeats` warm ones.

    buckets: 6 or 12. A start verifies every bucket's replay against its eager twin, as training does; one that fails raises
    ValueError with what it said, and so does a warm one that compiled a kernel.
    """
    check_plot(plot)
    device = resolve_device(settings.run.device)
    (workload,) = chosen_workloads(workloads[:1], device, default=("W2",))
    lengths: tuple[int, ...] = TWELVE if buckets == 12 else LENGTHS
    if device.type == "cpu":
        lengths = tuple(range(128, 128 * (buckets + 1), 128))
    rows: list[dict[str, Any]] = []
    with (
        temporary_samples(workload, lengths, device, with_target=True) as data,
        tempfile.TemporaryDirectory(prefix="dflash-start-") as folder,
    ):
        if device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        for name in ("cold", *["warm"] * repeats):
            make_console(stderr=True).print(f"{name} start ...")
            row = {"start": name, **_start(settings, workload.K, lengths, data, Path(folder), len(rows))}
            if name == "warm" and row["kernels_compiled"]:
                raise ValueError(
                    f"start {len(rows) + 1}: expected every kernel in the caches of the start before, found "
                    f"{row['kernels_compiled']} compiled anew; no time is shown"
                )
            rows.append(row)
    for row in rows:
        row["over_cold"] = row["seconds"] / rows[0]["seconds"]
        row["shares"] = {phase: seconds / row["seconds"] for phase, seconds in row["phases"].items()}
    figures: dict[str, Any] = {
        "where": provenance(),
        "workload": workload.name,
        "verified": device.type == "cuda",
        "starts": rows,
    }
    if device.type == "cpu":
        quiet = [{**row, "seconds": None, "phases": dict.fromkeys(row["phases"])} for row in rows]
        figures |= {"note": CPU_NOTE, "starts": without_speeds(quiet)}
    _print(figures)
    write_result(figures, out)
    if plot is not None:
        series = {phase: [row["shares"][phase] * 100 for row in rows] for phase in rows[0]["phases"]}
        title = f"{figures['where']['gpu'] or 'CPU'}, {workload.name}, {len(lengths)} buckets: a start's phases"
        plot_bars(plot, title, [row["start"] for row in rows], series, unit="% of the start")
    return figures


def _start(settings: Settings, K: int, lengths: Sequence[int], data: Path, folder: Path, number: int) -> dict[str, Any]:
    """Phases of one start; the caches lie in `folder`, so the first one finds none."""
    ours = replace(
        settings,
        model=replace(settings.model, block_size=K),
        data=replace(settings.data, path=str(data)),
        buckets=replace(settings.buckets, lengths=tuple(lengths), max_length=0),
        run=replace(settings.run, output=str(folder / f"run-{number}")),
    )
    config = folder / f"run-{number}.toml"
    config.write_text(ours.to_toml())
    caches = {name: str(folder / name.lower()) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    command = [sys.executable, "-m", "bench.start_once", str(config), str(time.monotonic())]
    done = subprocess.run(command, cwd=_ROOT, env={**os.environ, **caches}, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise ValueError(f"start {number + 1}: expected a run that gets ready, found one that ended: {said}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print(figures: dict[str, Any]) -> None:
    where, rows = figures["where"], figures["starts"]
    phases = list(rows[0]["phases"])

    def cell(row: dict[str, Any], phase: str) -> str:
        seconds = row["phases"][phase]
        return f"{row['shares'][phase]:.0%}" if seconds is None else f"{seconds:.1f} ({row['shares'][phase]:.0%})"

    print_table(
        make_console(),
        f"{figures['workload']}, {len(rows[0]['buckets'])} buckets, {rows[0]['attention']} attention, {where['gpu'] or 'CPU'}, "
        f"torch {where['torch']}, {where['commit']}" + (f"; {figures['note']}" if "note" in figures else ""),
        ("start", "seconds", "of cold", "compiled anew", *phases),
        (
            (
                row["start"],
                "-" if row["seconds"] is None else f"{row['seconds']:.1f}",
                f"{row['over_cold']:.0%}",
                str(row["kernels_compiled"]),
                *(cell(row, phase) for phase in phases),
            )
            for row in rows
        ),
    )
