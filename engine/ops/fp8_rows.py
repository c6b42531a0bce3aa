"""Matrices as e4m3 numbers with one scale a row, and their transposes with one scale: what Hopper's fp8 matmul takes (both
operands with the summed axis last).

Scales are powers of two, so that scaling never rounds. The largest magnitude of a row comes to lie in [128, 256); e4m3 ends
at 448 and keeps its relative precision down to 2^-6. A matrix is quantised once. In its transpose the rows' scales would
stand inside the sum of a matmul, so there every row takes the largest scale: only what lies 2^14 below the matrix's largest
number rounds again, to what is as small beside the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn
SMALLEST_EXPONENT = -60  # the scale of a row of zeros: no other row's scale is to be smaller
_MULTIPLE = 16  # of the summed axis, by the matmul
_TURN_ROWS, _TURN_COLUMNS = 64, 128  # swept on an H200: 3.6 to 3.8 TB/s; words of four bytes instead: the same


@dataclass(frozen=True)
class Fp8Rows:
    """values * scale is the matrix. values: e4m3 [R, C]. scale: fp32 [R, 1], powers of two."""

    values: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Fp8Turned:
    """values * scale is the transpose. values: e4m3 [C, R rounded up to 16], zeros behind R. scale: fp32 []."""

    values: Tensor
    scale: Tensor


@triton.jit
def row_scale(largest, SMALLEST: tl.constexpr):
    """Of a row's largest magnitude (fp32): its scale and the scale's inverse, both exact."""
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 7, 127 + SMALLEST)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantise(x_ptr, out_ptr, scale_ptr, C, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < C
    x = tl.load(x_ptr + row * C + c, ok, 0.0).to(tl.float32)
    scale, inverse = row_scale(tl.max(tl.abs(x), 0), SMALLEST)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * C + c, (x * inverse).to(out_ptr.dtype.element_ty), ok)


@triton.jit(do_not_specialize=["R"])
def _turn(x_ptr, scale_ptr, largest_ptr, out_ptr, R, R_padded, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :], 0.0)
    inverse = ((254 << 23) - tl.load(largest_ptr).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    factor = tl.load(scale_ptr + r, r < R, 0.0) * inverse
    x = (x.to(tl.float32) * factor[:, None]).to(out_ptr.dtype.element_ty)
    to = out_ptr + c.to(tl.int64)[:, None] * R_padded + r[None, :]
    tl.store(to, tl.trans(x), (c < C)[:, None] & (r < R_padded)[None, :])


def quantise_rows(x_RC: Tensor) -> Fp8Rows:
    """See fp8_rows_ref.py."""
    R, C = x_RC.shape
    values = torch.empty(R, C, device=x_RC.device, dtype=FP8)
    scale = torch.empty(R, 1, device=x_RC.device, dtype=torch.float32)
    block = triton.next_power_of_2(C)
    _quantise[(R,)](
        x_RC.contiguous(),
        values,
        scale,
        C,
        SMALLEST=SMALLEST_EXPONENT,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )
    return Fp8Rows(values, scale)


def turned(x: Fp8Rows) -> Fp8Turned:
    """See fp8_rows_ref.py."""
    R, C = x.values.shape
    padded = triton.cdiv(R, _MULTIPLE) * _MULTIPLE
    values = torch.empty(C, padded, device=x.values.device, dtype=FP8)
    largest = x.scale.amax()
    _turn[(triton.cdiv(padded, _TURN_ROWS), triton.cdiv(C, _TURN_COLUMNS))](
        x.values, x.scale, largest, values, R, padded, C, ROWS=_TURN_ROWS, COLUMNS=_TURN_COLUMNS, num_warps=4
    )
    return Fp8Turned(values, largest)
