"""Is a replay what the eager step computes? Tensor by tensor, exact unless told otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """The tensor that differs most, by max|a - b| / max|b|."""

    name: str
    relative: float


def worst_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Difference | None:
    """None when all tensors are bit-equal (NaN equals NaN). Raises ValueError when the names or shapes differ."""
    if found.keys() != expected.keys():
        raise ValueError(f"expected the tensors {sorted(expected)}, found {sorted(found)}")
    worst: Difference | None = None
    for name, a in found.items():
        b = expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"{name}: expected {b.dtype} {tuple(b.shape)}, found {a.dtype} {tuple(a.shape)}")
        differs = (a != b) & ~(a.isnan() & b.isnan())
        if not differs.any():
            continue
        error = torch.where(differs, (a.double() - b.double()).abs(), 0.0).max()
        scale = b.double().abs().nan_to_num(nan=0.0, posinf=0.0).max().clamp(min=1e-30)
        # NaN or infinity on one side only is as far off as can be.
        relative = (error / scale).nan_to_num(nan=math.inf, posinf=math.inf).item()
        if worst is None or relative > worst.relative:
            worst = Difference(name, relative)
    return worst
