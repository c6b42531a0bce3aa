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
        hidden, gate_up8, act8 = _to_activation(x8, gate_up_value)
        down8 = quantise_rows(down_value)
        kept = [] if recompute else _for_backward(x8, hidden, gate_up8, act8, down8)
        ctx.save_for_backward(total, rstd, gate_up_value, down_value, *kept)
        ctx.norm, ctx.gate_up, ctx.down = norm, gate_up, down
        ctx.has_delta, ctx.drop, ctx.eps = delta is not None, drop, eps
        ctx.set_materialize_grads(False)
        y = product(act8, down8, total.dtype)
        return (residual.view_as(residual) if total is residual else total), y

    @staticmethod
    def backward(ctx, dtotal: Tensor | None, dy: Tensor | None):
        total, rstd, gate_up_value, down_value, *kept = ctx.saved_tensors
        assert dy is not None, "the output of norm_mlp is always used"
        if not kept:
            x8 = norm_rows(total, None, ctx.norm.value, ctx.eps)[1]
            again = _to_activation(x8, gate_up_value)
            kept = _for_backward(x8, *again, quantise_rows(down_value))
            del x8, again
        hidden, x, x_scale, gate_up, gate_up_scale, act, act_scale, down, down_scale = kept
        dy8 = quantise_rows(dy)
        dact = input_gradient(dy8, Fp8Turned(down, down_scale), dy.dtype)
        add_weight_gradient(ctx.down, turned(dy8), turned(Fp8Rows(act, act_scale)), dy.dtype)
        dhidden8 = swiglu_backward_rows(hidden, dact)
        del dact
        add_weight_gradient(ctx.gate_up, turned(dhidden8), Fp8Turned(x, x_scale), dy.dtype)
        dx = input_gradient(dhidden8, Fp8Turned(gate_up, gate_up_scale), dy.dtype)
        needs_dx = ctx.needs_input_grad[0] or (ctx.has_delta and ctx.needs_input_grad[1])
        dtotal = norm_backward(dx, dtotal, total, ctx.norm, rstd, drop=ctx.drop, needs_dx=needs_dx)
        return dtotal, (dtotal if ctx.has_delta else None), *[None] * 9


def _to_activation(x8: Fp8Rows, gate_up: Tensor) -> tuple[Tensor, Fp8Rows, Fp8Rows]:
    """[gate | up] in bf16, its weight quantised, and the activation."""
    gate_up8 = quantise_rows(gate_up)
    hidden = product(x8, gate_up8, gate_up.dtype)
    return hidden, gate_up8, swiglu_rows(hidden)


def _for_backward(x8: Fp8Rows, hidden: Tensor, gate_up8: Fp8Rows, act8: Fp8Rows, down8: Fp8Rows) -> list[Tensor]:
    """What the backward pass needs: [gate | up], the activation, and the input and both weights turned."""
    of_x, of_gate_up, of_down = turned(x8), turned(gate_up8), turned(down8)
    kept = [hidden, of_x.values, of_x.scale, of_gate_up.values, of_gate_up.scale, act8.values, act8.scale]
    return [*kept, of_down.values, of_down.scale]


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
