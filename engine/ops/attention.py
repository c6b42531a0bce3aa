"""Attention of the draft stream to [context | draft] in Triton, made for the DFlash mask: attention_ref.py is what it
computes, attention_kernels.py how.

No atomics: the same inputs give the same bits. No host sync and no launch that depends on data, so it can be captured;
what it allocates then comes from the capture's pool. One compilation serves every B, S, N and window.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from engine.mask import NO_WINDOW, DraftMask
from engine.ops.attention_kernels import dkv_kernel, dq_kernel, draft_kernel, forward_kernel, sum_splits_kernel
from engine.ops.attention_tiles import Tiles, block_layout, power_of_two, splits_for, tiles_for
from engine.ops.card import shared_memory_and_processors

# Blocks whose bounds dkv_kernel reads at once.
_CHUNK = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def attention(
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
    """Returns o [B, Q, H, E], contiguous, in q's dtype (bf16, fp16, fp32). Differentiable in the first five arguments.

    Arguments as in attention_ref. Inputs may be slices of wider rows, as a fused projection leaves them: the heads of a
    row lie side by side, row and batch strides are free. E is 64, 128 or 256 (16 and 32 for tests). Context at or past
    the row's highest anchor may hold anything, NaN included; the rest must be finite. Any order of anchors is right;
    sorted ones with the unused blocks last are fast.

    Raises ValueError for a layout, shape, dtype or device that the kernels do not take.
    """
    return _Attention.apply(q_BQHE, k_context_BSGE, v_context_BSGE, k_draft_BQGE, v_draft_BQGE, mask, window, causal)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k_context, v_context, k_draft, v_draft, mask, window, causal):
        o, lse = attention_forward(q, k_context, v_context, k_draft, v_draft, mask, window=window, causal=causal)
        ctx.save_for_backward(q, k_context, v_context, k_draft, v_draft, o, lse)
        ctx.mask, ctx.window, ctx.causal = mask, window, causal
        return o

    @staticmethod
    def backward(ctx, do):
        q, k_context, v_context, k_draft, v_draft, o, lse = ctx.saved_tensors
        do = do if _in_rows(do) else do.contiguous()
        gradients = attention_backward(
            do, q, k_context, v_context, k_draft, v_draft, o, lse, ctx.mask, window=ctx.window, causal=ctx.causal
        )
        return *gradients, None, None, None


def attention_forward(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_draft: Tensor,
    v_draft: Tensor,
    mask: DraftMask,
    *,
    window: int | None = None,
    causal: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Outside autograd: (o, lse), lse fp32 [B, G, Q * H / G] in base 2.

    tiles: other tile sizes than the card's, for measuring.
    """
    _check(q, k_context, v_context, k_draft, v_draft, mask, window)
    B, Q, H, E = q.shape
    S, G = k_context.shape[1:3]
    R, K, N = H // G, mask.block_size, mask.anchor_positions.shape[1]
    tile = (tiles or _card_tiles(q, K * R)).forward
    layout = block_layout(tile.rows, R, K)
    o = _like(q)
    lse = torch.empty(B, G, Q * R, dtype=torch.float32, device=q.device)
    forward_kernel[B * G, triton.cdiv(N, layout.blocks) * layout.parts](
        q, k_context, v_context, k_draft, v_draft, o, lse,
        mask.anchor_positions, mask.block_keep_mask, mask.context_start,
        *_strides(q, k_context, v_context, k_draft, v_draft, o),
        N, S, NO_WINDOW if window is None else window, E**-0.5,
        G=G, R=R, E=E, K=K, CAUSAL=causal, ROWS=tile.rows, KEYS=tile.keys,
        BLOCKS=layout.blocks, PARTS=layout.parts, POSITIONS=layout.positions, DRAFT=layout.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return o, lse


def attention_backward(
    do: Tensor,
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_draft: Tensor,
    v_draft: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: DraftMask,
    *,
    window: int | None = None,
    causal: bool = False,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outside autograd: dq, dk_context, dv_context, dk_draft, dv_draft, contiguous, from attention_forward's inputs and
    results. tiles, splits: other than the card's, for measuring.
    """
    _check(q, k_context, v_context, k_draft, v_draft, mask, window)
    _check_rows("do", do, q.shape, q.dtype)
    _check_rows("o", o, q.shape, q.dtype)
    B, Q, H, E = q.shape
    S, G = k_context.shape[1:3]
    R, K, N = H // G, mask.block_size, mask.anchor_positions.shape[1]
    tiles = tiles or _card_tiles(q, K * R)
    tile, layout = tiles.dq, block_layout(tiles.dq.rows, R, K)
    numbers = (mask.anchor_positions, mask.block_keep_mask, mask.context_start)
    sizes = (N, S, NO_WINDOW if window is None else window, E**-0.5)
    dq, dk, dv, dk_draft, dv_draft = map(_like, (q, k_context, v_context, k_draft, v_draft))

    delta = torch.empty_like(lse)
    bounds = torch.empty(2, B, Q * R, dtype=torch.int32, device=q.device)
    dq_kernel[B * G, triton.cdiv(N, layout.blocks) * layout.parts](
        q, k_context, v_context, k_draft, v_draft, o, do, lse, delta, *bounds, dq, dk_draft, dv_draft, *numbers,
        *_strides(q, k_context, v_context, k_draft, v_draft, o, do, dq, dk_draft, dv_draft),
        *sizes, G=G, R=R, E=E, K=K, CAUSAL=causal, ROWS=tile.rows, KEYS=tile.keys,
        BLOCKS=layout.blocks, PARTS=layout.parts, POSITIONS=layout.positions, DRAFT=layout.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if layout.parts > 1:
        draft_kernel[B * G, N](
            q, k_draft, v_draft, do, lse, delta, dk_draft, dv_draft,
            *_strides(q, k_draft, v_draft, do, dk_draft, dv_draft),
            N, E**-0.5, G=G, R=R, E=E, K=K, CAUSAL=causal,
            ROWS=tile.rows, PARTS=layout.parts, POSITIONS=layout.positions, DRAFT=layout.keys,
            num_warps=tile.warps, num_stages=1,
        )  # fmt: skip

    tile = tiles.dkv
    positions = block_layout(tile.rows, R, 1).positions
    if splits is None:
        slots = shared_memory_and_processors(q.device)[1] * max(1, 8 // tile.warps)
        splits = splits_for(S, triton.cdiv(Q, positions), B * G, tile.keys, window, slots)
    # A single split writes the gradients themselves. Those of several are partial sums, contiguous [B, S, G, E] each.
    partial = torch.empty(2, splits, B, S, G, E, dtype=torch.float32, device=q.device) if splits > 1 else None
    to_dk, to_dv = (dk, dv) if partial is None else (partial[0, 0], partial[1, 0])
    dkv_kernel[B * G, splits, triton.cdiv(S, tile.keys)](
        q, k_context, v_context, do, lse, delta, *bounds, to_dk, to_dv, *numbers,
        *_strides(q, k_context, v_context, do, to_dk, to_dv), B * S * G * E,
        *sizes, G=G, R=R, E=E, K=K, ROWS=tile.rows, KEYS=tile.keys, CHUNK=_CHUNK,
        EVEN=tile.rows % R == 0 and Q % positions == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if partial is not None:
        sum_splits_kernel[S, B, 2](
            partial, dk, dv, *_strides(dk, dv), B * S * G * E, S, splits, WIDTH=G * E, BLOCK=power_of_two(G * E)
        )
    return dq, dk, dv, dk_draft, dv_draft


def _card_tiles(q: Tensor, block_rows: int) -> Tiles:
    return tiles_for(q.shape[-1], q.element_size(), shared_memory_and_processors(q.device)[0], block_rows)


def _in_rows(x: Tensor) -> bool:
    """Whether the heads of each [heads, E] row lie side by side, and rows on addresses that wide loads accept."""
    heads_side_by_side = x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return heads_side_by_side and x.data_ptr() % 16 == 0 and x.stride(1) * x.element_size() % 16 == 0


def _strides(*tensors: Tensor) -> list[int]:
    """Batch strides, then row strides, in elements. A lone row may have any batch stride, so 0 stands for it."""
    return [x.stride(0) if x.shape[0] > 1 else 0 for x in tensors] + [x.stride(1) for x in tensors]


def _like(x: Tensor) -> Tensor:
    """A contiguous tensor of x's shape, whatever x's strides."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _check_rows(name: str, x: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype or not _in_rows(x):
        raise ValueError(
            f"expected {name} as {list(shape)} {dtype}, the heads of a row side by side and rows aligned to 16 bytes, "
            f"found {list(x.shape)} {x.dtype} with strides {list(x.stride())}. Call .contiguous() or .to() on it."
        )
    if x.shape[1] * x.stride(1) >= 1 << 31:
        raise ValueError(f"expected fewer than 2^31 elements in a batch row of {name}, found more. Shorten S or Q.")


def _check(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_draft: Tensor,
    v_draft: Tensor,
    mask: DraftMask,
    window: int | None,
) -> None:
    """Raises ValueError, from shapes and strides alone, for what the kernels would read wrongly."""
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"expected tensors on a CUDA device, found {q.device}. Use attention_ref there.")
    if q.dtype not in _DTYPES:
        raise ValueError(f"expected bfloat16, float16 or float32, found {q.dtype}. Cast the inputs.")
    B, Q, H, E = q.shape
    S, G = k_context.shape[1:3]
    N, K = mask.anchor_positions.shape[1], mask.block_size
    if H % G:
        raise ValueError(f"expected H as a multiple of G = {G}, found {H}. Check the heads of q and k.")
    if N * K != Q:
        raise ValueError(f"expected Q = N * K = {N} * {K}, found {Q}. Check that q and the mask belong together.")
    if window is not None and window < 1:
        raise ValueError(f"expected a window of at least 1, found {window}. Use None for a full layer.")
    context, draft = torch.Size((B, S, G, E)), torch.Size((B, Q, G, E))
    _check_rows("q", q, q.shape, q.dtype)
    _check_rows("k_context", k_context, context, q.dtype)
    _check_rows("v_context", v_context, context, q.dtype)
    _check_rows("k_draft", k_draft, draft, q.dtype)
    _check_rows("v_draft", v_draft, draft, q.dtype)
    for name in ("anchor_positions", "block_keep_mask", "context_start"):
        numbers: Tensor = getattr(mask, name)
        if numbers.shape != (B, N) or not numbers.is_contiguous():
            raise ValueError(f"expected {name} as contiguous [{B}, {N}], found {list(numbers.shape)}. Check the mask.")
