"""Attention of the draft stream to [context | draft] in Triton, made for the DFlash mask: see attention_ref.py for what it
computes and attention_kernels.py for how.

No atomics: the same inputs give the same bits. No host sync and no launch that depends on data, so it can be captured; what it
allocates comes from the pool of the capture. One compilation serves every B, S, N and window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton
from torch import Tensor

from engine.mask import NO_WINDOW, DraftMask
from engine.ops.attention_kernels import (
    dkv_kernel,
    dq_kernel,
    draft_kernel,
    forward_kernel,
    sum_splits_kernel,
)
from engine.ops.attention_tiles import LARGE_SHARED_MEMORY, Tiles, block_layout, power_of_two, splits_for, tiles_for

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

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
    """Returns o [B, Q, H, E], contiguous, in q's dtype (bf16, fp16 or fp32). Differentiable in the first five arguments.

    Arguments as in attention_ref. Inputs may be slices of wider rows, as a fused projection leaves them: each row's heads lie
    side by side, the row and batch strides are free. E is 64, 128 or 256 (16 and 32 for tests). Context at or past the highest
    anchor may hold anything, NaN included; all else must be finite. Fastest where anchors are sorted and unused blocks last.

    Raises ValueError for a layout, shape, dtype or device that the kernels do not take.
    """
    return _Attention.apply(q_BQHE, k_context_BSGE, v_context_BSGE, k_draft_BQGE, v_draft_BQGE, mask, window, causal)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k_context: Tensor,
        v_context: Tensor,
        k_draft: Tensor,
        v_draft: Tensor,
        mask: DraftMask,
        window: int | None,
        causal: bool,
    ) -> Tensor:
        o, lse = attention_forward(q, k_context, v_context, k_draft, v_draft, mask, window=window, causal=causal)
        ctx.save_for_backward(q, k_context, v_context, k_draft, v_draft, o, lse)
        ctx.mask, ctx.window, ctx.causal = mask, window, causal
        return o

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        do = do if _in_rows(do) else do.contiguous()
        return *attention_backward(do, *saved, ctx.mask, window=ctx.window, causal=ctx.causal), None, None, None


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
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outside autograd: (o, lse), lse fp32 [B, G, Q * H / G] in base 2. `out` receives o and may be a slice of wider rows.

    tiles: other tile sizes than the card's, for measuring.
    """
    _check(q, k_context, v_context, k_draft, v_draft, mask, window)
    B, Q, H, E = q.shape
    S, G = k_context.shape[1:3]
    R, K, N = H // G, mask.block_size, mask.anchor_positions.shape[1]
    tile = (tiles or _card_tiles(q)).forward
    layout = block_layout(tile.rows, R, K)
    o = _output(out, q)
    lse = torch.empty(B, G, Q * R, dtype=torch.float32, device=q.device)
    forward_kernel[B * G, triton.cdiv(N, layout.blocks) * layout.parts](
        q, k_context, v_context, k_draft, v_draft, o, lse, mask.anchor_positions, mask.block_keep_mask, mask.context_start,
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
    out: tuple[Tensor | None, ...] = (None,) * 5,
) -> Gradients:
    """Outside autograd: dq, dk_context, dv_context, dk_draft, dv_draft from attention_forward's inputs and results.

    `out` receives them and may hold slices of wider rows. tiles, splits: other than the card's, for measuring.
    """
    _check(q, k_context, v_context, k_draft, v_draft, mask, window)
    if do.shape != q.shape or not _in_rows(do):
        raise ValueError(_layout_message("do", do, q.shape))
    B, Q, H, _ = q.shape
    tiles = tiles or _card_tiles(q)
    delta = torch.empty_like(lse)
    dq, dk_context, dv_context, dk_draft, dv_draft = (
        _output(given, like) for given, like in zip(out, (q, k_context, v_context, k_draft, v_draft), strict=True)
    )
    _launch_dq(
        do, q, k_context, v_context, k_draft, v_draft, o, lse, delta, dq, dk_draft, dv_draft, mask, window, causal, tiles
    )
    _launch_dkv(do, q, k_context, v_context, lse, delta, dk_context, dv_context, mask, window, tiles, splits)
    return dq, dk_context, dv_context, dk_draft, dv_draft


def _launch_dq(
    do: Tensor,
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_draft: Tensor,
    v_draft: Tensor,
    o: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk_draft: Tensor,
    dv_draft: Tensor,
    mask: DraftMask,
    window: int | None,
    causal: bool,
    tiles: Tiles,
) -> None:
    """Writes delta, dq and the draft keys' gradients: one kernel, or two where a block's rows fill more than one tile."""
    B, _, H, E = q.shape
    S, G = k_context.shape[1:3]
    R, K, N = H // G, mask.block_size, mask.anchor_positions.shape[1]
    tile = tiles.dq
    layout = block_layout(tile.rows, R, K)
    dq_kernel[B * G, triton.cdiv(N, layout.blocks) * layout.parts](
        q, k_context, v_context, k_draft, v_draft, o, do, lse, delta, dq, dk_draft, dv_draft,
        mask.anchor_positions, mask.block_keep_mask, mask.context_start,
        *_strides(q, k_context, v_context, k_draft, v_draft, o, do, dq, dk_draft, dv_draft),
        N, S, NO_WINDOW if window is None else window, E**-0.5,
        G=G, R=R, E=E, K=K, CAUSAL=causal, ROWS=tile.rows, KEYS=tile.keys,
        BLOCKS=layout.blocks, PARTS=layout.parts, POSITIONS=layout.positions, DRAFT=layout.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if layout.parts > 1:
        draft_kernel[B * G, N](
            q, k_draft, v_draft, do, lse, delta, dk_draft, dv_draft,
            *_strides(q, k_draft, v_draft, do, dk_draft, dv_draft),
            N, E**-0.5,
            G=G, R=R, E=E, K=K, CAUSAL=causal,
            ROWS=tile.rows, PARTS=layout.parts, POSITIONS=layout.positions, DRAFT=layout.keys,
            num_warps=tile.warps, num_stages=1,
        )  # fmt: skip


def _launch_dkv(
    do: Tensor,
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    mask: DraftMask,
    window: int | None,
    tiles: Tiles,
    splits: int | None,
) -> None:
    """Writes the context keys' gradients: straight from one kernel, or as fp32 partial sums that a second one adds up."""
    B, Q, H, E = q.shape
    S, G = k_context.shape[1:3]
    R, K, N = H // G, mask.block_size, mask.anchor_positions.shape[1]
    tile = tiles.dkv
    if tile.rows < R:
        raise ValueError(f"expected at most {tile.rows} heads in a GQA group, found {R}. Use attention = 'flex'.")
    if splits is None:
        slots = _card(q.device)[1] * max(1, 8 // tile.warps)
        splits = splits_for(S, triton.cdiv(Q, tile.rows // R), B * G, tile.keys, window, slots)
    # One split writes its sums as they are; the strides of several are those of a contiguous [splits, B, S, G, E].
    partial = torch.empty(2, splits, B, S, G, E, dtype=torch.float32, device=q.device) if splits > 1 else None
    to_dk, to_dv = (dk, dv) if partial is None else (partial[0, 0], partial[1, 0])
    dkv_kernel[B * G, splits, triton.cdiv(S, tile.keys)](
        q, k_context, v_context, do, lse, delta, to_dk, to_dv,
        mask.anchor_positions, mask.block_keep_mask, mask.context_start,
        *_strides(q, k_context, v_context, do, to_dk, to_dv), B * S * G * E,
        N, S, NO_WINDOW if window is None else window, E**-0.5,
        G=G, R=R, E=E, K=K, ROWS=tile.rows, KEYS=tile.keys, CHUNK=_CHUNK,
        EVEN=tile.rows % R == 0 and Q % (tile.rows // R) == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if partial is not None:
        sum_splits_kernel[S, B, 2](
            partial, dk, dv, *_strides(dk, dv), B * S * G * E, S, splits, WIDTH=G * E, BLOCK=power_of_two(G * E), num_warps=4
        )


@cache
def _card(device: torch.device) -> tuple[int, int]:
    """(shared memory in bytes that a block may have, multiprocessors) of a device; an H200's where Triton is interpreted."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY, 132
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties["max_shared_mem"], properties["multiprocessor_count"]


def _card_tiles(q: Tensor) -> Tiles:
    return tiles_for(q.shape[-1], q.element_size(), _card(q.device)[0])


def _in_rows(x: Tensor) -> bool:
    """Whether the heads of each [.., heads, E] row lie side by side, on an address that wide loads accept."""
    return x.stride(3) == 1 and x.stride(2) == x.shape[3] and x.data_ptr() % 16 == 0 and x.stride(1) * x.element_size() % 16 == 0


def _strides(*tensors: Tensor) -> list[int]:
    """Batch and row stride of each, in elements. A lone row of a batch may have any batch stride: 0 keeps kernels general."""
    return [stride for x in tensors for stride in (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1))]


def _output(out: Tensor | None, like: Tensor) -> Tensor:
    if out is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if out.shape != like.shape or out.dtype != like.dtype or not _in_rows(out):
        raise ValueError(_layout_message("out", out, like.shape))
    return out


def _layout_message(name: str, found: Tensor, expected: torch.Size) -> str:
    return (
        f"expected {name} as {list(expected)} with the heads of a row side by side and 16-byte aligned rows, found "
        f"{list(found.shape)} {found.dtype} with strides {list(found.stride())}. Call .contiguous() on it."
    )


def _check(
    q: Tensor, k_context: Tensor, v_context: Tensor, k_draft: Tensor, v_draft: Tensor, mask: DraftMask, window: int | None
) -> None:
    """Raises ValueError, by shapes and strides alone, for what the kernels would read wrongly."""
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"expected tensors on a CUDA device, found {q.device}. Use attention_ref there.")
    if q.dtype not in _DTYPES:
        raise ValueError(f"expected bfloat16, float16 or float32, found {q.dtype}. Cast the inputs.")
    B, Q, H, E = q.shape
    S, G = k_context.shape[1:3]
    N, K = mask.anchor_positions.shape[1], mask.block_size
    if H % G or N * K != Q:
        raise ValueError(
            f"expected H = {H} as a multiple of G = {G} and Q = N * K = {N} * {K}, found Q = {Q}. Check q and the mask."
        )
    context, draft = torch.Size((B, S, G, E)), torch.Size((B, Q, G, E))
    for name, x, shape in (
        ("q", q, q.shape),
        ("k_context", k_context, context),
        ("v_context", v_context, context),
        ("k_draft", k_draft, draft),
        ("v_draft", v_draft, draft),
    ):
        if x.shape != shape or x.dtype != q.dtype or not _in_rows(x):
            raise ValueError(_layout_message(name, x, shape))
        if x.shape[1] * x.stride(1) >= 1 << 31:
            raise ValueError(f"expected fewer than 2^31 elements in a row of the batch of {name}, found more. Shorten S or Q.")
    for name, numbers in (
        ("anchor_positions", mask.anchor_positions),
        ("block_keep_mask", mask.block_keep_mask),
        ("context_start", mask.context_start),
    ):
        if numbers.shape != (B, N) or not numbers.is_contiguous():
            raise ValueError(f"expected {name} as contiguous [{B}, {N}], found {list(numbers.shape)}. Check the mask.")
    if window is not None and window < 1:
        raise ValueError(f"expected a window of at least 1, found {window}. Use None for a full layer.")
