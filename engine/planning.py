"""`dflash-engine plan`: the buckets a dataset would be trained in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffers.dataset import folder_names
from buffers.mixture import Mixture
from buffers.planner import plan_table
from engine.assemble import drafter_config, make_batch_plan, make_plan, planned_counts, resolve_device
from engine.bucketing import context_seen
from engine.data_source import open_training_data
from engine.left_out import named_lengths
from engine.memory_budget import GIB, budget_for
from engine.memory_report import check_plan, estimate_plan, memory_figures, print_memory
from engine.mixture_report import print_sources, source_rows
from engine.reports import make_console, print_table
from engine.settings import Settings
from engine.work import spoken_flop, step_flop


def show_plan(data: Path | Sequence[str | Path], settings: Settings) -> dict[str, Any]:
    """Prints the plan for the dataset, or for several as a mixture, and returns it: a row a bucket, of an epoch the padding, the
    blocks without an anchor and the work, and the samples that are too long; of a mixture a row a source. Counts of packed
    rows, and of a mixture with fractional weights, are the first epoch's. Then what training would hold of a CUDA device;
    raises SettingsError when that is more than run.memory_budget_gib."""
    dataset = open_training_data(data, settings)
    config = drafter_config(settings, dataset.info)
    device = resolve_device(settings.run.device)
    plan = make_plan(settings, dataset, config, device)
    batch_plan = make_batch_plan(settings, dataset, plan.buckets)
    seen = context_seen(settings, *planned_counts(dataset), config)
    rows = [
        row._asdict() | {"tflop": step_flop(config, bucket, seen) / 1e12}
        for row, bucket in zip(plan_table(plan), plan.buckets, strict=True)
    ]
    console = make_console()
    sources = source_rows(dataset, batch_plan) if isinstance(dataset, Mixture) else []
    if sources:
        print_sources(sources, console)
    held = dataset.sources if isinstance(dataset, Mixture) else (dataset,)
    too_long = named_lengths(dataset, batch_plan.too_long)
    print_table(
        console,
        f"{folder_names(dataset)}: {sum(map(len, held))} samples, {sum(int(one.lengths.sum()) for one in held):,} tokens",
        (
            "bucket",
            "rows B",
            "tokens S",
            "blocks N",
            "samples",
            "batches",
            "padding",
            "idle blocks",
            "work of a step",
            "share of work",
        ),
        (
            (
                r["bucket"],
                str(r["B"]),
                str(r["S"]),
                str(r["N"]),
                str(r["samples"]),
                str(r["batches"]),
                f"{r['padding_fraction']:.1%}",
                f"{r['idle_fraction']:.1%}",
                spoken_flop(r["tflop"] * 1e12),
                f"{r['cost_share']:.1%}",
            )
            for r in rows
        ),
    )
    pflop = sum(r["batches"] * r["tflop"] for r in rows) / 1e3
    console.print(
        f"padding of an epoch: {plan.padding_fraction:.1%}; too long ({settings.data.too_long}): {len(too_long)}",
        soft_wrap=True,
    )
    packing = "documents packed" if settings.buckets.packing else "one sample a row"
    console.print(
        f"{packing}; idle blocks of an epoch: {plan.idle_fraction:.1%}; work of an epoch: {spoken_flop(pflop * 1e15)}",
        soft_wrap=True,
    )
    memory = estimate_plan(settings, dataset, config, plan.buckets)
    print_memory(memory, console)
    budget = budget_for(settings, device)
    if settings.run.memory_budget_gib:
        check_plan(settings, dataset, config, plan.buckets, device, budget)
    elif budget is not None and memory.total > budget.nbytes:
        console.print(
            f"more than the {budget.nbytes / GIB:.1f} GiB that are free now: training would refuse", soft_wrap=True
        )
    return {
        "buckets": rows,
        "packing": settings.buckets.packing,
        "padding": plan.padding_fraction,
        "idle_blocks": plan.idle_fraction,
        "epoch_pflop": pflop,
        "too_long": too_long,
        "memory": memory_figures(memory),
        **({"sources": sources} if sources else {}),
    }
