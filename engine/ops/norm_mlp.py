"""Residual addition, RMSNorm and the gated MLP as one node. Kept for the backward pass are the stream and [gate | up], or the
stream alone (recompute). One kernel forms the activation again over its gradient's buffer and [dgate | dup] over [gate | up];
the backward pass of the norm forms the input of the MLP again over its gradient: 2.6 GB less a layer on the largest workload."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.rms_norm import norm_backward, norm_forward
from engine.ops.weight import Weight, add_outer

_BLOCK = 1024


@triton.jit
def _swiglu_forward(gate_up_ptr, out_ptr, inter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < inter
    gate = tl.load(gate_up_ptr + row * 2 * inter + i, ok, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * inter + inter + i, ok, 0.0).to(tl.float32)
    tl.store(out_ptr + row * inter + i, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), ok)


@triton.jit
def _swiglu_backward(gate_up_ptr, dact_ptr, inter, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < inter
    gate = tl.load(gate_up_ptr + row * 2 * inter + i, ok, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * inter + inter + i, ok, 0.0).to(tl.float32)
    dact = tl.load(dact_ptr + row * inter + i, ok, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dact * up * (sigmoid + silu * (1.0 - sigmoid))
    dtype = gate_up_ptr.dtype.element_ty
    tl.store(gate_up_ptr + row * 2 * inter + i, dgate.to(dtype), ok)
    tl.store(gate_up_ptr + row * 2 * inter + inter + i, (dact * silu).to(dtype), ok)
    tl.store(dact_ptr + row * inter + i, (silu * up).to(dtype), ok)


class _NormMLP(torch.autograd.Function):
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
        total, x, rstd = norm_forward(residual, delta, norm_value, eps, drop)
        hidden = x @ gate_up_value.t()
        R, inter = hidden.shape[0], down_value.shape[1]
        act = hidden.new_empty(R, inter)
        _swiglu_forward[(R, triton.cdiv(inter, _BLOCK))](hidden, act, inter, BLOCK=_BLOCK, num_warps=4)
        ctx.save_for_backward(total, rstd, gate_up_value, down_value, *([] if recompute else [hidden]))
        ctx.norm, ctx.gate_up, ctx.down = norm, gate_up, down
        ctx.has_delta, ctx.drop, ctx.eps = delta is not None, drop, eps
        ctx.set_materialize_grads(False)
        return (residual.view_as(residual) if total is residual else total), act @ down_value.t()

    @staticmethod
    def backward(ctx, dtotal: Tensor | None, dy: Tensor | None):
        total, rstd, gate_up, down, *kept = ctx.saved_tensors
        assert dy is not None, "the output of norm_mlp is always used"
        x = None
        if not kept:
            _, x, _ = norm_forward(total, None, ctx.norm.value, ctx.eps)
        hidden = kept[0] if x is None else x @ gate_up.t()
        dact = dy @ down
        R, inter = dact.shape
        _swiglu_backward[(R, triton.cdiv(inter, _BLOCK))](hidden, dact, inter, BLOCK=_BLOCK, num_warps=4)
        dhidden, act = hidden, dact
        add_outer(ctx.down, dy, act)
        dx = dhidden @ gate_up
        needs_dx = ctx.needs_input_grad[0] or (ctx.has_delta and ctx.needs_input_grad[1])
        dtotal = norm_backward(dx, dtotal, total, ctx.norm, rstd, drop=ctx.drop, needs_dx=needs_dx, reform=x is None)
        add_outer(ctx.gate_up, dhidden, dx if x is None else x)
        return dtotal, (dtotal if ctx.has_delta else None), *[None] * 9


def norm_mlp(
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
    """Same contract as norm_mlp_ref. recompute: one matmul more backward, 2 I numbers a row less kept. Backward runs once only.

    Both inputs receive the same gradient tensor: neither branch may write to it.
    """
    return _NormMLP.apply(
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
