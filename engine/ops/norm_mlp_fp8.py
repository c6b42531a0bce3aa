"""Residual addition, RMSNorm and the gated MLP as one node, with all six matmuls in fp8. Kept for the backward pass are the
stream, [gate | up] in bf16 and the matmuls' inputs as e4m3 - or the stream alone (recompute)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.fp8_matmul import add_weight_gradient, input_gradient, product
from engine.ops.fp8_norm import norm_rows
from engine.ops.fp8_rows import Fp8Rows, Fp8Turned, quantise_rows, turned
from engine.ops.fp8_swiglu import swiglu_backward_rows, swiglu_rows
from engine.ops.rms_norm import norm_backward
from engine.ops.weight import Weight


class _NormMLPFp8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        residual: Tensor,
        delta: Tensor | None,
        norm_value: Tensor,
        norm: Weight,
        eps: float,
        gate_up_value: Tensor,
        gate_up: Weight,
        down_value: Tensor,
        down: Weight,
        drop: int,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        total, x8, rstd = norm_rows(residual, delta, norm_value, eps, drop)
        kept, act8 = _to_activation(x8, gate_up_value)
        down8 = quantise_rows(down_value)
        of_down = turned(down8)
        ctx.save_for_backward(total, rstd, gate_up_value, of_down.values, of_down.scale, *([] if recompute else kept))
        ctx.norm, ctx.gate_up, ctx.down = norm, gate_up, down
        ctx.has_delta, ctx.drop, ctx.eps = delta is not None, drop, eps
        ctx.set_materialize_grads(False)
        y = product(act8, down8, total.dtype)
        return (residual.view_as(residual) if total is residual else total), y

    @staticmethod
    def backward(ctx, dtotal: Tensor | None, dy: Tensor | None):
        total, rstd, gate_up, down, down_scale, *kept = ctx.saved_tensors
        assert dy is not None, "the output of norm_mlp is always used"
        if not kept:
            kept, _ = _to_activation(norm_rows(total, None, ctx.norm.value, ctx.eps)[1], gate_up)
        hidden, x, x_scale, gate_up8, gate_up_scale, act, act_scale = kept
        dy8 = quantise_rows(dy)
        dact = input_gradient(dy8, Fp8Turned(down, down_scale), dy.dtype)
        add_weight_gradient(ctx.down, turned(dy8), turned(Fp8Rows(act, act_scale)), dy.dtype)
        dhidden8 = swiglu_backward_rows(hidden, dact)
        del dact
        add_weight_gradient(ctx.gate_up, turned(dhidden8), Fp8Turned(x, x_scale), dy.dtype)
        dx = input_gradient(dhidden8, Fp8Turned(gate_up8, gate_up_scale), dy.dtype)
        needs_dx = ctx.needs_input_grad[0] or (ctx.has_delta and ctx.needs_input_grad[1])
        dtotal = norm_backward(dx, dtotal, total, ctx.norm, rstd, drop=ctx.drop, needs_dx=needs_dx)
        return dtotal, (dtotal if ctx.has_delta else None), *[None] * 9


def _to_activation(x8: Fp8Rows, gate_up: Tensor) -> tuple[list[Tensor], Fp8Rows]:
    """What the backward pass needs - [gate | up], the turned input and weight, the activation - and the activation."""
    gate_up8 = quantise_rows(gate_up)
    hidden = product(x8, gate_up8, gate_up.dtype)
    act8, of_x, of_gate_up = swiglu_rows(hidden), turned(x8), turned(gate_up8)
    kept = [hidden, of_x.values, of_x.scale, of_gate_up.values, of_gate_up.scale, act8.values, act8.scale]
    return kept, act8


def norm_mlp_fp8(
    residual_RD: Tensor,
    delta_RD: Tensor | None,
    norm: Weight,
    eps: float,
    gate_up: Weight,
    down: Weight,
    *,
    drop_first_of: int = 0,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Same contract as norm_mlp_fp8_ref; D and inter multiples of 16. recompute: one matmul more backward, less kept.

    Both inputs receive the same gradient tensor: neither branch may write to it.
    """
    return _NormMLPFp8.apply(
        residual_RD,
        delta_RD,
        norm.value,
        norm,
        eps,
        gate_up.value,
        gate_up,
        down.value,
        down,
        drop_first_of,
        recompute,
    )
