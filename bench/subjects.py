"""What is measured: one bucket's step, built and with inputs to run on - of a named workload or of a dataset's plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.memory import DeviceMemory
from bench.workloads import RandomInputs, Workload
from buffers.batching import Batch, BatchPlan
from buffers.dataset import Dataset
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.assemble import (
    drafter_config,
    engine_options,
    frozen_target,
    initial_weights,
    make_batch_plan,
    make_plan,
    pipeline_options,
    planned_counts,
    resolve_precision,
)
from engine.bucketing import context_seen
from engine.data_source import open_training_data
from engine.engine import Engine
from engine.precision import compute_dtype
from engine.settings import Settings
from engine.settings_fields import SettingsError
from graphs.executor import BuildReport


@dataclass(frozen=True)
class Subject:
    """fill() puts content with `useful_tokens` context tokens into `inputs`, the bucket's static ones. memory: read from before
    anything of the engine was there. seen: context tokens that a block sees on average where documents share rows, 0 where they
    do not."""

    name: str
    engine: Engine
    bucket: Bucket
    report: BuildReport
    inputs: Mapping[str, Tensor]
    fill: Callable[[], None]
    useful_tokens: int
    memory: DeviceMemory
    seen: float = 0.0

    @property
    def step(self) -> str:
        """The step's name in the executor."""
        return f"train {self.bucket.name}"


@contextmanager
def workload_subject(workload: Workload, settings: Settings, device: torch.device) -> Iterator[Subject]:
    """Forward and backward of a full row of random data, without optimizer states. Raises SettingsError for soft labels."""
    refuse_soft_labels(settings)
    memory = DeviceMemory(device)
    precision = resolve_precision(settings.run.precision, device)
    config, bucket = workload.config(), workload.bucket
    inputs = RandomInputs(config, [bucket], device, compute_dtype(precision))
    target = workload.target(device, compute_dtype(precision))
    options = engine_options(settings, device, precision)
    engine = Engine(config, target, [bucket], inputs, optimizer=None, **options)
    engine.params.draw_(settings.run.seed)
    try:
        report = next(report for report in engine.build() if report.name == f"train {bucket.name}")
        fill = partial(inputs.fill, bucket)
        yield Subject(workload.name, engine, bucket, report, inputs(bucket), fill, bucket.B * bucket.S, memory)
    finally:
        engine.close()


@dataclass(frozen=True)
class DatasetSubjects:
    """The steps of all buckets of a dataset's plan, and the batches of its first epoch."""

    engine: Engine
    inputs: InputPipeline
    reports: Mapping[str, BuildReport]
    batches: tuple[Batch, ...]
    memory: DeviceMemory
    seen: float = 0.0

    def subject(self, bucket: Bucket, batch: Batch | None = None) -> Subject:
        """One bucket's, on `batch` or the first of its batches."""
        batch = batch or next(batch for batch in self.batches if batch.bucket == bucket)
        return Subject(
            bucket.name,
            self.engine,
            bucket,
            self.reports[f"train {bucket.name}"],
            self.inputs.inputs(bucket),
            partial(self.inputs.load, batch),
            batch.useful_tokens,
            self.memory,
            self.seen,
        )


@contextmanager
def dataset_subjects(
    data: Path | Sequence[str | Path], settings: Settings, device: torch.device, *, optimizer: bool = False
) -> Iterator[DatasetSubjects]:
    """An engine over the buckets that the first epoch of a dataset, or of several as a mixture, has batches for. optimizer:
    with masters, moments and the update's step."""
    memory = DeviceMemory(device)
    dataset = open_training_data(data, settings)
    precision = resolve_precision(settings.run.precision, device)
    config = drafter_config(settings, dataset.info)
    buckets = make_plan(settings, dataset, config, device).buckets
    batches = tuple(make_batch_plan(settings, dataset, buckets).epoch(0))
    used = {batch.bucket for batch in batches}
    buckets = tuple(bucket for bucket in buckets if bucket in used)
    seen = context_seen(settings, *planned_counts(dataset), config)
    with InputPipeline(dataset, buckets, **pipeline_options(settings, dataset, device, precision)) as inputs:
        engine = Engine(
            config,
            frozen_target(settings, dataset),
            buckets,
            inputs.inputs,
            optimizer=settings.optimizer if optimizer else None,
            **engine_options(settings, device, precision),
        )
        try:
            engine.params.load_(initial_weights(settings, config))
            reports = {report.name: report for report in engine.build()}
            yield DatasetSubjects(engine, inputs, reports, batches, memory, seen)
        finally:
            engine.close()


@contextmanager
def trained_from_disk(
    folder: Path, workload: Workload, settings: Settings, device: torch.device
) -> Iterator[DatasetSubjects]:
    """A workload's engine with its optimizer, fed from the samples in `folder` (bench.temporary_data)."""
    refuse_soft_labels(settings)
    memory = DeviceMemory(device)
    dataset = Dataset(folder)
    precision = resolve_precision(settings.run.precision, device)
    buckets = (workload.bucket,)
    plan = BatchPlan(dataset.lengths, buckets, seed=settings.run.seed)
    with InputPipeline(dataset, buckets, **pipeline_options(settings, dataset, device, precision)) as inputs:
        engine = Engine(
            workload.config(),
            workload.target(device, compute_dtype(precision)),
            buckets,
            inputs.inputs,
            optimizer=settings.optimizer,
            **engine_options(settings, device, precision),
        )
        try:
            engine.params.draw_(settings.run.seed)
            reports = {report.name: report for report in engine.build()}
            yield DatasetSubjects(engine, inputs, reports, tuple(plan.epoch(0)), memory)
        finally:
            engine.close()


def refuse_soft_labels(settings: Settings) -> None:
    """Raises SettingsError when the objective needs what random data does not have."""
    if settings.objective.kl_weight > 0:
        raise SettingsError(
            "objective.kl_weight: expected 0 for a named workload, which has no last_hidden; give DATA."
        )
