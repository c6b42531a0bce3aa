"""Matrices as e4m3 numbers with one scale a row, and their transposes: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def quantise_rows_ref(x_RC: Tensor, factor_C: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(values [R, C] e4m3, scale [R, 1] fp32) with values * scale ~ x * factor. The scale is the power of two by which the
    row's largest magnitude lies in [128, 256), at least 2^-60."""
    x_RC = x_RC.float() if factor_C is None else x_RC.float() * factor_C
    largest_R1 = x_RC.abs().amax(1, keepdim=True)
    exponent = ((largest_R1.view(torch.int32) >> 23) - 127 - 7).clamp(min=-60)
    scale_R1 = torch.ldexp(torch.ones_like(largest_R1), exponent)
    return (x_RC / scale_R1).to(torch.float8_e4m3fn), scale_R1


def turned_ref(values_RC: Tensor, factor_R: Tensor | None = None) -> Tensor:
    """[C, R rounded up to 16]: the transpose of e4m3 values, each row multiplied by its factor (fp32 [R, 1]) first."""
    dtype = values_RC.dtype
    values = values_RC.float() if factor_R is None else values_RC.float() * factor_R
    return F.pad(values.t(), (0, -len(values) % 16)).to(dtype).contiguous()
