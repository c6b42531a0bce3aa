"""The DFlash mask for flex_attention: tiles by block arithmetic from the anchors, on the device, and the compiled kernel.

Never a Q x KV grid of elements: a tile of queries sees whole tiles of context below its lowest anchor, one partial tile or a
few at the anchors themselves, and the tiles of its own blocks. The BlockMask is rebuilt inside the captured step, from
the anchors in the static buffers, by a handful of small kernels and without a host sync.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.mask import NO_WINDOW, DraftMask

TILE = 128
# Compilations that Dynamo may keep: these for whoever calls the kernel by hand, and what generations of steps reserve. Past
# the limit torch would run flex_attention uncompiled, dense and without a word; here hitting it is an error.
_BY_HAND = 64
_reserved = _BY_HAND


def reserve_compilations(shapes: int) -> None:
    """Makes room for one more generation: every shape is compiled twice, with and without gradient."""
    global _reserved
    _reserved += 2 * shapes
    _raise_limits()


def _raise_limits() -> None:
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _reserved)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _reserved)
    config.fail_on_recompile_limit_hit = True


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    # Traced away where it is compiled. Whatever made Dynamo leave this function to Python would leave the kernel dense.
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "flex attention would run uncompiled and dense: expected torch.compile to be at work, found it switched off; unset "
            'TORCH_COMPILE_DISABLE and torch.compiler.set_stance, or set model.attention = "triton"'
        )
    o: Tensor = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)
    return o


_raise_limits()
_compiled_flex = torch.compile(_flex, dynamic=False, fullgraph=True)


def tiles(mask: DraftMask, S: int, *, window: int | None, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """(partial, full): bool [B, Q/tile, (S + Q)/tile]. A full tile is visible throughout; a partial one may be, in part."""
    B, N = mask.anchor_positions.shape
    K, Q, device = mask.block_size, N * mask.block_size, mask.anchor_positions.device
    if S % tile or Q % tile:
        raise ValueError(
            f"flex attention needs S and Q as multiples of its tile {tile}, found S = {S}, Q = {Q}; pad the bucket"
        )
    low, high = (bound.reshape(B, Q // tile, tile) for bound in mask.bounds(window))
    first = torch.arange(0, S, tile, device=device)
    full_context = (low.amax(-1, keepdim=True) <= first) & (high.amin(-1, keepdim=True) >= first + tile)
    lowest = torch.where(low < high, low, NO_WINDOW).amin(-1, keepdim=True)
    any_context = (lowest < first + tile) & (high.amax(-1, keepdim=True) > first)
    start = torch.arange(0, Q, tile, device=device)
    first_block, last_block = start // K, (start + tile - 1) // K
    own = (first_block[None, :] <= last_block[:, None]) & (last_block[None, :] >= first_block[:, None])
    none = torch.zeros(B, Q // tile, Q // tile, dtype=torch.bool, device=device)
    return torch.cat([any_context & ~full_context, own.expand_as(none)], -1), torch.cat([full_context, none], -1)


def block_mask(mask: DraftMask, S: int, *, window: int | None, causal: bool, tile: int = TILE) -> BlockMask:
    """The BlockMask over [S context keys | Q draft keys], one for all heads."""
    K, Q = mask.block_size, mask.anchor_positions.shape[1] * mask.block_size
    anchors, starts = mask.anchor_positions, mask.context_start
    high_BN = torch.where(mask.block_keep_mask > 0, anchors, 0)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        n = q // K
        low = starts[b, n]
        if window is not None:
            low = torch.maximum(low, anchors[b, n] + q % K - (window - 1))
        context = (kv < S) & (kv >= low) & (kv < high_BN[b, n])
        own = (kv >= S) & ((kv - S) // K == n)
        if causal:
            own = own & (kv - S <= q)
        return context | own

    counts, indices = [], []
    for dense in tiles(mask, S, window=window, tile=tile):
        dense = dense[:, None].int()
        counts.append(dense.sum(-1, dtype=torch.int32))
        indices.append(torch.argsort(dense, dim=-1, descending=True, stable=True).int())
    return BlockMask.from_kv_blocks(
        counts[0], indices[0], counts[1], indices[1], BLOCK_SIZE=tile, mask_mod=mask_mod, seq_lengths=(Q, S + Q)
    )


def attention_flex(
    q_BQHE: Tensor,
    k_context_BSGE: Tensor,
    v_context_BSGE: Tensor,
    k_draft_BQGE: Tensor,
    v_draft_BQGE: Tensor,
    tiles: BlockMask,
) -> Tensor:
    """Compiled flex_attention under a BlockMask of `block_mask`. Same tensors as attention_ref; returns o [B, Q, H, E]."""
    k = torch.cat([k_context_BSGE, k_draft_BQGE], dim=1).transpose(1, 2)
    v = torch.cat([v_context_BSGE, v_draft_BQGE], dim=1).transpose(1, 2)
    q = q_BQHE.transpose(1, 2)
    o = _compiled_flex(q, k, v, block_mask=tiles, enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)
