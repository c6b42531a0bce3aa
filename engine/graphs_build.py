"""`dflash-engine graphs build`: compile, capture, verify and measure what training would, write graphs.json, and end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from buffers.batching import Batch
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.assemble import (
    drafter_config,
    engine_options,
    frozen_target,
    resolve_device,
    resolve_precision,
    weights_aside,
)
from engine.compile_cache import use_compile_cache
from engine.data_source import open_training_data
from engine.engine import Engine
from engine.graphs_ready import make_ready
from engine.graphs_record import bucket_figures, print_record
from engine.held_out import open_held_out
from engine.intake import Intake, RunData, plan_intake
from engine.laps import Laps
from engine.memory_budget import GIB, budget_for
from engine.memory_report import memory_figures, print_memory
from engine.reports import make_console
from engine.settings import Settings
from graphs.measure import StepCost, step_cost
from graphs.pool_model import MIB
from graphs.record import write_record


def build_graphs(settings: Settings) -> dict[str, Any]:
    """Prints the report and returns its figures. Raises CaptureError when a bucket cannot be captured or its replay is not the
    eager step, and as training does for settings and data that do not go together."""
    console, errors, laps = make_console(), make_console(stderr=True), Laps()

    def say(text: str) -> None:
        errors.print(text, markup=False, soft_wrap=True)

    with ExitStack() as parts:
        device = resolve_device(settings.run.device)
        precision = resolve_precision(settings.run.precision, device)
        use_compile_cache(settings, device, say)
        training = open_training_data(settings.data.folders, settings)
        config, target = drafter_config(settings, training.info), frozen_target(settings, training)
        data = RunData(training, open_held_out(settings, training), config, device, precision)
        plan = plan_intake(data, settings, budget_for(settings, device))
        laps.end("plan")
        weights = weights_aside(settings, config)
        intake = Intake(data, plan)
        parts.callback(intake.close)
        options = engine_options(settings, device, precision) | intake.for_engine()
        engine = Engine(config, target, optimizer=settings.optimizer, **options)
        parts.callback(engine.close)
        laps.end("memory")
        engine.params.load_(weights.result())
        laps.end("weights")
        record = make_ready(
            engine,
            chain.from_iterable(map(plan.batches.epoch, range(settings.run.epochs))),
            intake.inputs.load,
            settings=settings,
            fingerprints=plan.fingerprints,
            laps=laps,
            say=say,
            estimates_mib=plan.memory.grown_mib(),
            held_out=intake.held_out.feed if intake.held_out is not None else None,
        )
        times = _measure(engine, plan.batches.epoch(0), intake.inputs)
        laps.end("measure")
    memory = plan.memory
    timed = tuple(replace(bucket, **times.get(bucket.bucket, {})) for bucket in record.buckets)
    record = replace(record, buckets=timed, phases_s=tuple(laps.seconds.items()))
    path = write_record(Path(settings.run.output), record)
    print_record(record, console)
    about = {"attention": engine.ops.name, "precision": engine.precision, "recompute": engine.drafter.recompute}
    told = (
        f'these milliseconds and this memory are of model.recompute = "{about["recompute"]}" under {about["attention"]}'
    )
    console.print(f"{told} attention, in {about['precision']}", markup=False, soft_wrap=True)
    print_memory(memory, console)
    if record.reserved_mib is not None:
        found, expected = record.reserved_mib / 1024, memory.reserved / GIB
        console.print(
            f"torch holds {found:.2f} GiB, {expected:.2f} estimated ({expected / found - 1:+.1%})", soft_wrap=True
        )
    graphs = [graph for bucket in record.buckets for graph in bucket.graphs] + list(record.others)
    executables_mib = sum(graph.exec_mib for graph in graphs)
    if record.reserved_mib is not None:
        console.print(
            f"the driver holds {executables_mib:.1f} MiB for {len(graphs)} executable graphs, {memory.executables / MIB:.0f} MiB "
            f"estimated for {memory.graphs}",
            soft_wrap=True,
        )
    console.print(f"{path}; the graphs themselves end with this process", markup=False, soft_wrap=True)
    return {
        "record": str(path),
        "generation": record.generation,
        **about,
        "phases_s": dict(record.phases_s),
        "kernels_compiled": record.kernels_compiled,
        "reserved_mib": record.reserved_mib,
        "executables_mib": executables_mib,
        "graphs": len(graphs),
        "estimate": memory_figures(memory),
        "buckets": [bucket_figures(bucket) for bucket in record.buckets],
    }


def _measure(engine: Engine, batches: list[Batch], inputs: InputPipeline) -> Mapping[str, dict[str, Any]]:
    """Milliseconds of each bucket's first micro-batch, eager and replayed, by the bucket's name; of those that are replayed."""
    first: dict[Bucket, Batch] = {}
    for batch in batches:
        if engine.executor.how_of(f"train {batch.bucket.name}") == "replayed":
            first.setdefault(batch.bucket, batch)
    found: dict[str, dict[str, Any]] = {}
    for bucket, batch in first.items():
        inputs.load(batch)
        step = f"train {bucket.name}"
        replay = step_cost(lambda step=step: engine.executor.run(step), engine.device)  # type: ignore[misc]
        eager = _eager_cost(engine, step)
        found[bucket.name] = {
            "replay_ms": replay.device_ms,
            "replay_host_ms": replay.host_ms,
            "eager_ms": eager.device_ms if eager else None,
            "eager_host_ms": eager.host_ms if eager else None,
        }
    engine.zero_()
    engine.executor.times.clear()
    return found


def _eager_cost(engine: Engine, step: str) -> StepCost | None:
    """None where the eager step does not fit beside the pool. Its memory is given back."""
    cost = None
    with suppress(torch.OutOfMemoryError):
        cost = step_cost(lambda: engine.executor.call(step), engine.device, repeats=3)
    torch.cuda.empty_cache()
    return cost
