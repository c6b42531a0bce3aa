"""model.recompute in its three modes, under each attention that the device has or under that of the settings: memory that it
saves and time that it costs.

First each mode's gradient is compared with that of the step that keeps everything: it should have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from bench.subjects import Subject, workload_subject
from bench.timed_step import measure_step
from bench.workloads import Workload
from engine.model import Recompute
from engine.reports import make_console, print_table
from engine.settings import ModelSettings, Settings

ATTENTIONS = {"cuda": ("triton", "flex"), "cpu": ("reference",)}
# L2 distance of the whole gradient, relative: the kernels are the same, a matmul of another library may not be.
_TOLERANCE = {"bf16": 1e-2, "fp32": 1e-5, "fp8": 5e-2}
_FIGURES = ("attention", "recompute", "replay_ms", "replay_spread", "held_gib", "eager_peak_gib", "equals_eager")


def recompute_modes(workload: Workload, settings: Settings, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """A record a mode and attention: bench.timed_step's figures of it, `differs_by`, `time_over_none`; `skipped` where it does
    not fit. model.attention = auto measures every attention of the device. Raises ValueError when a mode's gradient is another
    one."""
    rows: list[dict[str, Any]] = []
    named = settings.model.attention
    for attention in ATTENTIONS[device.type] if named == "auto" else (named,):
        expected, none_ms = None, None
        for mode in get_args(Recompute):
            row: dict[str, Any] = {"attention": attention, "recompute": mode}
            try:
                found, figures = _measure(workload, _with(settings, attention, mode), device, repeats)
            except torch.OutOfMemoryError:
                rows.append(row | {"skipped": "out of GPU memory"})
                continue
            finally:
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            row |= figures
            if expected is not None and none_ms is not None:
                row["differs_by"] = difference(workload.name, mode, found, expected, figures["precision"])
                row["time_over_none"] = row["replay_ms"] / none_ms
            elif mode == "none":
                expected, none_ms = found, row["replay_ms"]
            rows.append(row)
    return rows


def difference(name: str, mode: str, found: Tensor, expected: Tensor, precision: str) -> float:
    """L2 distance of two gradients on the host, relative. Raises ValueError when it is more than rounding."""
    apart = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    if not apart <= _TOLERANCE[precision]:
        raise ValueError(
            f"{name}: the gradient with recompute = {mode} differs from that of the step that keeps everything by {apart:.1e} of "
            "its norm; no speed is shown"
        )
    return apart


def print_modes(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """For people; rows: (workload, record)."""

    def number(row: Mapping[str, Any], key: str, form: str) -> str:
        return "-" if row.get(key) is None else format(row[key], form)

    print_table(
        make_console(),
        "model.recompute",
        ("step", "attention", "recompute", "ms", "x none", "GiB", "eager GiB", "differs by"),
        (
            (
                name,
                row["attention"],
                row["recompute"],
                number(row, "replay_ms", ".2f"),
                number(row, "time_over_none", ".3f"),
                number(row, "held_gib", ".2f"),
                number(row, "eager_peak_gib", ".2f"),
                row.get("skipped") or number(row, "differs_by", ".1e"),
            )
            for name, row in rows
        ),
    )


def _with(settings: Settings, attention: str, mode: Recompute) -> Settings:
    changes: dict[str, Any] = {"attention": attention, "recompute": mode}
    model: ModelSettings = replace(settings.model, **changes)
    return replace(settings, model=model)


def _measure(
    workload: Workload, settings: Settings, device: torch.device, repeats: int
) -> tuple[Tensor, dict[str, Any]]:
    """(the gradient of the workload's row, on the host; figures)."""
    with workload_subject(workload, settings, device) as subject:
        figures = measure_step(subject, repeats)
        gradient = _gradient(subject)
        del subject
    return gradient, {key: figures[key] for key in (*_FIGURES, "precision")}


def _gradient(subject: Subject) -> Tensor:
    engine = subject.engine
    subject.fill()
    engine.zero_()
    engine.executor.run(subject.step)
    return engine.params.grad.cpu()
