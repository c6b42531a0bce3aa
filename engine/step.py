"""The functions that are captured: one micro-batch forward and backward, and its forward-only twin for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels import Ops
from engine.metrics import Metrics
from engine.model import Drafter
from engine.objective import BlockSums, Objective, TargetHead, block_loss


@dataclass(frozen=True)
class StepParts:
    """All that a step touches besides its inputs. Gradients go to the parameter arena behind the drafter's weights."""

    drafter: Drafter
    head: TargetHead
    objective: Objective
    ops: Ops
    metrics: Metrics
    chunk_rows: int


def forward_backward(
    parts: StepParts, batch: Mapping[str, Tensor], denominator: Tensor, *, first: bool = False
) -> BlockSums:
    """Adds this micro-batch's gradient sums to the gradient arena, its weight to `denominator`, its numbers to the metrics.

    first: of an optimizer step; the gradient arena is then overwritten, whatever it holds.

    The loss gradient is formed with the loss (engine/ops/frozen_head.py), so autograd starts at the hidden states.
    """
    hidden_BNKD = parts.drafter(batch)
    sums = block_loss(
        hidden_BNKD.detach(), batch, parts.head, parts.objective, parts.ops, gradient=True, chunk_rows=parts.chunk_rows
    )
    parts.drafter.gradient_sums.begin(first)
    beginning: Tensor = _Beginning.apply(hidden_BNKD, sums.dh)
    beginning.backward()
    denominator += sums.weight
    parts.metrics.add(sums, batch["row_lengths"], batch["input_ids"].numel())
    return sums


class _Beginning(torch.autograd.Function):
    """A number without value whose gradient with respect to `y` is `dy`: what y.backward(dy) begins, for which torch loads its
    symbolic shapes, and with them sympy: most of a second of every start."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, dy: Tensor) -> Tensor:
        ctx.dy = dy
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.dy, None


@torch.no_grad()
def forward_only(parts: StepParts, batch: Mapping[str, Tensor], metrics: Metrics) -> BlockSums:
    """Held-out loss and acceptance: no gradient is formed, no parameter touched."""
    hidden_BNKD = parts.drafter(batch)
    sums = block_loss(
        hidden_BNKD, batch, parts.head, parts.objective, parts.ops, gradient=False, chunk_rows=parts.chunk_rows
    )
    metrics.add(sums, batch["row_lengths"], batch["input_ids"].numel())
    return sums
