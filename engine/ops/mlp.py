"""The gated MLP with only its input and [gate | up] kept for the backward pass. One kernel there forms the activation again
(over the buffer of its gradient) and [dgate | dup] (over the saved [gate | up]): 2.3 GB less a layer on the largest workload."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.weight import Weight, add_outer_

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


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gate_up: Tensor, gate_up_grad: Tensor, down: Tensor, down_grad: Tensor) -> Tensor:
        hidden = x @ gate_up.t()
        R, inter = hidden.shape[0], down.shape[1]
        act = hidden.new_empty(R, inter)
        _swiglu_forward[(R, triton.cdiv(inter, _BLOCK))](hidden, act, inter, BLOCK=_BLOCK, num_warps=4)
        ctx.save_for_backward(x, hidden, gate_up, down)
        ctx.gate_up_grad, ctx.down_grad = gate_up_grad, down_grad
        return act @ down.t()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, hidden, gate_up, down = ctx.saved_tensors
        dact = dy @ down
        R, inter = dact.shape
        _swiglu_backward[(R, triton.cdiv(inter, _BLOCK))](hidden, dact, inter, BLOCK=_BLOCK, num_warps=4)
        act, dhidden = dact, hidden  # the kernel turned each buffer into the other thing it is needed for
        add_outer_(ctx.down_grad, dy, act)
        add_outer_(ctx.gate_up_grad, dhidden, x)
        return dhidden @ gate_up, None, None, None, None


def mlp(x_RD: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """x [R, D], gate_up [2 inter, D] (gate's rows first), down [D, inter] -> [R, D]. See mlp_ref.py. Backward runs once only."""
    return _MLP.apply(x_RD, gate_up.value, gate_up.grad, down.value, down.grad)
