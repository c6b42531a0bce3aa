"""Adds the column sums of partial results to a gradient, in a fixed order and in one launch (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS, _ROWS = 16, 128


@triton.jit
def _add_sums(grad_ptr, partial_ptr, P, D, stride, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, P, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial_ptr + row * stride + column[None], (row < P) & (column[None] < D), 0.0)
    inside = column < D
    result = tl.sum(total, 0)
    if ADD:
        result += tl.load(grad_ptr + column, inside, 0.0).to(tl.float32)
    tl.store(grad_ptr + column, result.to(grad_ptr.dtype.element_ty), inside)


def add_sums(grad_D: Tensor, partial_PD: Tensor, *, add: bool) -> None:
    """grad [D] += sum over P of partial fp32 [P, D], or = with add False; fp32, rounded once. partial's rows are contiguous."""
    P, D = partial_PD.shape
    _add_sums[(triton.cdiv(D, _COLUMNS),)](
        grad_D, partial_PD, P, D, partial_PD.stride(0), ADD=add, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8
    )
