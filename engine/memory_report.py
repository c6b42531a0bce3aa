"""The estimate of a plan's memory for people and for JSON, and the check of a plan before it is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from buffers.dataset import SampleSource
from buffers.shapes import Bucket
from engine.assemble import make_plan, text_config
from engine.drafter_config import DrafterConfig
from engine.memory_budget import GIB, Budget, check_budget
from engine.memory_estimate import GRAPH_EXEC, Estimate, estimate
from engine.reports import print_table
from engine.settings import Settings
from graphs.pool_model import MIB


def estimate_plan(
    settings: Settings, dataset: SampleSource, config: DrafterConfig, buckets: Sequence[Bucket]
) -> Estimate:
    """Of training on this dataset in these buckets."""
    tied = bool(text_config(dataset.info.target_config).get("tie_word_embeddings", False))
    return estimate(settings, config, buckets, tied=tied, held_out=bool(settings.data.eval_path))


def check_plan(
    settings: Settings,
    dataset: SampleSource,
    config: DrafterConfig,
    buckets: Sequence[Bucket],
    device: torch.device,
    budget: Budget | None,
) -> Estimate:
    """The estimate; SettingsError when it is over the budget, as engine.memory_budget.check_budget."""
    return check_budget(
        settings,
        buckets,
        budget,
        reckon=lambda changed, planned: estimate_plan(changed, dataset, config, planned),
        replan=lambda changed: make_plan(changed, dataset, config, device).buckets,
    )


def memory_figures(found: Estimate) -> dict[str, Any]:
    """MiB: of the whole, of what is fixed, and a row a bucket."""
    return {
        "total_mib": found.total / MIB,
        "reserved_mib": found.reserved / MIB,
        "pool_mib": found.pool / MIB,
        "executables_mib": found.executables / MIB,
        "fixed_mib": {name: nbytes / MIB for name, nbytes in found.fixed.items()},
        "buckets": [
            {
                "bucket": bucket.name,
                "kept_mib": step.kept / MIB,
                "logits_mib": step.logits / MIB,
                "most_mib": step.most / MIB,
                "pool_grows_mib": step.grown / MIB,
                "executables_mib": found.graphs_of_bucket * GRAPH_EXEC / MIB,
            }
            for bucket, step in found.steps.items()
        ],
    }


def print_memory(found: Estimate, console: Console) -> None:
    """The buckets as they are captured, then the sum."""
    print_table(
        console,
        "device memory on CUDA, estimated, MiB (docs/graphs.md): buckets as they are captured, into one pool",
        ("bucket", "kept for backward", "logits", "most at once", "pool grows by", "graphs", "for these"),
        (
            (
                bucket.name,
                *(f"{nbytes / MIB:,.0f}" for nbytes in (step.kept, step.logits, step.most, step.grown)),
                str(found.graphs_of_bucket),
                f"{found.graphs_of_bucket * GRAPH_EXEC / MIB:,.0f}",
            )
            for bucket, step in found.steps.items()
        ),
    )
    parts = [(name, nbytes) for name, nbytes in found.fixed.items() if nbytes]
    parts += [("graphs' pool", found.pool), (f"{found.graphs} executable graphs", found.executables)]
    told = ", ".join(f"{name} {nbytes / GIB:.2f}" for name, nbytes in parts)
    console.print(f"device memory: {found.total / GIB:.2f} GiB: {told}", markup=False, soft_wrap=True)
