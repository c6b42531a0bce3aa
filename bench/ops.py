"""`dflash-engine bench ops`: every operation of the step and the update against its definition and against torch's own.

First each is compared with the definition in twice the precision on some of the rows: an operation of ours with an error beyond
twice that of the definition in the same precision, and a rounding, is not timed, and the command fails at its end. Times are of
replayed graphs of forward and backward, so that no launch is counted. Of the CPU, where definitions run, only ratios are given.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.chip import ChipLog, chip_log, sustained
from bench.op_case import ROUNDING, Call, Case, Data, errors
from bench.op_cases import cases
from bench.plots import check_plot, plot_bars
from bench.ratios import CPU_NOTE, without_speeds
from bench.timing import captured, copy_gb_per_s, graph_ms, matmul_tflops, provenance, write_result
from bench.workloads import Workload, chosen_workloads
from engine.assemble import resolve_device
from engine.reports import make_console, print_table
from engine.settings import Settings

# Seconds that ours is replayed for beside the chip's clock and power.
SETTLE_S, SUSTAINED_S = 0.4, 1.0
# A rival that is further off computes something else.
MOST_OF_RIVALS = {torch.bfloat16: 0.05, torch.float32: 1e-4}


def run(
    settings: Settings,
    *,
    workloads: Sequence[str] = (),
    only: str = "",
    repeats: int = 20,
    compiled: bool = True,
    out: Path | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Compares, measures and prints; returns (and writes to `out`) a record a workload and operation. only: words of the names of
    the operations to measure, all without it.

    Raises ValueError when a comparison or a kernel of ours fails, after all other operations were measured; SettingsError for a
    workload too large for the CPU.
    """
    check_plot(plot)
    device = resolve_device(settings.run.device)
    cuda = device.type == "cuda"
    ceilings = {"TFLOP/s": matmul_tflops(device), "GB/s": copy_gb_per_s(device)} if cuda else {}
    rows: list[dict[str, Any]] = []
    refused: list[str] = []
    figures: dict[str, Any] = {"where": provenance(), "ceilings": ceilings, "ops": rows}
    with chip_log(device) if cuda else nullcontext() as log:
        for workload in chosen_workloads(workloads, device, default=("W1", "W2", "W3")):
            made = cases(workload, device, chunk_rows=settings.model.head_chunk, compiled=compiled and cuda)
            for case in (case for case in made if only in case.op):
                make_console(stderr=True).print(f"measuring {workload.name} {case.op} ...")
                try:
                    rows.append(_measure(workload, case, device, repeats, ceilings, log))
                except (ValueError, RuntimeError) as error:  # another one may well be right, and fit
                    refused.append(f"{workload.name} {_said(case, error)}")
                _free(device)
                if cuda:
                    # What is measured is not lost when a later one fails.
                    write_result(figures, out)
    if not rows and not refused:
        raise ValueError(
            f"--only {only}: expected a word of an operation's name, found none that has it; leave --only out to see all"
        )
    if not cuda:
        figures |= {"note": CPU_NOTE, "ops": [without_speeds(row) for row in rows]}
    if rows:
        _print(figures)
        write_result(figures, out)
    if refused:
        raise ValueError("; ".join(refused))
    if plot is not None:
        _plot(figures, plot)
    return figures


def check(case: Case, device: torch.device) -> dict[str, dict[str, float]]:
    """The error of every call against the definition in twice the precision, on some rows; not of what is compiled, which would
    have to be compiled for these rows too.

    Raises ValueError when ours is off by more than twice the definition's own error in the working precision and a rounding,
    or when a rival computes something else.
    """
    dtype = _dtype(device)
    data = case.make(case.check_rows, dtype, device)
    exact = case.calls["reference"].run(data.to(torch.float32 if dtype == torch.bfloat16 else torch.float64))
    found = {
        name: errors(call.run(case.make(case.check_rows, dtype, device)), exact)
        for name, call in case.calls.items()
        if name != "compiled"
    }
    for result, allowed in found["reference"].items():
        for name, of_call in found.items():
            most = 2 * allowed + ROUNDING[dtype] if name == "ours" else MOST_OF_RIVALS[dtype]
            _refuse(case, name, result, of_call[result], most)
    return found


def check_compiled(case: Case, data: Data, dtype: torch.dtype) -> dict[str, float]:
    """The distance of what is compiled from the same uncompiled, on all rows. Raises ValueError when it is something else."""
    found = errors(case.calls["compiled"].run(data), case.calls["torch"].run(data))
    for result, distance in found.items():
        _refuse(case, "compiled", result, distance, MOST_OF_RIVALS[dtype])
    return found


def _said(case: Case, error: Exception) -> str:
    """One line that begins with the operation's name."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return line if line.startswith(case.op) else f"{case.op}: {line}"


def _refuse(case: Case, name: str, result: str, found: float, most: float) -> None:
    if not found <= most:
        raise ValueError(
            f"{case.op}: {result} of {name} is off by {found:.1e}, at most {most:.1e} was allowed; no speed is shown"
        )


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _measure(
    workload: Workload,
    case: Case,
    device: torch.device,
    repeats: int,
    ceilings: dict[str, float],
    log: ChipLog | None,
) -> dict[str, Any]:
    off = check(case, device)
    _free(device)
    data = case.make(case.rows, _dtype(device), device)
    results: dict[str, dict[str, Any]] = {}
    for name, call in case.calls.items():
        try:
            if name == "compiled":
                off[name] = check_compiled(case, data, _dtype(device))
            results[name] = {"error": max(off[name].values()), "errors": off[name], **_times(case, call, data, repeats)}
            if name == "ours" and log is not None:
                work = captured(partial(call.run, data), device)
                results[name]["sustained"] = sustained(work, device, log, settle_s=SETTLE_S, seconds=SUSTAINED_S)
                del work
        except RuntimeError as error:  # the definition may not fit, torch.compile may not take it
            if name == "ours":
                raise
            results[name] = {"skipped": str(error).strip().splitlines()[0][:200]}
        _free(device)
    base = results.get("ours") or results["reference"]
    for result in results.values():
        if "ms" in result:
            result["time_over_ours" if "ours" in results else "time_over_reference"] = result["ms"] / base["ms"]
            if ceilings:
                result["share_of_ceiling"] = result["rate"] / ceilings[case.unit]
    return {
        "workload": workload.name,
        "op": case.op,
        "shape": case.shape,
        "unit": case.unit,
        "results": results,
    }


def _times(case: Case, call: Call, data: Data, repeats: int) -> dict[str, Any]:
    device = next(iter(data.leaves.values())).device if data.leaves else data.extra["grad"].device
    repeats = repeats if device.type == "cuda" else min(repeats, 3)
    ms = graph_ms(lambda: call.run(data), device, repeats=repeats)
    times: dict[str, Any] = {"ms": ms, "rate": case.rate(ms)}
    if call.forward is not None:
        forward = call.forward
        times["forward_ms"] = graph_ms(lambda: forward(data), device, repeats=repeats)
        times["backward_ms"] = ms - times["forward_ms"]
    return times


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _print(figures: dict[str, Any]) -> None:
    where = figures["where"]
    ceilings = ", ".join(f"{value:.0f} {unit}" for unit, value in figures["ceilings"].items())

    def line(row: dict[str, Any], name: str, result: dict[str, Any]) -> tuple[str, ...]:
        def number(key: str, form: str) -> str:
            return "-" if result.get(key) is None else format(result[key], form)

        over = "time_over_ours" if "ours" in row["results"] else "time_over_reference"
        return (
            f"{row['workload']} {row['op']}",
            row["shape"],
            name,
            number("ms", ".3f"),
            number("forward_ms", ".3f"),
            number("rate", ".4g") + (f" {row['unit']}" if result.get("rate") else ""),
            number("share_of_ceiling", ".0%"),
            number(over, ".2f"),
            number("error", ".1e"),
        )

    print_table(
        make_console(),
        f"{where['gpu'] or 'CPU'}, torch {where['torch']}, {where['commit']}; {ceilings or CPU_NOTE}",
        ("operation", "shape", "by", "ms", "forward", "rate", "of ceiling", "times", "error"),
        (line(row, name, result) for row in figures["ops"] for name, result in row["results"].items()),
    )
    for row in figures["ops"]:
        for name, result in row["results"].items():
            if "skipped" in result:
                make_console().print(f"{row['workload']} {row['op']}, {name}: {result['skipped']}", soft_wrap=True)


def _plot(figures: dict[str, Any], plot: Path) -> None:
    rows = figures["ops"]
    names = list(dict.fromkeys(name for row in rows for name in row["results"]))
    over = "time_over_ours" if "ours" in names else "time_over_reference"
    series = {name: [row["results"].get(name, {}).get(over) for row in rows] for name in names}
    groups = [f"{row['workload']}\n{row['op']}" for row in rows]
    title = f"{figures['where']['gpu'] or 'CPU'}: {over.replace('_', ' ')}"
    plot_bars(plot, title, groups, series, unit="times")
