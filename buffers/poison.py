"""NaN and nonsense where nothing may look: whoever reads it is found out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_FAR = 1 << 30


def poison_padding(views: Mapping[str, Tensor]) -> None:
    """Writes into a bucket's inputs (those of buffers/filling.py) wherever no row and no kept block reaches: NaN into hidden
    states, tokens that do not exist, positions far off, a loss mask of ones, anchors at the row's end. No number that a step
    computes may change by it."""
    S = views["input_ids"].shape[1]
    padding_BS = torch.arange(S, device=views["input_ids"].device) >= views["row_lengths"][:, None]
    unused_BN = views["block_keep_mask"] == 0
    for name in ("target_hidden", "last_hidden"):
        if name in views:
            views[name].masked_fill_(padding_BS[..., None], float("nan"))
    for name, value in (("input_ids", -1), ("position_ids", _FAR), ("loss_mask", 1)):
        views[name].masked_fill_(padding_BS, value)
    for name in ("anchor_positions", "context_start", "context_end"):
        views[name].masked_fill_(unused_BN, S - 1)
