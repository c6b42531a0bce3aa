"""SwiGLU forward and backward that leave e4m3 rows behind instead of bf16: the row is read, formed, rounded to the compute
dtype as in mlp.py, and quantised."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.fp8_rows import FP8, SMALLEST_EXPONENT, Fp8Rows, row_scale


@triton.jit
def _act(hidden_ptr, row, i, ok, inter):
    dtype = hidden_ptr.dtype.element_ty
    gate = tl.load(hidden_ptr + row * 2 * inter + i, ok, 0.0).to(tl.float32)
    up = tl.load(hidden_ptr + row * 2 * inter + inter + i, ok, 0.0).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(dtype)


@triton.jit
def _forward_whole(hidden_ptr, out_ptr, scale_ptr, inter, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < inter
    act = _act(hidden_ptr, row, i, ok, inter)
    scale, inverse = row_scale(tl.max(tl.abs(act), 0).to(tl.float32), SMALLEST)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * inter + i, (act.to(tl.float32) * inverse).to(out_ptr.dtype.element_ty), ok)


@triton.jit
def _forward_twice(hidden_ptr, out_ptr, scale_ptr, inter, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inter, BLOCK):
        i = start + tl.arange(0, BLOCK)
        act = _act(hidden_ptr, row, i, i < inter, inter)
        largest = tl.maximum(largest, tl.abs(act.to(tl.float32)))
    scale, inverse = row_scale(tl.max(largest, 0), SMALLEST)
    tl.store(scale_ptr + row, scale)
    for start in range(0, inter, BLOCK):
        i = start + tl.arange(0, BLOCK)
        act = _act(hidden_ptr, row, i, i < inter, inter)
        tl.store(out_ptr + row * inter + i, (act.to(tl.float32) * inverse).to(out_ptr.dtype.element_ty), i < inter)


@triton.jit
def _dgate_dup(hidden_ptr, dact_ptr, factor_ptr, row, i, ok, inter):
    """The gradients of gate and up times their columns' factors, which are powers of two: rounded before, exact after."""
    dtype = hidden_ptr.dtype.element_ty
    gate = tl.load(hidden_ptr + row * 2 * inter + i, ok, 0.0).to(tl.float32)
    up = tl.load(hidden_ptr + row * 2 * inter + inter + i, ok, 0.0).to(tl.float32)
    dact = tl.load(dact_ptr + row * inter + i, ok, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = (dact * up * (sigmoid + silu * (1.0 - sigmoid))).to(dtype).to(tl.float32)
    dup = (dact * silu).to(dtype).to(tl.float32)
    dgate = (dgate * tl.load(factor_ptr + i, ok, 0.0)).to(dtype)
    dup = (dup * tl.load(factor_ptr + inter + i, ok, 0.0)).to(dtype)
    return dgate, dup


@triton.jit
def _backward_whole(
    hidden_ptr, dact_ptr, factor_ptr, out_ptr, scale_ptr, inter, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < inter
    dgate, dup = _dgate_dup(hidden_ptr, dact_ptr, factor_ptr, row, i, ok, inter)
    largest = tl.max(tl.maximum(tl.abs(dgate.to(tl.float32)), tl.abs(dup.to(tl.float32))), 0)
    scale, inverse = row_scale(largest, SMALLEST)
    tl.store(scale_ptr + row, scale)
    fp8 = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * 2 * inter + i, (dgate.to(tl.float32) * inverse).to(fp8), ok)
    tl.store(out_ptr + row * 2 * inter + inter + i, (dup.to(tl.float32) * inverse).to(fp8), ok)


@triton.jit
def _backward_twice(
    hidden_ptr, dact_ptr, factor_ptr, out_ptr, scale_ptr, inter, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inter, BLOCK):
        i = start + tl.arange(0, BLOCK)
        dgate, dup = _dgate_dup(hidden_ptr, dact_ptr, factor_ptr, row, i, i < inter, inter)
        largest = tl.maximum(largest, tl.maximum(tl.abs(dgate.to(tl.float32)), tl.abs(dup.to(tl.float32))))
    scale, inverse = row_scale(tl.max(largest, 0), SMALLEST)
    tl.store(scale_ptr + row, scale)
    fp8 = out_ptr.dtype.element_ty
    for start in range(0, inter, BLOCK):
        i = start + tl.arange(0, BLOCK)
        dgate, dup = _dgate_dup(hidden_ptr, dact_ptr, factor_ptr, row, i, i < inter, inter)
        tl.store(out_ptr + row * 2 * inter + i, (dgate.to(tl.float32) * inverse).to(fp8), i < inter)
        tl.store(out_ptr + row * 2 * inter + inter + i, (dup.to(tl.float32) * inverse).to(fp8), i < inter)


def swiglu_rows(hidden: Tensor, *, whole: bool = False, block: int = 2048, warps: int = 8) -> Fp8Rows:
    """silu(gate) * up of hidden [R, gate | up], as e4m3 rows."""
    R, inter = hidden.shape[0], hidden.shape[1] // 2
    values = torch.empty(R, inter, device=hidden.device, dtype=FP8)
    scale = torch.empty(R, 1, device=hidden.device, dtype=torch.float32)
    kernel = _forward_whole if whole else _forward_twice
    kernel[(R,)](
        hidden,
        values,
        scale,
        inter,
        SMALLEST=SMALLEST_EXPONENT,
        BLOCK=triton.next_power_of_2(inter) if whole else block,
        num_warps=warps,
    )
    return Fp8Rows(values, scale)


def swiglu_backward_rows(
    hidden: Tensor, dact: Tensor, factor: Tensor, *, whole: bool = False, block: int = 2048, warps: int = 8
) -> Fp8Rows:
    """[dgate | dup] times `factor` (fp32, a number for each of its columns), as e4m3 rows."""
    R, inter = dact.shape
    values = torch.empty(R, 2 * inter, device=hidden.device, dtype=FP8)
    scale = torch.empty(R, 1, device=hidden.device, dtype=torch.float32)
    kernel = _backward_whole if whole else _backward_twice
    kernel[(R,)](
        hidden,
        dact,
        factor,
        values,
        scale,
        inter,
        SMALLEST=SMALLEST_EXPONENT,
        BLOCK=triton.next_power_of_2(inter) if whole else block,
        num_warps=warps,
    )
    return Fp8Rows(values, scale)
