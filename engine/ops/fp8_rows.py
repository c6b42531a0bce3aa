"""Matrices as e4m3 numbers with one scale a row, and their transposes: what Hopper's fp8 matmul takes (both operands with the
summed axis last).

Scales are powers of two, so that scaling never rounds. The largest magnitude of a row comes to lie in [128, 256); e4m3 ends
at 448 and keeps its relative precision down to 2^-6. Each matrix is quantised once; a scale that would stand inside a sum is
moved to the other operand (`factor`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = torch.float8_e4m3fn
# Rows of zeros take the smallest scale, and a product of two of those is still a normal number.
SMALLEST_EXPONENT = -60
_MULTIPLE = 16  # of the summed axis, by the matmul


@dataclass(frozen=True)
class Fp8Rows:
    """values * scale is the matrix. values: e4m3 [R, C]. scale: fp32 [R, 1], powers of two."""

    values: Tensor
    scale: Tensor


@triton.jit
def row_scale(largest, SMALLEST: tl.constexpr):
    """Of a row's largest magnitude (fp32): its scale and the scale's inverse, both exact."""
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 7, 127 + SMALLEST)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantise(
    x_ptr, factor_ptr, out_ptr, scale_ptr, C, HAS_FACTOR: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < C
    x = tl.load(x_ptr + row * C + c, ok, 0.0).to(tl.float32)
    if HAS_FACTOR:
        x *= tl.load(factor_ptr + c, ok, 0.0)
    scale, inverse = row_scale(tl.max(tl.abs(x), 0), SMALLEST)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * C + c, (x * inverse).to(out_ptr.dtype.element_ty), ok)


@triton.jit(do_not_specialize=["R"])
def _turn(
    x_ptr, factor_ptr, out_ptr, R, R_padded, C, HAS_FACTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :], 0.0)
    if HAS_FACTOR:
        factor = tl.load(factor_ptr + r, r < R, 0.0)
        x = (x.to(tl.float32) * factor[:, None]).to(out_ptr.dtype.element_ty)
    to = out_ptr + c.to(tl.int64)[:, None] * R_padded + r[None, :]
    tl.store(to, tl.trans(x), (c < C)[:, None] & (r < R_padded)[None, :])


@triton.jit(do_not_specialize=["R"])
def _turn_words(
    x_ptr,
    factor_ptr,
    out_ptr,
    R,
    quarter_R,
    quarter_C,
    HAS_FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """x as words of four columns, out as words of four rows: the tile that changes layout has words, not bytes."""
    r4 = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c4 = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    words = out_ptr + r4[None, :]
    ok = (c4 < quarter_C)[:, None] & (r4 < quarter_R)[None, :]
    row = r4.to(tl.int64) * 4
    columns = c4[None, :]
    inside = columns < quarter_C
    x0 = tl.load(x_ptr + row[:, None] * quarter_C + columns, (row < R)[:, None] & inside, 0)
    x1 = tl.load(x_ptr + (row + 1)[:, None] * quarter_C + columns, (row + 1 < R)[:, None] & inside, 0)
    x2 = tl.load(x_ptr + (row + 2)[:, None] * quarter_C + columns, (row + 2 < R)[:, None] & inside, 0)
    x3 = tl.load(x_ptr + (row + 3)[:, None] * quarter_C + columns, (row + 3 < R)[:, None] & inside, 0)
    if HAS_FACTOR:
        f0 = tl.load(factor_ptr + row, row < R, 0.0)[:, None]
        f1 = tl.load(factor_ptr + row + 1, row + 1 < R, 0.0)[:, None]
        f2 = tl.load(factor_ptr + row + 2, row + 2 < R, 0.0)[:, None]
        f3 = tl.load(factor_ptr + row + 3, row + 3 < R, 0.0)[:, None]
    for k in tl.static_range(4):
        b0, b1, b2, b3 = (x0 >> 8 * k) & 255, (x1 >> 8 * k) & 255, (x2 >> 8 * k) & 255, (x3 >> 8 * k) & 255
        if HAS_FACTOR:
            b0 = _times(b0, f0)
            b1 = _times(b1, f1)
            b2 = _times(b2, f2)
            b3 = _times(b3, f3)
        word = b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)
        tl.store(words + (c4.to(tl.int64)[:, None] * 4 + k) * quarter_R, tl.trans(word), ok)


@triton.jit
def _times(byte, factor):
    value = byte.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor
    return value.to(tl.float8e4nv).to(tl.int8, bitcast=True).to(tl.int32) & 255


def quantise_rows(x_RC: Tensor, factor_C: Tensor | None = None, *, warps: int = 0) -> Fp8Rows:
    """x times `factor` (fp32, one number a column), row by row. See fp8_rows_ref.py."""
    R, C = x_RC.shape
    x_RC = x_RC.contiguous()
    values = torch.empty(R, C, device=x_RC.device, dtype=FP8)
    scale = torch.empty(R, 1, device=x_RC.device, dtype=torch.float32)
    block = triton.next_power_of_2(C)
    _quantise[(R,)](
        x_RC,
        x_RC if factor_C is None else factor_C,
        values,
        scale,
        C,
        HAS_FACTOR=factor_C is not None,
        SMALLEST=SMALLEST_EXPONENT,
        BLOCK=block,
        num_warps=warps or max(1, min(16, block // 1024)),
    )
    return Fp8Rows(values, scale)


def turned_words(
    values_RC: Tensor, factor_R: Tensor | None = None, *, rows: int = 32, columns: int = 32, warps: int = 4
) -> Tensor:
    R, C = values_RC.shape
    padded = triton.cdiv(R, _MULTIPLE) * _MULTIPLE
    out = torch.empty(C, padded, device=values_RC.device, dtype=values_RC.dtype)
    _turn_words[(triton.cdiv(padded // 4, rows), triton.cdiv(C // 4, columns))](
        values_RC.view(torch.int32),
        values_RC if factor_R is None else factor_R,
        out.view(torch.int32),
        R,
        padded // 4,
        C // 4,
        HAS_FACTOR=factor_R is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
    )
    return out


def turned(
    values_RC: Tensor, factor_R: Tensor | None = None, *, rows: int = 64, columns: int = 128, warps: int = 4
) -> Tensor:
    """The transpose of e4m3 values, each row multiplied by its `factor` (fp32 [R, 1]) first: [C, R rounded up to 16], zeros
    where the rows end. See fp8_rows_ref.py."""
    R, C = values_RC.shape
    padded = triton.cdiv(R, _MULTIPLE) * _MULTIPLE
    out = torch.empty(C, padded, device=values_RC.device, dtype=values_RC.dtype)
    _turn[(triton.cdiv(padded, rows), triton.cdiv(C, columns))](
        values_RC,
        values_RC if factor_R is None else factor_R,
        out,
        R,
        padded,
        C,
        HAS_FACTOR=factor_R is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=warps,
    )
    return out
