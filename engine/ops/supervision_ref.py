"""Labels and weights of every slot that predicts, the definition: w = keep * m[a + k] * [a + k in the anchor's document]."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.draft_inputs import Supervision


def supervision_ref(
    input_ids_BS: Tensor,
    loss_mask_BS: Tensor,
    anchor_positions_BN: Tensor,
    block_keep_mask_BN: Tensor,
    context_end_BN: Tensor,
    gamma: Tensor | None,
    *,
    block_size: int,
) -> Supervision:
    """gamma: 0-D fp32, or None for no decay. Labels of weight 0 are token 0, whatever the padding holds."""
    slot = torch.arange(1, block_size, device=input_ids_BS.device, dtype=anchor_positions_BN.dtype)
    at = anchor_positions_BN[..., None] + slot
    inside = (at < context_end_BN[..., None]) & (block_keep_mask_BN[..., None] > 0)
    index = at.clamp(max=input_ids_BS.shape[1] - 1).long().flatten(1)
    supervised = inside & (loss_mask_BS.gather(1, index).view_as(at) > 0)
    labels = torch.where(supervised, input_ids_BS.gather(1, index).view_as(at), 0).long()
    w = supervised.float()
    return Supervision(labels, w, w if gamma is None else w * torch.exp(-(slot - 1) / gamma))
