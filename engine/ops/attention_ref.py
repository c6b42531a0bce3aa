"""Attention of the draft stream to [context | own block], plain torch: the definition.

    o[b, q, h] = sum_j softmax_j(q . k_j * E^-0.5) v_j,   j over the visible context keys and the visible keys of q's block

What is visible is engine/mask.py's; keys of other blocks are never visible, so they are never formed. Heads of one group share
a key head (GQA). Softmax in fp32 or better. No dropout, no bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.mask import DraftMask


def attention_ref(
    q_BQHE: Tensor,
    k_context_BSGE: Tensor,
    v_context_BSGE: Tensor,
    k_draft_BQGE: Tensor,
    v_draft_BQGE: Tensor,
    mask: DraftMask,
    *,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """Returns o [B, Q, H, E] in q's dtype. Differentiable in the first five arguments by autograd.

    window: None sees the whole prefix; causal: whether slot k sees slots j <= k of its block only.
    """
    B, Q, H, E = q_BQHE.shape
    S, G = k_context_BSGE.shape[1:3]
    K, N, R = mask.block_size, mask.anchor_positions.shape[1], H // G
    # Rows (r, k) of one key head together: every product below is one batched matmul.
    q = q_BQHE.view(B, N, K, G, R, E).permute(0, 3, 1, 4, 2, 5) * E**-0.5  # B G N R K E
    k_block, v_block = (t.view(B, N, K, G, E).permute(0, 3, 1, 2, 4) for t in (k_draft_BQGE, v_draft_BQGE))  # B G N K E
    k_context, v_context = (t.transpose(1, 2) for t in (k_context_BSGE, v_context_BSGE))  # B G S E

    low_BNK, high_BNK = mask.bounds(window)
    context = torch.arange(S, device=q.device)
    hidden = (context < low_BNK[..., None]) | (context >= high_BNK[..., None])  # B N K S
    to_context = (q.reshape(B, G, -1, E) @ k_context.mT).view(B, G, N, R, K, S)
    to_context = to_context.masked_fill(hidden[:, None, :, None], float("-inf"))
    to_block = q @ k_block[:, :, :, None].mT  # B G N R K K
    if causal:
        slot = torch.arange(K, device=q.device)
        to_block = to_block.masked_fill(slot > slot[:, None], float("-inf"))

    scores = torch.cat([to_context, to_block], dim=-1)
    p = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(v_block.dtype)
    p_context, p_block = p.split([S, K], dim=-1)
    o = (p_context.reshape(B, G, -1, S) @ v_context).view(B, G, N, R, K, E) + p_block @ v_block[:, :, :, None]
    return o.permute(0, 2, 4, 1, 3, 5).reshape(B, Q, H, E)
