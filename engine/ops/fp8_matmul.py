"""The three matmuls of a linear map in fp8, by cuBLAS: every row of either operand has its own scale, sums are fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.fp8_rows import Fp8Rows, turned


@dataclass(frozen=True)
class Fp8Operand:
    """What the backward pass needs of a matrix: its transpose, and the scales that it had by rows.

    turned: e4m3 [C, R rounded up to 16]. scale: fp32 [R, 1]: the scales stand along the turned matrix's last axis, inside
    the sum, so they are moved to the other operand.
    """

    turned: Tensor
    scale: Tensor


def operand(x: Fp8Rows) -> Fp8Operand:
    """Of a quantised matrix."""
    return Fp8Operand(turned(x.values), x.scale)


def product(a: Fp8Rows, b: Fp8Rows, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a b^T: [M, K] and [N, K] -> [M, N] in `dtype` (bf16 on the GPU). fast: sums with the 14 bits of Hopper's fp8 unit all
    the way."""
    return torch._scaled_mm(a.values, b.values.t(), a.scale, b.scale.view(1, -1), out_dtype=dtype, use_fast_accum=fast)


def unscaled(values: Tensor) -> Fp8Rows:
    """Rows whose scales have been moved elsewhere."""
    return Fp8Rows(values, torch.ones(len(values), 1, device=values.device, dtype=torch.float32))


def input_gradient(dy_by_weight: Fp8Rows, weight: Fp8Operand, dtype: torch.dtype) -> Tensor:
    """dy W. dy_by_weight: dy times the weight's scales, [R, O], quantised."""
    return product(dy_by_weight, unscaled(weight.turned), dtype)


def add_weight_gradient_(
    grad_OI: Tensor, dy_by_weight: Fp8Rows, weight_scale_O1: Tensor, x: Fp8Operand, dtype: torch.dtype
) -> None:
    """grad += dy^T x. The rows' scales of dy and x, which stand inside the sum, go into the bytes of dy^T, relative to the
    largest: rows far below it round again, to what is as small beside the others."""
    scale_R1 = dy_by_weight.scale * x.scale
    largest = scale_R1.amax()
    dy_OR = Fp8Rows(turned(dy_by_weight.values, scale_R1 / largest), largest / weight_scale_O1)
    grad_OI.add_(product(dy_OR, unscaled(x.turned), dtype))
