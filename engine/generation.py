"""What one generation of steps is made from, and the steps themselves; what lives longer is in engine.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.kernels import Ops, reserve_compilations, select_ops
from engine.metrics import Metrics
from engine.model import Drafter, Recompute
from engine.objective import Objective, TargetHead
from engine.optimizer import AdamW
from engine.params import ParamArena
from engine.settings import ObjectiveSettings
from engine.step import StepParts, forward_backward, forward_only
from graphs.executor import Executor
from graphs.steps import OnFailure

Inputs = Callable[[Bucket], Mapping[str, Tensor]]


@dataclass(frozen=True)
class GenerationOptions:
    """What a new generation may change. The buckets ascend in tokens; inputs are the static inputs of each, eval_inputs those
    of the held-out data over the same buckets, where there is any. training False: evaluation steps only. adds: an optimizer step
    may have several micro-batches, so that every bucket has a second step, which adds to the sums of the first."""

    buckets: tuple[Bucket, ...]
    inputs: Inputs
    objective: ObjectiveSettings
    attention: str = "auto"
    chunk_rows: int = 2048
    recompute: Recompute = "none"
    eval_inputs: Inputs | None = None
    training: bool = True
    adds: bool = True
    on_capture_failure: OnFailure = "stop"

    @property
    def kinds(self) -> tuple[str, ...]:
        """A bucket's training steps, in the order of an optimizer step."""
        return ("train", "add") if self.adds else ("train",)


@dataclass(frozen=True)
class Lasting:
    """What every generation of an engine works on, at addresses that stay."""

    config: DrafterConfig
    device: torch.device
    precision: str
    params: ParamArena
    embed_tokens: Tensor
    head: TargetHead
    metrics: Metrics
    eval_metrics: Metrics
    optimizer: AdamW | None
    denominator: Tensor
    scalars: dict[str, Tensor]  # ce_weight, kl_weight and gamma


@dataclass(frozen=True)
class Generation:
    """The steps of an executor and the parts they are made of, `evaluated` those of the forward-only ones. number counts from 1,
    and with it the buffers that steps hold the addresses of: inputs and tables are new in every generation."""

    number: int
    options: GenerationOptions
    ops: Ops
    drafter: Drafter
    parts: StepParts
    evaluated: StepParts
    executor: Executor


def assemble(lasting: Lasting, options: GenerationOptions, executor: Executor, number: int) -> Generation:
    """A generation whose steps are registered with the executor, the largest first, and not built yet."""
    config, device, buckets = lasting.config, lasting.device, options.buckets
    objective = Objective(
        options.objective.weighting, options.objective.kl_weight > 0, options.objective.dpace_alpha, **lasting.scalars
    )
    ops = select_ops(device, options.attention, lasting.precision)
    kinds = {(config.layer_window(i), config.layer_causal(i)) for i in range(config.num_hidden_layers)}
    reserve_compilations(ops, len(buckets) * len(kinds))
    positions = max(bucket.S for bucket in buckets) + config.block_size
    drafter = Drafter(
        config, lasting.params, lasting.embed_tokens, ops, max_positions=positions, recompute=options.recompute
    )
    parts = StepParts(drafter, lasting.head, objective, ops, lasting.metrics, options.chunk_rows)
    # What is trained is used in bf16, so that is how it is evaluated.
    evaluated = parts
    if lasting.precision == "fp8":
        plain = select_ops(device, options.attention)
        eval_drafter = Drafter(config, lasting.params, lasting.embed_tokens, plain, max_positions=positions)
        evaluated = replace(parts, drafter=eval_drafter, ops=plain)
    executor.on_failure = options.on_capture_failure
    if options.training:
        for bucket in reversed(buckets):
            step = partial(forward_backward, parts, options.inputs(bucket), lasting.denominator)
            # For the first micro-batch of an optimizer step, and for those that add to it.
            executor.add(f"train {bucket.name}", partial(step, first=True), group=bucket.name)
            if options.adds:
                executor.add(f"add {bucket.name}", step, group=bucket.name)
    if options.eval_inputs is not None:
        for bucket in reversed(buckets):
            forward = partial(forward_only, evaluated, options.eval_inputs(bucket), lasting.eval_metrics)
            executor.add(f"eval {bucket.name}", forward)
    if lasting.optimizer is not None:
        executor.add("update", lasting.optimizer.update)
    return Generation(number, options, ops, drafter, parts, evaluated, executor)
