"""What a draft begins with, the definition: tokens and positions of every slot, and the context's positions without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.draft_inputs import DraftTokens


def draft_tokens_ref(
    input_ids_BS: Tensor,
    position_ids_BS: Tensor,
    row_lengths_B: Tensor,
    anchor_positions_BN: Tensor,
    block_keep_mask_BN: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> DraftTokens:
    """An unused block holds mask tokens from position 0 on, and padding has position 0, whatever lies in the buffers."""
    S, keep = input_ids_BS.shape[1], block_keep_mask_BN > 0
    at = anchor_positions_BN.long()
    anchors_BN = torch.where(keep, input_ids_BS.gather(1, at), mask_token_id)
    first_BN = torch.where(keep, position_ids_BS.gather(1, at), 0)
    slot = torch.arange(block_size, device=at.device, dtype=torch.int32)
    ids = torch.where(slot == 0, anchors_BN[..., None], mask_token_id)
    shared = torch.cat([anchors_BN.flatten(), anchors_BN.new_full((1,), mask_token_id)])
    padding_BS = torch.arange(S, device=at.device) >= row_lengths_B[:, None]
    context_positions = torch.where(padding_BS, 0, position_ids_BS).flatten()
    return DraftTokens(
        ids.flatten().int(), shared.int(), (first_BN[..., None] + slot).flatten().int(), context_positions.int()
    )
