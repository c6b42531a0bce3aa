"""Who sees whom in a DFlash training step (arXiv 2602.06036).

A draft query of block n sees context keys in [context_start, anchor) - strictly before the anchor, whose hidden state the
server does not have yet - and the keys of its own block, and nothing else. A sliding layer of window W sees context keys
>= anchor + k - (W - 1). An unused block (keep = 0) sees its own block only, so that no row is ever empty.

`visible` below is the definition; the tiles for flex_attention and the Triton kernels are tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_WINDOW = 1 << 30


@dataclass(frozen=True)
class DraftMask:
    """The per-block numbers from which every form of the mask follows. All int32 [B, N] on one device, fixed addresses."""

    anchor_positions: Tensor
    block_keep_mask: Tensor
    context_start: Tensor
    block_size: int

    def bounds(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Visible context [low, high) of every draft position, int32 [B, N, K] each; empty (low >= high) when unused."""
        k = torch.arange(self.block_size, device=self.anchor_positions.device, dtype=torch.int32)
        anchor_BN1 = self.anchor_positions[..., None]
        keep_BN1 = self.block_keep_mask[..., None] > 0
        low = self.context_start[..., None].expand(*self.anchor_positions.shape, self.block_size)
        if window is not None:
            low = torch.maximum(low, anchor_BN1 + k - (window - 1))
        high = torch.where(keep_BN1, anchor_BN1, 0).expand_as(low)
        return low, high


def visible(mask: DraftMask, S: int, *, window: int | None, causal: bool) -> Tensor:
    """The whole mask as bool [B, Q, S + Q]: context keys first, then draft keys. For tests and the CPU; O(Q * (S + Q))."""
    B, N = mask.anchor_positions.shape
    K, Q = mask.block_size, N * mask.block_size
    device = mask.anchor_positions.device
    low, high = (bound.reshape(B, Q, 1) for bound in mask.bounds(window))
    context = torch.arange(S, device=device)
    sees_context_BQS = (context >= low) & (context < high)
    draft = torch.arange(Q, device=device)
    own_block_QQ = (draft[:, None] // K) == (draft[None, :] // K)
    if causal:
        own_block_QQ = own_block_QQ & (draft[None, :] <= draft[:, None])
    return torch.cat([sees_context_BQS, own_block_QQ.expand(B, Q, Q)], dim=-1)
