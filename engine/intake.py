"""A generation's buckets, the order of its batches, and their way to the device; with the next generation all three are new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buffers.batching import Batch, BatchPlan
from buffers.dataset import SampleSource
from buffers.mixture import Mixture
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.assemble import make_batch_plan, make_plan, pipeline_options
from engine.checkpoint import Position
from engine.data_feed import training_steps
from engine.drafter_config import DrafterConfig
from engine.fingerprints import bucket_fingerprints
from engine.held_out import HeldOut, check_same_target
from engine.left_out import named_lengths
from engine.memory_budget import Budget
from engine.memory_estimate import Estimate
from engine.memory_report import check_plan
from engine.mixture_report import source_rows
from engine.settings import Settings
from graphs.fingerprint import Fingerprint


@dataclass(frozen=True)
class RunData:
    """What a run's data are and what is trained on them; the same for all generations."""

    training: SampleSource
    held_out: SampleSource | None
    config: DrafterConfig
    device: torch.device
    precision: str


@dataclass(frozen=True)
class IntakePlan:
    """What can be known of a generation before anything of it is allocated. too_long and sources: the rows that a run
    reports of its data."""

    settings: Settings
    buckets: tuple[Bucket, ...]
    batches: BatchPlan
    memory: Estimate
    fingerprints: dict[Bucket, Fingerprint]
    pipeline: dict[str, Any]
    too_long: list[Any]
    sources: list[Any]


def plan_intake(data: RunData, settings: Settings, budget: Budget | None) -> IntakePlan:
    """Plans buckets and batches and reckons their memory. Raises ValueError where the data have no plan under these settings,
    and SettingsError where they have not what the objective needs or the plan is over the budget."""
    pipeline = pipeline_options(settings, data.training, data.device, data.precision)
    if data.held_out is not None:
        check_same_target(settings, data.training, data.held_out)
    buckets = tuple(make_plan(settings, data.training, data.config, data.device).buckets)
    batches = make_batch_plan(settings, data.training, buckets)
    return IntakePlan(
        settings,
        buckets,
        batches,
        check_plan(settings, data.training, data.config, buckets, data.device, budget),
        bucket_fingerprints(
            settings,
            data.config,
            data.training.info,
            buckets,
            data.device,
            data.precision,
        ),
        pipeline,
        named_lengths(data.training, batches.too_long),
        source_rows(data.training, batches) if isinstance(data.training, Mixture) else [],
    )


class Intake:
    """The static inputs of a plan, and the loaders that fill them. Close it."""

    def __init__(self, data: RunData, plan: IntakePlan, *, predecessor: Intake | None = None) -> None:
        """predecessor: the generation before, whose best evaluation and copy streams are taken over. Raises ValueError when no
        held-out sample fits the buckets."""
        self.plan = plan
        folder, buckets = Path(plan.settings.run.output), plan.buckets
        before = predecessor.inputs.copy_stream if predecessor is not None else None
        self.inputs: InputPipeline = InputPipeline(data.training, buckets, copy_stream=before, **plan.pipeline)
        self.held_out: HeldOut | None = None
        if data.held_out is not None:
            pipeline = dict(plan.pipeline)
            if predecessor is not None and predecessor.held_out is not None:
                pipeline["copy_stream"] = predecessor.held_out.inputs.copy_stream
            self.held_out = HeldOut(data.held_out, buckets, plan.settings, folder=folder, pipeline=pipeline)
            if predecessor is not None and predecessor.held_out is not None:
                self.held_out.best = predecessor.held_out.best

    @property
    def skipped(self) -> list[int]:
        """Training samples that were left out because they are not finite."""
        return self.inputs.skipped

    def start(self, start: Position, total_steps: int, accumulation: int) -> Iterator[tuple[Batch, ...]]:
        """The batches of each step from `start` on; the loader runs ahead over the same ones."""
        arguments: dict[str, Any] = {"start": start, "total_steps": total_steps, "accumulation": accumulation}
        self.inputs.start(batch for step in training_steps(self.plan.batches, **arguments) for batch in step)
        return training_steps(self.plan.batches, **arguments)

    def for_engine(self) -> dict[str, Any]:
        """What a generation of steps takes by keyword."""
        held_out = self.held_out.inputs.inputs if self.held_out is not None else None
        return {"buckets": self.plan.buckets, "inputs": self.inputs.inputs, "eval_inputs": held_out}

    def write(self, settings: Settings) -> None:
        """Takes over the settings that hold from the next sample and the next evaluation on."""
        for inputs in self._pipelines():
            inputs.on_nonfinite = settings.data.on_nonfinite
        if self.held_out is not None:
            self.held_out.limit(settings.run.eval_batches)

    def named_buffers(self) -> list[tuple[str, dict[str, Tensor]]]:
        """All memory of the inputs, for buffers.arena.arena_table."""
        held_out = self.held_out.inputs.named_buffers() if self.held_out is not None else []
        return self.inputs.named_buffers() + [(f"held-out {name}", tensors) for name, tensors in held_out]

    def stop(self) -> None:
        """Ends the loaders and drops what they have not delivered."""
        for inputs in self._pipelines():
            inputs.stop()

    def close(self) -> None:
        """Ends the loaders and waits for their copies. May be called twice."""
        for inputs in self._pipelines():
            inputs.close()

    def _pipelines(self) -> list[InputPipeline]:
        return [self.inputs] + ([self.held_out.inputs] if self.held_out is not None else [])
