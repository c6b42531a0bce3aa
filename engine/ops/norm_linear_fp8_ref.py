"""Residual addition, RMSNorm and a projection in fp8, the definition: s = r + x;  y = RMSNorm(s) W^T on e4m3 numbers."""

from __future__ import annotations

from torch import Tensor

from engine.ops.linear_fp8_ref import linear_fp8_ref
from engine.ops.rms_norm_ref import add_rms_norm_ref
from engine.ops.weight import Weight


def norm_linear_fp8_ref(
    residual_RD: Tensor, delta_RD: Tensor | None, norm: Weight, eps: float, weight: Weight
) -> tuple[Tensor, Tensor]:
    """Returns (s [R, D], y [R, O]); with delta None, s is the residual itself."""
    total, x = add_rms_norm_ref(residual_RD, delta_RD, norm, eps)
    return total, linear_fp8_ref(x, weight)
