"""A mixture of lengths as chat data has it, and the buckets planned for it, with random rows instead of a dataset."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench.subjects import Subject, compute_dtype, refuse_soft_labels
from bench.workloads import RandomInputs, Workload
from buffers.batching import Batch, BatchPlan
from buffers.planner import Plan, plan_buckets
from engine.assemble import engine_options, resolve_precision
from engine.engine import Engine
from engine.settings import Settings
from engine.work import planning_cost

_SHORTEST = 16
_Z95 = 1.6449  # the normal distribution's 95th percentile


@dataclass(frozen=True)
class Mixture:
    """Lognormal lengths: half of the samples under `median` tokens, 95 of 100 under `p95`, none beyond `longest`."""

    median: int = 700
    p95: int = 2048
    longest: int = 4096
    samples: int = 2000

    def lengths(self, seed: int = 0) -> NDArray[np.int64]:
        """The samples' tokens, int64 [samples], at least 16 each; what the distribution has beyond `longest` is cut there."""
        sigma = math.log(self.p95 / self.median) / _Z95
        drawn = np.random.Generator(np.random.Philox(seed)).lognormal(math.log(self.median), sigma, self.samples)
        return np.clip(drawn, _SHORTEST, self.longest).astype(np.int64)


def mixture_for(device: torch.device, samples: int) -> Mixture:
    """The default mixture; a tenth of its lengths on the CPU."""
    return Mixture(samples=samples) if device.type == "cuda" else Mixture(70, 205, 410, samples)


def plan_lengths(
    lengths: NDArray[np.int64],
    workload: Workload,
    settings: Settings,
    device: torch.device,
    *,
    edges: Sequence[int] = (),
) -> Plan:
    """The settings' plan for samples of these lengths, every token supervised. edges: these buckets instead."""
    b = settings.buckets
    return plan_buckets(
        lengths,
        lengths - 1,
        num_anchors=b.num_anchors,
        K=workload.K,
        max_buckets=b.max_buckets,
        token_budget=b.token_budget,
        cost=planning_cost(workload.config(), device.type),
        max_length=0 if edges else b.max_length,
        max_rows=b.max_rows,
        edges=edges or b.lengths,
    )


@contextmanager
def mixture_subjects(
    lengths: NDArray[np.int64], plan: Plan, workload: Workload, settings: Settings, device: torch.device
) -> Iterator[tuple[list[Subject], list[Batch]]]:
    """The steps of all buckets of the plan, each on random rows as long as those of its first batch, and an epoch's batches."""
    refuse_soft_labels(settings)
    precision = resolve_precision(settings.run.precision, device)
    config, buckets = workload.config(), list(plan.buckets)
    batches = BatchPlan(lengths, buckets, seed=settings.run.seed).epoch(0)
    first = {batch.bucket: batch for batch in reversed(batches)}
    inputs = RandomInputs(config, buckets, device, compute_dtype(precision))
    target = workload.target(device, compute_dtype(precision))
    engine = Engine(config, target, buckets, inputs, optimizer=None, **engine_options(settings, device, precision))
    engine.params.draw_(settings.run.seed)
    try:
        reports = {report.name: report for report in engine.build()}
        yield (
            [
                Subject(
                    bucket.name,
                    engine,
                    bucket,
                    reports[f"train {bucket.name}"],
                    inputs(bucket),
                    partial(inputs.fill, bucket, length=[d.stop - d.start for d in first[bucket].documents]),
                    first[bucket].useful_tokens,
                )
                for bucket in buckets
            ],
            batches,
        )
    finally:
        engine.close()
