"""Zeros over the padding of a batch's context, the definition: x[b, s] <- 0 for s >= length_b."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_padding_ref(x_BSF: Tensor, lengths_B: Tensor) -> None:
    """x [B, S, F], written in place; lengths int32 [B]."""
    padding_BS = torch.arange(x_BSF.shape[1], device=x_BSF.device) >= lengths_B[:, None]
    x_BSF.masked_fill_(padding_BS[..., None], 0)
