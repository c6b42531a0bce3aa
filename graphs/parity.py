"""Is a replay what the eager step computes? Tensor by tensor, exact unless told otherwise."""

from __future__ import annotations

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
        if torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)) and torch.equal(a.isnan(), b.isnan()):
            continue
        relative = ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item()
        if worst is None or not relative <= worst.relative:
            worst = Difference(name, relative)
    return worst
