"""SwiGLU forward and backward that leave e4m3 rows behind instead of bf16: the row is read, formed, rounded to the compute
dtype as in norm_mlp.py, and quantised."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.fp8_rows import FP8, SMALLEST_EXPONENT, Fp8Rows, row_scale


@triton.jit
def _forward(hidden_ptr, out_ptr, scale_ptr, inter, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    """A program holds a row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < inter
    gate = tl.load(hidden_ptr + row * 2 * inter + i, ok, 0.0).to(tl.float32)
    up = tl.load(hidden_ptr + row * 2 * inter + inter + i, ok, 0.0).to(tl.float32)
    act = (gate * tl.sigmoid(gate) * up).to(hidden_ptr.dtype.element_ty).to(tl.float32)
    scale, inverse = row_scale(tl.max(tl.abs(act), 0), SMALLEST)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * inter + i, (act * inverse).to(out_ptr.dtype.element_ty), ok)


@triton.jit
def _dgate_dup(hidden_ptr, dact_ptr, row, i, ok, inter):
    dtype = hidden_ptr.dtype.element_ty
    gate = tl.load(hidden_ptr + row * 2 * inter + i, ok, 0.0).to(tl.float32)
    up = tl.load(hidden_ptr + row * 2 * inter + inter + i, ok, 0.0).to(tl.float32)
    dact = tl.load(dact_ptr + row * inter + i, ok, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return (dact * up * (sigmoid + silu * (1.0 - sigmoid))).to(dtype), (dact * silu).to(dtype)


@triton.jit
def _backward(
    hidden_ptr, dact_ptr, out_ptr, scale_ptr, inter, SMALLEST: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """A program holds a row (WHOLE), or reads it twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    out = out_ptr + row * 2 * inter
    fp8 = out_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK)
    if WHOLE:
        dgate, dup = _dgate_dup(hidden_ptr, dact_ptr, row, i, i < inter, inter)
        largest = tl.maximum(tl.abs(dgate.to(tl.float32)), tl.abs(dup.to(tl.float32)))
        scale, inverse = row_scale(tl.max(largest, 0), SMALLEST)
        tl.store(out + i, (dgate.to(tl.float32) * inverse).to(fp8), i < inter)
        tl.store(out + inter + i, (dup.to(tl.float32) * inverse).to(fp8), i < inter)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, inter, BLOCK):
            dgate, dup = _dgate_dup(hidden_ptr, dact_ptr, row, start + i, start + i < inter, inter)
            largest = tl.maximum(largest, tl.maximum(tl.abs(dgate.to(tl.float32)), tl.abs(dup.to(tl.float32))))
        scale, inverse = row_scale(tl.max(largest, 0), SMALLEST)
        for start in range(0, inter, BLOCK):
            ok = start + i < inter
            dgate, dup = _dgate_dup(hidden_ptr, dact_ptr, row, start + i, ok, inter)
            tl.store(out + start + i, (dgate.to(tl.float32) * inverse).to(fp8), ok)
            tl.store(out + inter + start + i, (dup.to(tl.float32) * inverse).to(fp8), ok)
    tl.store(scale_ptr + row, scale)


def swiglu_rows(hidden: Tensor) -> Fp8Rows:
    """silu(gate) * up of hidden [R, gate | up]: [R, inter]."""
    R, inter = hidden.shape[0], hidden.shape[1] // 2
    values = torch.empty(R, inter, device=hidden.device, dtype=FP8)
    scale = torch.empty(R, 1, device=hidden.device, dtype=torch.float32)
    block = triton.next_power_of_2(inter)
    warps = max(1, min(32, block // 2048))
    _forward[(R,)](hidden, values, scale, inter, SMALLEST=SMALLEST_EXPONENT, BLOCK=block, num_warps=warps)
    return Fp8Rows(values, scale)


def swiglu_backward_rows(
    hidden: Tensor, dact: Tensor, *, whole: bool = True, block: int = 2048, warps: int = 0
) -> Fp8Rows:
    """[dgate | dup], [R, 2 inter], of hidden [R, gate | up] and the activation's gradient [R, inter].

    whole: a row at once in registers, 0.25 ms at W2's 8192 rows of 12288; else two passes in blocks, 0.28 ms at best. warps 0:
    as many as the row fills.
    """
    R, inter = dact.shape
    columns = triton.next_power_of_2(inter) if whole else block
    values = torch.empty(R, 2 * inter, device=hidden.device, dtype=FP8)
    scale = torch.empty(R, 1, device=hidden.device, dtype=torch.float32)
    _backward[(R,)](
        hidden,
        dact,
        values,
        scale,
        inter,
        SMALLEST=SMALLEST_EXPONENT,
        WHOLE=whole,
        BLOCK=columns,
        num_warps=warps or max(1, min(32, columns // 512)),
    )
    return Fp8Rows(values, scale)
