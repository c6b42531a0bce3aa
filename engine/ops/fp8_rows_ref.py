"""Matrices as e4m3 numbers with one scale a row, and their transposes with one scale: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def quantise_rows_ref(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """(values [R, C] e4m3, scale [R, 1] fp32) with values * scale ~ x. The scale is the power of two by which the row's
    largest magnitude lies in [128, 256), at least 2^-60."""
    largest_R1 = x_RC.float().abs().amax(1, keepdim=True)
    exponent = ((largest_R1.view(torch.int32) >> 23) - 127 - 7).clamp(min=-60)
    scale_R1 = torch.ldexp(torch.ones_like(largest_R1), exponent)
    return (x_RC.float() / scale_R1).to(torch.float8_e4m3fn), scale_R1


def turned_ref(values_RC: Tensor, scale_R1: Tensor) -> tuple[Tensor, Tensor]:
    """(values [C, R rounded up to 16], scale []) of the transpose: every row brought to the largest scale, zeros behind R."""
    largest = scale_R1.amax()
    values = values_RC.float() * (scale_R1 / largest)
    return F.pad(values.t(), (0, -len(values) % 16)).to(values_RC.dtype).contiguous(), largest
