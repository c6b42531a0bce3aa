"""What goes into and comes out of a vocabulary head's loss, row by row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Teacher:
    """hidden [T, D]: the target's normed last hidden states; row [R] int32: which of them teaches each draft row."""

    hidden: Tensor
    row: Tensor


@dataclass(frozen=True)
class RowLoss:
    """ce, kl: fp32 [R] (kl is zeros without a teacher); correct: bool [R], argmax equals the label (the first of equals
    wins); dh: [R, D] in h's dtype, not weighted by row, or None when no gradient was asked for; dh_scale: fp32 [R], what the
    rows of dh still have to be multiplied by, None for 1 (weigh_rows.py does it)."""

    ce: Tensor
    kl: Tensor
    correct: Tensor
    dh: Tensor | None
    dh_scale: Tensor | None = None
