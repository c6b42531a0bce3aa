"""Residual addition, RMSNorm and the projection behind it, as one node: the normed input of the matmul is not kept but formed
again where the backward pass of the norm reads the stream anyway - one more write instead of R * D kept numbers a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.rms_norm import norm_backward, norm_forward
from engine.ops.weight import Weight, add_outer


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        residual: Tensor,
        delta: Tensor | None,
        norm_value: Tensor,
        norm: Weight,
        eps: float,
        value: Tensor,
        weight: Weight,
    ) -> tuple[Tensor, Tensor]:
        total, x, rstd = norm_forward(residual, delta, norm_value, eps)
        ctx.save_for_backward(total, rstd, value)
        ctx.norm, ctx.weight, ctx.has_delta = norm, weight, delta is not None
        ctx.set_materialize_grads(False)
        return (residual.view_as(residual) if total is residual else total), x @ value.t()

    @staticmethod
    def backward(ctx, dtotal: Tensor | None, dy: Tensor | None):
        total, rstd, value = ctx.saved_tensors
        assert dy is not None, "the projection of norm_linear is always used"
        x = dy @ value  # the gradient of the normed input first, then that input itself
        needs_dx = ctx.needs_input_grad[0] or (ctx.has_delta and ctx.needs_input_grad[1])
        dx = norm_backward(x, dtotal, total, ctx.norm, rstd, needs_dx=needs_dx, reform=True)
        add_outer(ctx.weight, dy, x)
        return dx, (dx if ctx.has_delta else None), *[None] * 5


def norm_linear(
    residual_RD: Tensor, delta_RD: Tensor | None, norm: Weight, eps: float, weight: Weight
) -> tuple[Tensor, Tensor]:
    """(s, RMSNorm(s) W^T) of s = residual + delta; [R, D] and [R, O]. See norm_linear_ref.py.

    Both inputs receive the same gradient tensor: neither branch may write to it.
    """
    return _NormLinear.apply(residual_RD, delta_RD, norm.value, norm, eps, weight.value, weight)
