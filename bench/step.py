"""`dflash-engine bench step`: a training step eager, compiled and replayed, and the whole of it against its parts.

Before a speed is shown the replay must equal the eager step bit for bit, forward and backward as well as the update, and the
compiled step's gradient must be the engine's within the precision. On the CPU, where steps are called, only ratios are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.chip import chip_log
from bench.matmuls import beside_bare_matmuls
from bench.plain_torch import CompiledStep
from bench.plots import check_plot, plot_bars
from bench.ratios import CPU_NOTE, without_speeds
from bench.recompute import print_modes, recompute_modes
from bench.subjects import Subject, dataset_subjects, trained_from_disk, workload_subject
from bench.temporary_data import samples_that_fit, temporary_samples
from bench.timed_step import measure_step
from bench.timing import matmul_tflops, provenance, spread, times_ms, write_result
from bench.whole_step import whole_step
from bench.workloads import Workload, chosen_workloads
from engine.assemble import resolve_device
from engine.reports import make_console, print_table
from engine.settings import Settings
from engine.settings_fields import SettingsError

# L2 distance of the whole gradient, relative: bf16 rounds at other places when it is compiled, fp32 sums in another order, fp8
# is compared with a step in bf16.
TOLERANCE = {"bf16": 0.05, "fp32": 1e-4, "fp8": 0.25}


def run(
    settings: Settings,
    *,
    workloads: Sequence[str] = (),
    repeats: int = 20,
    compiled: bool = True,
    whole: bool = True,
    recompute: bool = False,
    out: Path | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Measures and prints; returns (and writes to `out`) a record a workload, or a bucket of data.path without workloads.
    recompute: with every mode of model.recompute under every attention, of a workload.

    Raises ValueError when a comparison fails, SettingsError for a workload too large for the CPU.
    """
    check_plot(plot)
    device = resolve_device(settings.run.device)
    rows: list[dict[str, Any]] = []
    if settings.data.path and not workloads:
        if recompute:
            raise SettingsError("--recompute: expected a named workload, found data.path; add --workload")
        rows += _dataset(settings, device, repeats, compiled, whole)
    else:
        for workload in chosen_workloads(workloads, device, default=("W1", "W2", "W3")):
            rows.append(_workload(workload, settings, device, repeats, compiled, whole))
            if recompute:
                rows[-1]["recompute_modes"] = recompute_modes(workload, settings, device, repeats)
            if device.type == "cuda":
                # What is measured is not lost when a later workload fails.
                write_result({"where": provenance(), "steps": rows}, out)
    ceiling = matmul_tflops(device) if device.type == "cuda" else None
    for row in rows:
        row["matmul_ceiling_share"] = row["tflops"] / ceiling if ceiling else None
    figures: dict[str, Any] = {"where": provenance(), "matmul_tflops": ceiling, "steps": rows}
    if device.type == "cpu":
        figures |= {"note": CPU_NOTE, "steps": [without_speeds(row) for row in rows]}
    _print(figures)
    if recompute:
        print_modes((row["workload"], mode) for row in figures["steps"] for mode in row["recompute_modes"])
    write_result(figures, out)
    if plot is not None:
        _plot(figures, plot)
    return figures


def _workload(
    workload: Workload, settings: Settings, device: torch.device, repeats: int, compiled: bool, whole: bool
) -> dict[str, Any]:
    with workload_subject(workload, settings, device) as subject:
        row = {"workload": workload.name, **_forward_backward(subject, repeats, compiled)}
        if device.type == "cuda":
            with chip_log(device) as log:
                row |= beside_bare_matmuls(subject, settings.model.head_chunk, repeats, log)
        del subject
    _free(device)
    if not whole:
        return row
    lengths = [workload.S] * samples_that_fit(workload)
    with (
        temporary_samples(workload, lengths, device) as folder,
        trained_from_disk(folder, workload, settings, device) as subjects,
    ):
        row |= whole_step(subjects, subjects.subject(workload.bucket), repeats=_repeats(device, repeats))
        del subjects
    _free(device)
    return row


def _dataset(
    settings: Settings, device: torch.device, repeats: int, compiled: bool, whole: bool
) -> Iterator[dict[str, Any]]:
    with dataset_subjects(settings.data.folders, settings, device, optimizer=True) as subjects:
        for bucket in subjects.engine.buckets:
            subject = subjects.subject(bucket)
            row = _forward_backward(subject, repeats, compiled)
            yield row | (whole_step(subjects, subject, repeats=_repeats(device, repeats)) if whole else {})


def _forward_backward(subject: Subject, repeats: int, compiled: bool) -> dict[str, Any]:
    row = measure_step(subject, repeats)
    row |= _compiled(subject, repeats) if compiled else {"compiled_skipped": "--no-compiled"}
    return row


def _compiled(subject: Subject, repeats: int) -> dict[str, Any]:
    """The compiled rival's figures, or why there are none: it may not fit, or this torch may not compile it."""
    engine, device = subject.engine, subject.engine.device
    if device.type == "cpu":
        return {"compiled_skipped": "no GPU: torch.compile for the CPU says nothing about it"}
    if engine.objective.uses_kl or engine.objective.weighting == "dpace":
        return {"compiled_skipped": "the plain-torch step has no soft labels and no D-PACE"}
    step = CompiledStep(engine.parts, subject.inputs, attention="flex")
    try:
        difference = compiled_difference(subject, step)
        subject.memory.forget_peak()
        times = times_ms(step, device, repeats=repeats)
        peak_gib = subject.memory.peak_gib
    except torch.OutOfMemoryError:
        return {"compiled_skipped": "out of GPU memory"}
    except RuntimeError as error:  # torch.compile and Triton have many kinds of it
        return {"compiled_skipped": f"torch.compile: {str(error).strip().splitlines()[0][:200]}"}
    finally:
        step.forget()
        engine.zero_()
        torch._dynamo.reset()
        _free(device)
    return {
        "compiled_ms": spread(times)["median"],
        "compiled_spread": spread(times),
        "compiled_differs_by": difference,
        "compiled_peak_gib": peak_gib,
    }


def compiled_difference(subject: Subject, step: CompiledStep) -> float:
    """L2 distance of the whole gradient, relative to the eager step's. Raises ValueError when it is more than rounding."""
    engine = subject.engine
    subject.fill()
    engine.zero_()
    engine.executor.call(subject.step)
    expected = engine.params.grad.clone()
    engine.zero_()
    step()
    step.collect_gradients()
    apart = (engine.params.grad.float() - expected.float()).norm() / expected.float().norm()
    if not apart.item() <= TOLERANCE[engine.precision]:
        raise ValueError(
            f"bucket {subject.bucket.name}: the compiled step's gradient differs from the eager step's by {apart.item():.1e} of "
            "its norm; no speed is shown"
        )
    return apart.item()


def _repeats(device: torch.device, repeats: int) -> int:
    return repeats if device.type == "cuda" else min(repeats, 5)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _print(figures: dict[str, Any]) -> None:
    where, ceiling = figures["where"], figures["matmul_tflops"]
    said = f", bf16 matmul {ceiling:.0f} TFLOP/s" if ceiling else f"; {CPU_NOTE}"

    def number(row: dict[str, Any], key: str, form: str) -> str:
        value = row.get(key)
        return "-" if value is None else format(value, form)

    columns = (
        ("ms", "replay_ms", ".2f"),
        ("eager ms", "eager_ms", ".2f"),
        ("compiled", "compiled_ms", ".2f"),
        ("host ms", "replay_host_ms", ".2f"),
        ("eager host", "eager_host_ms", ".2f"),
        ("useful tok/s", "useful_tokens_per_s", ",.0f"),
        ("draft tok/s", "draft_tokens_per_s", ",.0f"),
        ("TFLOP/s", "tflops", ".3g"),
        ("of ceiling", "matmul_ceiling_share", ".0%"),
        ("x matmuls", "over_bare_matmuls", ".2f"),
        ("GiB", "held_gib", ".2f"),
        ("whole ms", "whole_step_ms", ".2f"),
        ("x fwd+bwd", "whole_over_forward_backward", ".3f"),
        ("update ms", "update_ms", ".2f"),
        ("of copy", "update_over_copy_bandwidth", ".0%"),
    )
    print_table(
        make_console(),
        f"{where['gpu'] or 'CPU'}, torch {where['torch']}, {where['commit']}{said}",
        ("step", "how", *(column for column, _, _ in columns)),
        (
            (
                f"{row.get('workload', '')} {row['bucket']}".strip(),
                row["how"],
                *(number(row, key, form) for _, key, form in columns),
            )
            for row in figures["steps"]
        ),
    )
    for row in figures["steps"]:
        if "compiled_skipped" in row:
            make_console().print(f"{row['bucket']}: compiled step left out: {row['compiled_skipped']}", soft_wrap=True)


def _plot(figures: dict[str, Any], plot: Path) -> None:
    rows, cuda = figures["steps"], figures["where"]["gpu"] is not None
    names = [row.get("workload", row["bucket"]) for row in rows]
    series = {"whole / (forward + backward)": [row.get("whole_over_forward_backward") for row in rows]}
    if cuda:
        series = {
            name: [None if row.get(f"{key}_ms") is None else row[f"{key}_ms"] / row["replay_ms"] for row in rows]
            for name, key in (
                ("bare matmuls", "bare_matmuls"),
                ("replay", "replay"),
                ("eager", "eager"),
                ("compiled", "compiled"),
                ("whole step", "whole_step"),
            )
        }
    title = f"{figures['where']['gpu'] or 'CPU'}: time of a step" + (" / replay" if cuda else "")
    plot_bars(plot, title, names, series, unit="times")
