"""Split of the fused projection, norms of q and k per head, and RoPE: the definition (Qwen3 attention).

q_h = rope(rms(q_h) * w_q, pos),  k_g = rope(rms(k_g) * w_k, pos),  v as it is
rope(x)[:E/2] = x1 cos - x2 sin,  rope(x)[E/2:] = x2 cos + x1 sin       (the halves convention of Hugging Face)
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.rms_norm_ref import normalise
from engine.ops.weight import Weight, accumulated


def rotate(x_RHE: Tensor, cos_RE: Tensor, sin_RE: Tensor) -> Tensor:
    """Rotates every head by its row's angle; cos and sin hold E/2 entries a row."""
    x1, x2 = x_RHE.chunk(2, dim=-1)
    cos, sin = cos_RE[:, None], sin_RE[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def qkv_rope_ref(
    qkv_RF: Tensor,
    q_norm: Weight,
    k_norm: Weight,
    cos_PE: Tensor,
    sin_PE: Tensor,
    positions_R: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    shared_slots: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [R, (H + 2G) E] -> q [R, H, E], k [R, G, E], v [R, G, E]. H = 0 for the context, which has no queries.

    cos, sin: fp32 [P, E/2] tables; positions: int32 [R], all < P. shared_slots = K: qkv holds a row for slot 0 of every
    block and one last row for all other slots, whose input is the same everywhere; the results are [R, ...] all the same.
    """
    R = positions_R.shape[0]
    if shared_slots:
        blocks = R // shared_slots
        others = qkv_RF[blocks:].expand(blocks, shared_slots - 1, -1)
        qkv_RF = torch.cat([qkv_RF[:blocks, None], others], dim=1).flatten(0, 1)
    heads = qkv_RF.reshape(R, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    index = positions_R.long()
    cos, sin = cos_PE[index], sin_PE[index]
    if num_heads:
        q = rotate(normalise(q, eps) * accumulated(q_norm), cos, sin).to(qkv_RF.dtype)
    k = rotate(normalise(k, eps) * accumulated(k_norm), cos, sin).to(qkv_RF.dtype)
    return q, k, v
