"""`python -m bench.reliability long-run`: does a run of minutes keep its memory and its pace?

On the CPU the demo's drafter and target for 2,000 steps; on CUDA W1's drafter over six buckets for seven minutes after its
warm-up, from a dataset on disk, with lines, evaluations and checkpoints as a run has them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from bench.long_run import WatchedRun, watch
from bench.long_run_verdict import rates, read_lines, slow_steps, verdicts
from bench.mixture import Mixture
from bench.options import out_option, plot_option
from bench.plots import check_plot, plot_lines
from bench.start import LENGTHS
from bench.temporary_data import write_samples
from bench.timing import provenance, write_result
from bench.workloads import WORKLOADS, Workload
from engine import demo
from engine.assemble import resolve_device
from engine.cli_options import set_option
from engine.reports import make_console, print_table
from engine.settings import BucketsSettings, DataSettings, ModelSettings, RunSettings, Settings, load_settings
from engine.target import load_target

STEPS, MINUTES = 2000, 7.0
# A run on the CPU has smaller batches than the demo's: 2,000 of them in minutes.
CPU_TOKENS, CPU_SAVE_EVERY, CPU_EVAL_EVERY = 1024, 100, 180
# On CUDA a checkpoint every quarter of a minute or so: the first two belong to the warm-up.
CUDA_SAVE_EVERY = 250
MIXTURE = Mixture(samples=200)


@click.command("long-run")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--steps", type=click.IntRange(min=20), help=f"Steps; {STEPS:,} on the CPU, no bound on CUDA.")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    help=f"After the warm-up; {MINUTES:g} on CUDA, no bound on the CPU.",
)
@click.option(
    "--every", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True, help="Seconds between samples."
)
@set_option
@out_option
@plot_option
def long_run(
    device: str,
    steps: int | None,
    minutes: float | None,
    every: float,
    overrides: tuple[str, ...],
    out: Path | None,
    plot: Path | None,
) -> None:
    """Memory, threads, files, objects and every step's time over a long run."""
    try:
        record = _measured(device, steps, minutes, every, overrides, plot)
    except ValueError as error:  # settings that do not fit, or a run that is too short
        raise click.ClickException(str(error)) from error
    write_result(record, out)
    if plot is not None:
        _plot(record, plot)
    print_table(
        make_console(),
        f"{record['where']['gpu'] or 'CPU'}, torch {record['where']['torch']}, {record['where']['commit']}",
        ("what", "measured", "allowed", "holds"),
        (tuple(row.values()) for row in record["table"]),
    )
    print(json.dumps(record))
    if failed := [row["what"] for row in record["table"] if row["holds"] == "**no**"]:
        raise click.ClickException(
            f"expected a run that keeps its memory and its pace, found otherwise: {'; '.join(failed)}"
        )


def _measured(
    device: str,
    steps: int | None,
    minutes: float | None,
    every_s: float,
    overrides: tuple[str, ...],
    plot: Path | None,
) -> dict[str, Any]:
    check_plot(plot)
    with tempfile.TemporaryDirectory(prefix="dflash-long-") as name:
        folder = Path(name)
        if device == "cpu":
            settings = demo_run(folder, steps or STEPS)
        else:
            minutes = minutes or (None if steps else MINUTES)
            settings = workload_run(folder, steps or 1_000_000, resolve_device("cuda"))
        (folder / "run.toml").write_text(settings.to_toml())
        run, figures = watch(load_settings(folder / "run.toml", overrides), minutes=minutes, every_s=every_s)
        return judged(run, figures)


def demo_run(folder: Path, steps: int) -> Settings:
    """The demo's drafter on the embedded target's hidden states, written to `folder`."""
    demo.write_datasets(load_target(demo.EMBEDDED_TARGET, torch.device("cpu"), torch.float32), folder, seed=0)
    settings = demo.demo_settings(folder, steps=steps, seed=0, device="cpu")
    return replace(
        settings,
        buckets=replace(settings.buckets, token_budget=CPU_TOKENS),
        run=replace(settings.run, save_every=CPU_SAVE_EVERY, eval_every=CPU_EVAL_EVERY),
    )


def workload_run(
    folder: Path,
    steps: int,
    device: torch.device,
    workload: Workload = WORKLOADS["W1"],
    lengths: tuple[int, ...] = LENGTHS,
    mixture: Mixture = MIXTURE,
) -> Settings:
    """A workload's drafter on random samples of mixed lengths, written to `folder`, over buckets of these lengths; evaluations
    and lines at their defaults."""
    for name, samples, seed in (("data", mixture.samples, 0), ("held-out-data", mixture.samples // 10, 1)):
        # Two of each length, so that every bucket has a batch in each epoch, and in each evaluation.
        drawn = [*lengths, *lengths, *replace(mixture, samples=samples).lengths(seed).tolist()]
        write_samples(folder / name, workload, drawn, device, with_target=name == "data")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Settings(
        model=ModelSettings(block_size=workload.K),
        data=DataSettings(path=str(folder / "data"), eval_path=str(folder / "held-out-data")),
        buckets=BucketsSettings(lengths=lengths),
        run=RunSettings(
            output=str(folder / "run"),
            max_steps=steps,
            epochs=1_000_000,
            device="cuda" if device.type == "cuda" else "cpu",
            save_every=CUDA_SAVE_EVERY,
        ),
    )


def judged(run: WatchedRun, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a watched run: the page's table, what it is made of, and the samples."""
    warm_from = run.warm_from or 0
    lines = read_lines(run.folder / "metrics.jsonl")
    cuda = run.engine.device.type == "cuda"
    first, last, window = rates(run.step_log, warm_from)
    columns = {name: values for name, values in run.samples.columns().items() if not np.isnan(values).any()}
    return {
        "where": provenance(),
        "table": [verdict.row() for verdict in verdicts(run.step_log, run.samples, warm_from, lines)],
        "steps": run.step_log.count,
        "warm_from_step": warm_from,
        "how": figures["how"],
        "buckets": run.step_log.buckets,
        "every": {name: getattr(run.settings.run, f"{name}_every") for name in ("log", "eval", "save")},
        "slow_steps": slow_steps(run.step_log, warm_from),
        "tokens_per_s": {"first": first, "last": last, "seconds": window}
        if cuda
        else {"last_over_first": last / first},
        "device_allocations": figures["device_allocations"],
        "compilations": figures["compilations"],
        "input_wait_ms": figures["input_wait_ms"],
        "samples": {name: [round(float(value), 3) for value in values] for name, values in columns.items()},
    }


def _plot(record: Mapping[str, Any], plot: Path) -> None:
    seen = record["samples"]
    memory = {name: (seen["seconds"], seen[name]) for name in seen if name.endswith("_mib")}
    counts = {name: (seen["seconds"], seen[name]) for name in ("threads", "files")}
    title = f"{record['where']['gpu'] or 'CPU'}: {record['steps']:,} steps"
    plot_lines(plot, title, {"MiB": memory, "count": counts}, x="seconds")
