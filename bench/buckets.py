"""`dflash-engine bench buckets`: every bucket's step, eager against replay in one run, for a dataset or a named workload.

Before a speed is shown the replay must equal the eager step bit for bit, and the timed replays must allocate and compile
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.matmuls import bare_matmul_graph
from bench.timing import host_ms, matmul_tflops, median_ms, provenance, write_result
from bench.workloads import WORKLOADS, RandomInputs
from buffers.batching import BatchPlan
from buffers.dataset import Dataset
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.assemble import (
    drafter_config,
    engine_options,
    frozen_target,
    initial_weights,
    make_plan,
    pipeline_options,
    resolve_device,
    resolve_precision,
)
from engine.engine import Engine
from engine.reports import make_console, print_table
from engine.settings import Settings
from engine.settings_fields import SettingsError
from engine.work import step_flop
from graphs.executor import BuildReport
from graphs.guards import Counters, host_sync_is_an_error

# A minute or more for one step of a named workload would help nobody.
MOST_FLOP_ON_CPU = 1e12


def run(
    data: Path | None, settings: Settings, *, workloads: Sequence[str], repeats: int, out: Path | None
) -> dict[str, Any]:
    """Measures and prints; returns (and writes to `out`) one record a bucket with where it was measured.

    Raises ValueError when a replay differs from its eager step, or allocates or compiles.
    """
    device = resolve_device(settings.run.device)
    ceiling = matmul_tflops(device) if device.type == "cuda" else None
    rows: list[dict[str, Any]] = []
    if data is not None:
        rows += _dataset(data, settings, device, repeats)
    for name in workloads:
        rows.append(_workload(name, settings, device, repeats))
    figures = {"where": provenance(), "matmul_tflops": ceiling, "buckets": rows}
    _print(figures)
    write_result(figures, out)
    return figures


def _workload(name: str, settings: Settings, device: torch.device, repeats: int) -> dict[str, Any]:
    workload, precision = WORKLOADS[name], resolve_precision(settings.run.precision, device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config, bucket = workload.config(), workload.bucket
    flop = step_flop(config, bucket)
    if device.type == "cpu" and flop > MOST_FLOP_ON_CPU:
        raise SettingsError(
            f"--workload {name}: expected a CUDA device for steps of {flop / 1e12:.0f} TFLOP, found the CPU; give DATA to "
            "measure the buckets of a dataset here"
        )
    if settings.objective.kl_weight > 0:
        raise SettingsError(
            "objective.kl_weight: expected 0 for a named workload, which has no last_hidden; give DATA."
        )
    options = engine_options(settings, device, precision)
    inputs = RandomInputs(config, [bucket], device, dtype)
    engine = Engine(
        config,
        workload.target(device, dtype),
        [bucket],
        inputs,
        optimizer=None,
        **options,
    )
    engine.params.draw_(settings.run.seed)
    (report,) = engine.build()
    row = {"workload": name, **_measure(engine, bucket, report, partial(inputs.fill, bucket), repeats)}
    engine.close()
    del engine, inputs
    if device.type == "cuda":
        torch.cuda.empty_cache()
        matmuls = bare_matmul_graph(config, bucket, device, options["chunk_rows"])
        row["bare_matmuls_ms"] = median_ms(matmuls, device, repeats=repeats)
        row["over_bare_matmuls"] = row["replay_ms"] / row["bare_matmuls_ms"]
        torch.cuda.empty_cache()
    return row


def _dataset(data: Path, settings: Settings, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    dataset = Dataset(data)
    precision = resolve_precision(settings.run.precision, device)
    config = drafter_config(settings, dataset.info)
    plan = make_plan(settings, dataset, config, device)
    batches = BatchPlan(dataset.lengths, plan.buckets, too_long=settings.data.too_long, seed=settings.run.seed).epoch(0)
    first = {batch.bucket: batch for batch in reversed(batches)}
    rows = []
    with InputPipeline(dataset, plan.buckets, **pipeline_options(settings, dataset, device, precision)) as inputs:
        engine = Engine(
            config,
            frozen_target(settings, dataset),
            plan.buckets,
            inputs.inputs,
            optimizer=None,
            **engine_options(settings, device, precision),
        )
        engine.params.load_(initial_weights(settings, config))
        reports = {report.name: report for report in engine.build()}
        for bucket in plan.buckets:
            batch = first[bucket]
            row = _measure(engine, bucket, reports[f"train {bucket.name}"], partial(inputs.load, batch), repeats)
            useful = sum(row.stop - row.start for row in batch.rows)
            rows.append(
                row
                | {
                    "useful_tokens_per_s": useful / row["replay_ms"] * 1e3,
                    "padding": 1 - useful / (bucket.B * bucket.S),
                }
            )
        engine.close()
    return rows


def _measure(
    engine: Engine, bucket: Bucket, report: BuildReport, fill: Callable[[], None], repeats: int
) -> dict[str, Any]:
    device, name = engine.device, f"train {bucket.name}"
    make_console(stderr=True).print(f"measuring {bucket.name} ...")
    held = torch.cuda.memory_reserved(device) / 2**30 if device.type == "cuda" else None
    fill()
    difference = engine.verify(bucket)
    if difference is not None:
        raise ValueError(
            f"bucket {bucket.name}: the replay differs from the eager step in {difference.name} by {difference.relative:.1e} of "
            "its largest value; no speed is shown"
        )
    fill()
    if report.how == "called":
        # On the CPU the step and its eager twin are one and the same call, and a slow one.
        called_ms = median_ms(lambda: engine.executor.call(name), device, repeats=min(repeats, 3), warm_ups=0)
        return _record(engine, bucket, report, replay_ms=called_ms, eager_ms=called_ms, host=(called_ms, called_ms))
    eager_ms = median_ms(lambda: engine.executor.call(name), device, repeats=max(3, repeats // 4))
    before = Counters.read(device)
    replay_ms = median_ms(lambda: engine.executor.run(name), device, repeats=repeats)
    with host_sync_is_an_error():
        for _ in range(3):
            engine.executor.run(name)
    steady = Counters.read(device) - before
    if steady.device_allocations or steady.compilations:
        raise ValueError(
            f"bucket {bucket.name}: expected no allocation and no compilation while replaying, found {steady}"
        )
    host = (
        host_ms(lambda: engine.executor.run(name), device, repeats=5),
        host_ms(lambda: engine.executor.call(name), device, repeats=3),
    )
    return _record(engine, bucket, report, replay_ms=replay_ms, eager_ms=eager_ms, host=host, held_gib=held)


def _record(
    engine: Engine,
    bucket: Bucket,
    report: BuildReport,
    *,
    replay_ms: float,
    eager_ms: float,
    host: tuple[float, float],
    held_gib: float | None = None,
) -> dict[str, Any]:
    """One bucket's figures, after the replay was found equal to the eager step and free of syncs, allocations, compilations."""
    flop = step_flop(engine.config, bucket)
    return {
        "bucket": bucket.name,
        "K": bucket.K,
        "how": report.how,
        "attention": engine.ops.name,
        "equals_eager": True,
        "replay_ms": replay_ms,
        "eager_ms": eager_ms,
        "replay_host_ms": host[0],
        "eager_host_ms": host[1],
        "tokens_per_s": bucket.B * bucket.S / replay_ms * 1e3,
        "eager_tokens_per_s": bucket.B * bucket.S / eager_ms * 1e3,
        "tflop": flop / 1e12,
        "tflops": flop / replay_ms / 1e9,
        "held_gib": held_gib,
        "pool_mib": report.pool_mib,
        # Anything else would have raised before this.
        "host_syncs": 0,
        "device_allocations": 0,
        "compilations": 0,
        "warm_up_s": report.warm_up_s,
        "capture_s": report.capture_s,
    }


def _print(figures: dict[str, Any]) -> None:
    where = figures["where"]
    ceiling = f", bf16 matmul {figures['matmul_tflops']:.0f} TFLOP/s" if figures["matmul_tflops"] else ""
    print_table(
        make_console(),
        f"{where['gpu'] or 'CPU'}, torch {where['torch']}, {where['commit']}{ceiling}",
        (
            "bucket",
            "step",
            "ms",
            "eager ms",
            "host ms",
            "eager host",
            "tokens/s",
            "TFLOP/s",
            "x matmuls",
            "GiB",
            "start s",
        ),
        (
            (
                f"{r.get('workload', '')} {r['bucket']}".strip(),
                r["how"],
                f"{r['replay_ms']:.2f}",
                f"{r['eager_ms']:.2f}",
                f"{r['replay_host_ms']:.2f}",
                f"{r['eager_host_ms']:.2f}",
                f"{r.get('useful_tokens_per_s', r['tokens_per_s']):,.0f}",
                f"{r['tflops']:.3g}",
                f"{r['over_bare_matmuls']:.2f}" if "over_bare_matmuls" in r else "-",
                f"{r['held_gib']:.2f}" if r["held_gib"] is not None else "-",
                f"{r['warm_up_s'] + r['capture_s']:.1f}",
            )
            for r in figures["buckets"]
        ),
    )
