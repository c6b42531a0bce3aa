"""Buckets and batches for samples of given lengths, as the settings want them: packed or one sample a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from buffers.batching import BatchPlan
from buffers.packing_planner import blocks_wanted, plan_packed
from buffers.planner import Plan, plan_buckets
from buffers.shapes import ATTENTION_TILE, Bucket, round_up
from engine.drafter_config import DrafterConfig
from engine.settings import Settings
from engine.work import planning_cost

Counts = NDArray[np.int64]


def plan_for(
    settings: Settings, lengths: Counts, eligible_counts: Counts, config: DrafterConfig, device: torch.device
) -> Plan:
    """The buckets for samples of `lengths` int64[n] tokens and `eligible_counts` int64[n] places for an anchor: planned, or
    the fixed lengths of the settings with N and B by the same rules. Raises ValueError as the planner does."""
    b = settings.buckets
    options: dict[str, Any] = {
        "num_anchors": b.num_anchors,
        "K": config.block_size,
        "max_buckets": b.max_buckets,
        "token_budget": b.token_budget,
        "cost": step_cost(settings, lengths, eligible_counts, config, device),
        "max_length": b.max_length,
        "max_rows": b.max_rows,
        "too_long": settings.data.too_long,
        "edges": b.lengths,
    }
    if b.packing:
        return plan_packed(lengths, eligible_counts, seed=settings.run.seed, **options)
    return plan_buckets(lengths, eligible_counts, **options)


def step_cost(
    settings: Settings, lengths: Counts, eligible_counts: Counts, config: DrafterConfig, device: torch.device
) -> Callable[[Bucket], float]:
    """What a bucket's step costs the planner, where these samples fill it."""
    # The reference forms all scores of a row, whoever may see them: there long rows cost, shared or not.
    dense = device.type == "cpu" or settings.model.attention == "reference"
    seen = 0.0 if dense else context_seen(settings, lengths, eligible_counts, config)
    return planning_cost(config, device.type, seen)


def batches_for(
    settings: Settings,
    lengths: Counts,
    eligible_counts: Counts,
    buckets: Sequence[Bucket],
    included: Callable[[int], NDArray[np.bool_] | None] | None = None,
) -> BatchPlan:
    """The batches of these samples in these buckets; `included` as for BatchPlan. Raises ValueError as it does."""
    b = settings.buckets
    packed: dict[str, Any] = {}
    if b.packing:
        packed["blocks"] = blocks_wanted(eligible_counts, b.num_anchors, buckets[0].K, buckets[0].tile)
        packed["longest"] = round_up(b.max_length, buckets[0].tile)
    return BatchPlan(
        lengths, buckets, too_long=settings.data.too_long, seed=settings.run.seed, included=included, **packed
    )


def context_seen(settings: Settings, lengths: Counts, eligible_counts: Counts, config: DrafterConfig) -> float:
    """Context tokens that a block sees on average where documents share rows: half of its document. 0, which stands for half
    of its row, where they do not."""
    if not settings.buckets.packing:
        return 0.0
    blocks = blocks_wanted(eligible_counts, settings.buckets.num_anchors, config.block_size, ATTENTION_TILE)
    return float((blocks * (lengths / 2)).sum() / max(int(blocks.sum()), 1))
