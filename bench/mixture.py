"""A mixture of lengths as chat data has it, and the buckets planned for it, with random rows instead of a dataset."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench.memory import DeviceMemory
from bench.subjects import Subject, refuse_soft_labels
from bench.workloads import RandomInputs, Workload
from buffers.batching import Batch
from engine.assemble import engine_options, resolve_precision
from engine.bucketing import batches_for, context_seen, plan_for
from engine.engine import Engine
from engine.precision import compute_dtype
from engine.settings import Settings

_SHORTEST = 16
_Z95 = 1.6449  # the normal distribution's 95th percentile


@dataclass(frozen=True)
class Mixture:
    """Lognormal lengths: half of the samples under `median` tokens, 95 of 100 under `p95`, none beyond `longest`; of each
    sample the last part `supervised` has labels, as an answer has behind its prompt."""

    median: int = 700
    p95: int = 2048
    longest: int = 4096
    samples: int = 2000
    supervised: float = 1.0

    def lengths(self, seed: int = 0) -> NDArray[np.int64]:
        """The samples' tokens, int64 [samples], at least 16 each; what the distribution has beyond `longest` is cut there."""
        sigma = math.log(self.p95 / self.median) / _Z95
        drawn = np.random.Generator(np.random.Philox(seed)).lognormal(math.log(self.median), sigma, self.samples)
        return np.clip(drawn, _SHORTEST, self.longest).astype(np.int64)

    def eligible(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places for an anchor in samples of these lengths, int64 [samples]."""
        return np.maximum(np.ceil(self.supervised * lengths).astype(np.int64) - 1, 0)


def mixture_for(device: torch.device, samples: int, supervised: float = 1.0) -> Mixture:
    """The default mixture; a tenth of its lengths on the CPU."""
    if device.type == "cuda":
        return Mixture(samples=samples, supervised=supervised)
    return Mixture(70, 205, 410, samples, supervised)


@contextmanager
def mixture_subjects(
    mixture: Mixture, workload: Workload, settings: Settings, device: torch.device
) -> Iterator[tuple[list[Subject], list[Batch]]]:
    """The steps of all buckets of the settings' plan, each on random rows as long as those of its first batch, and an epoch's
    batches."""
    refuse_soft_labels(settings)
    memory = DeviceMemory(device)
    precision = resolve_precision(settings.run.precision, device)
    config = workload.config()
    lengths = mixture.lengths(settings.run.seed)
    eligible_counts = mixture.eligible(lengths)
    buckets = list(plan_for(settings, lengths, eligible_counts, config, device).buckets)
    batches = batches_for(settings, lengths, eligible_counts, buckets).epoch(0)
    seen = context_seen(settings, lengths, eligible_counts, config)
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
                    partial(inputs.fill, bucket, rows=first[bucket].rows, supervised=mixture.supervised),
                    first[bucket].useful_tokens,
                    memory,
                    seen,
                )
                for bucket in buckets
            ],
            batches,
        )
    finally:
        engine.close()
