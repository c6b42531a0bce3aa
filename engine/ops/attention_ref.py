"""Attention of the draft stream to [context | draft], plain torch: the definition.

    o[b, q, h] = sum_j softmax_j(q . k_j * E^-0.5 | visible(b, q, j)) v_j,   j over S context keys and Q draft keys

Heads h of one group share a key head (GQA): g = h // (H // G). Softmax in fp32 or better. No dropout, no bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.mask import DraftMask, visible


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
    k = torch.cat([k_context_BSGE, k_draft_BQGE], dim=1)
    v = torch.cat([v_context_BSGE, v_draft_BQGE], dim=1)
    q = q_BQHE.reshape(B, Q, G, H // G, E)
    scores = torch.einsum("bqgre,bkge->bgrqk", q, k) * E**-0.5
    hidden = ~visible(mask, S, window=window, causal=causal)
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    p = scores.softmax(-1).to(v.dtype)
    return torch.einsum("bgrqk,bkge->bqgre", p, v).reshape(B, Q, H, E)
