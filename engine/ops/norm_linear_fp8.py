"""Residual addition, RMSNorm and the projection behind it as one node, with all three matmuls in fp8. The normed input is kept
as e4m3, one byte a number."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.fp8_matmul import add_weight_gradient, input_gradient, product
from engine.ops.fp8_norm import norm_rows
from engine.ops.fp8_rows import Fp8Turned, quantise_rows, turned
from engine.ops.rms_norm import norm_backward
from engine.ops.weight import Weight


class _NormLinearFp8(torch.autograd.Function):
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
        total, x8, rstd = norm_rows(residual, delta, norm_value, eps)
        weight8 = quantise_rows(value)
        of_x, of_weight = turned(x8), turned(weight8)
        ctx.save_for_backward(total, rstd, of_x.values, of_x.scale, of_weight.values, of_weight.scale)
        ctx.norm, ctx.weight, ctx.has_delta = norm, weight, delta is not None
        ctx.set_materialize_grads(False)
        y = product(x8, weight8, total.dtype)
        return (residual.view_as(residual) if total is residual else total), y

    @staticmethod
    def backward(ctx, dtotal: Tensor | None, dy: Tensor | None):
        total, rstd, x, x_scale, value, value_scale = ctx.saved_tensors
        assert dy is not None, "the projection of norm_linear is always used"
        dy8 = quantise_rows(dy)
        add_weight_gradient(ctx.weight, turned(dy8), Fp8Turned(x, x_scale), dy.dtype)
        dx = input_gradient(dy8, Fp8Turned(value, value_scale), dy.dtype)
        needs_dx = ctx.needs_input_grad[0] or (ctx.has_delta and ctx.needs_input_grad[1])
        dtotal = norm_backward(dx, dtotal, total, ctx.norm, rstd, needs_dx=needs_dx)
        return dtotal, (dtotal if ctx.has_delta else None), *[None] * 5


def norm_linear_fp8(
    residual_RD: Tensor, delta_RD: Tensor | None, norm: Weight, eps: float, weight: Weight
) -> tuple[Tensor, Tensor]:
    """(s, RMSNorm(s) W^T) of s = residual + delta; [R, D] and [R, O], multiples of 16. See norm_linear_fp8_ref.py.

    Both inputs receive the same gradient tensor: neither branch may write to it.
    """
    return _NormLinearFp8.apply(residual_RD, delta_RD, norm.value, norm, eps, weight.value, weight)
