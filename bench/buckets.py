"""`dflash-engine bench buckets`: every bucket's step and a whole epoch, for a dataset or for a mixture of lengths.

The epoch in its buckets is set against the same epoch padded to the longest sample, and replay against eager. Before a speed
is shown every bucket's replay must equal the eager step bit for bit, and the timed replays must allocate and compile nothing.
On the CPU, where steps are called, only ratios are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.mixture import Mixture, mixture_for, mixture_subjects
from bench.plots import check_plot, plot_bars
from bench.ratios import CPU_NOTE, without_speeds
from bench.subjects import Subject, dataset_subjects
from bench.timed_step import measure_step
from bench.timing import matmul_tflops, provenance, write_result
from bench.workloads import Workload, chosen_workloads
from buffers import mixture as datasets
from buffers.batching import Batch
from buffers.dataset import folder_names
from engine.assemble import drafter_config, make_plan, resolve_device
from engine.bucketing import plan_for
from engine.data_source import open_training_data
from engine.reports import make_console, print_table
from engine.settings import Settings


def run(
    data: Path | Sequence[str | Path] | None,
    settings: Settings,
    *,
    samples: int = 2000,
    supervised: float = 1.0,
    workloads: Sequence[str] = (),
    repeats: int,
    out: Path | None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Measures and prints; returns (and writes to `out`) a record a bucket and the epoch's, with where it was measured.

    data: a dataset's folder, or several, mixed by data.weights; without it `samples` of a mixture of lengths, the part
    `supervised` of each with labels, on the model of the first of `workloads` (W2; tiny on the CPU). Raises ValueError when a
    replay differs from its eager step, or allocates or compiles.
    """
    check_plot(plot)
    device = resolve_device(settings.run.device)
    ceiling = matmul_tflops(device) if device.type == "cuda" else None
    if data is not None:
        measured = _dataset(data, settings, device, repeats)
    else:
        (workload,) = chosen_workloads(workloads[:1], device, default=("W2",))
        measured = _mixture(mixture_for(device, samples, supervised), workload, settings, device, repeats)
    figures: dict[str, Any] = {"where": provenance(), "matmul_tflops": ceiling, **measured}
    if device.type == "cpu":
        figures = {**without_speeds(figures), "note": CPU_NOTE}
    _print(figures)
    write_result(figures, out)
    if plot is not None:
        _plot(figures, plot)
    return figures


def _dataset(
    data: Path | Sequence[str | Path], settings: Settings, device: torch.device, repeats: int
) -> dict[str, Any]:
    dataset = open_training_data(data, settings)
    included = dataset.included(0) if isinstance(dataset, datasets.Mixture) else None
    lengths = dataset.lengths if included is None else dataset.lengths[included]
    config = drafter_config(settings, dataset.info)
    longest = make_plan(_unpacked(settings), dataset, config, device).buckets[-1].S
    measured = {}
    for name, variant in _variants(settings, longest).items():
        with dataset_subjects(data, variant, device) as subjects:
            found = [subjects.subject(bucket) for bucket in subjects.engine.buckets]
            measured[name] = _epoch(found, subjects.batches, repeats)
            del subjects, found
        _free(device)
    return _record(measured, {"data": folder_names(dataset), **_lengths(lengths)})


def _mixture(
    mixture: Mixture, workload: Workload, settings: Settings, device: torch.device, repeats: int
) -> dict[str, Any]:
    lengths = mixture.lengths(settings.run.seed)
    plan = plan_for(_unpacked(settings), lengths, mixture.eligible(lengths), workload.config(), device)
    measured = {}
    for name, variant in _variants(settings, plan.buckets[-1].S).items():
        with mixture_subjects(mixture, workload, variant, device) as (subjects, batches):
            measured[name] = _epoch(subjects, batches, repeats)
            del subjects
        _free(device)
    return _record(measured, {"workload": workload.name, "mixture": asdict(mixture), **_lengths(lengths)})


def _unpacked(settings: Settings) -> Settings:
    return replace(settings, buckets=replace(settings.buckets, packing=False))


def _variants(settings: Settings, longest: int) -> dict[str, Settings]:
    """What an epoch is timed in: the settings' buckets; where these pack, also one sample a row; one bucket for all."""
    unpacked = _unpacked(settings)
    # Samples beyond the plan's largest bucket are cut off, left out or split by either way of padding alike.
    padded = replace(unpacked, buckets=replace(unpacked.buckets, lengths=(longest,), max_length=0))
    one_a_row = {"one_sample_a_row": unpacked} if settings.buckets.packing else {}
    return {"buckets": settings, **one_a_row, "pad_to_longest": padded}


def _epoch(
    subjects: Sequence[Subject], batches: Sequence[Batch], repeats: int
) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """(a record a bucket, the epoch replayed and eager): the epoch's time is that of all its batches, one after the other. A
    bucket's padding and useful tokens are those of all its batches too."""
    rows = [measure_step(subject, repeats) for subject in subjects]
    of_bucket = [[batch for batch in batches if batch.bucket == subject.bucket] for subject in subjects]
    counts = list(map(len, of_bucket))
    rows = [row | _filled(own, row["replay_ms"]) for row, own in zip(rows, of_bucket, strict=True)]
    useful = sum(batch.useful_tokens for batch in batches)
    positions = sum(batch.bucket.B * batch.bucket.S for batch in batches)
    epochs = {}
    for way in ("replay", "eager"):
        seconds = sum(count * row[f"{way}_ms"] for count, row in zip(counts, rows, strict=True)) / 1e3
        epochs[way] = {
            "batches": len(batches),
            "seconds": seconds,
            "useful_tokens_per_s": useful / seconds,
            "padding": 1 - useful / positions,
        }
    return [row | {"batches": count} for row, count in zip(rows, counts, strict=True)], epochs


def _filled(batches: Sequence[Batch], replay_ms: float) -> dict[str, float]:
    """Of a bucket's batches in the epoch; nothing of a bucket that the epoch does not have."""
    if not batches:
        return {}
    useful = sum(batch.useful_tokens for batch in batches)
    positions = sum(batch.bucket.B * batch.bucket.S for batch in batches)
    return {
        "padding": 1 - useful / positions,
        "useful_tokens_per_s": useful / (len(batches) * replay_ms / 1e3),
    }


def _record(
    measured: dict[str, tuple[list[dict[str, Any]], dict[str, dict[str, float]]]], about: dict[str, Any]
) -> dict[str, Any]:
    epoch: dict[str, Any] = {}
    for name, (_, ways) in measured.items():
        epoch |= {name: ways["replay"], f"{name}_eager": ways["eager"]}
    for record in epoch.values():
        record["time_over_buckets"] = record["seconds"] / epoch["buckets"]["seconds"]
    return {**about, "buckets": measured["buckets"][0], "epoch": epoch}


def _lengths(lengths: NDArray[np.int64]) -> dict[str, Any]:
    p50, p95 = np.percentile(lengths, [50, 95])
    return {"samples": len(lengths), "length_median": float(p50), "length_p95": float(p95)}


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _print(figures: dict[str, Any]) -> None:
    where, console = figures["where"], make_console()
    said = f", bf16 matmul {figures['matmul_tflops']:.0f} TFLOP/s" if figures["matmul_tflops"] else f"; {CPU_NOTE}"

    def number(row: dict[str, Any], key: str, form: str) -> str:
        return "-" if row[key] is None else format(row[key], form)

    print_table(
        console,
        f"{where['gpu'] or 'CPU'}, torch {where['torch']}, {where['commit']}{said}",
        (
            "bucket",
            "step",
            "batches",
            "ms",
            "eager ms",
            "host ms",
            "eager host",
            "useful tokens/s",
            "padding",
            "TFLOP/s",
            "GiB",
            "start s",
        ),
        (
            (
                r["bucket"],
                r["how"],
                str(r["batches"]),
                number(r, "replay_ms", ".2f"),
                number(r, "eager_ms", ".2f"),
                number(r, "replay_host_ms", ".2f"),
                number(r, "eager_host_ms", ".2f"),
                number(r, "useful_tokens_per_s", ",.0f"),
                f"{r['padding']:.1%}",
                number(r, "tflops", ".3g"),
                number(r, "held_gib", ".2f"),
                "-" if r["capture_s"] is None else f"{r['warm_up_s'] + r['capture_s']:.1f}",
            )
            for r in figures["buckets"]
        ),
    )
    print_table(
        console,
        f"an epoch of {figures['samples']} samples, median {figures['length_median']:.0f} tokens, "
        f"95 of 100 under {figures['length_p95']:.0f}",
        ("rows", "batches", "padding", "seconds", "useful tokens/s", "time / buckets"),
        (
            (
                name.replace("_", " "),
                str(record["batches"]),
                f"{record['padding']:.1%}",
                number(record, "seconds", ".3g"),
                number(record, "useful_tokens_per_s", ",.0f"),
                f"{record['time_over_buckets']:.2f}",
            )
            for name, record in figures["epoch"].items()
        ),
    )


def _plot(figures: dict[str, Any], plot: Path) -> None:
    rows, epoch, gpu = figures["buckets"], figures["epoch"], figures["where"]["gpu"]
    if gpu is None:
        ways = {name.replace("_", " "): [record["time_over_buckets"]] for name, record in epoch.items()}
        plot_bars(plot, "CPU: time of an epoch over that of the buckets", ["epoch"], ways, unit="times")
        return
    names = [row["bucket"] for row in rows] + ["epoch", "epoch padded\nto the longest"]
    replay = [row["useful_tokens_per_s"] for row in rows]
    eager = [row["useful_tokens_per_s"] * row["replay_ms"] / row["eager_ms"] for row in rows]
    for way, values in (("", replay), ("_eager", eager)):
        values += [epoch[f"{name}{way}"]["useful_tokens_per_s"] for name in ("buckets", "pad_to_longest")]
    plot_bars(plot, f"{gpu}: useful tokens/s", names, {"replay": replay, "eager": eager}, unit="useful tokens/s")
