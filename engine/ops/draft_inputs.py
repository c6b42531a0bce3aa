"""What the ops that prepare a draft return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftTokens:
    """All int32. ids [B * N * K]: x[a] in slot 0, the mask token in the others; shared_ids [B * N + 1]: slot 0 of every block,
    then the mask token once; positions [B * N * K]: the anchor's in its document, plus the slot; context_positions [B * S]."""

    ids: Tensor
    shared_ids: Tensor
    positions: Tensor
    context_positions: Tensor


@dataclass(frozen=True)
class Supervision:
    """labels int64 [B, N, K - 1]: x[a + k], 0 where nothing supervises; w fp32 [B, N, K - 1]: 1 where something does, else 0;
    decayed fp32: w * exp(-(k - 1) / gamma), or w itself without a decay."""

    labels: Tensor
    w: Tensor
    decayed: Tensor
