"""The mask: its dense form against the rule written out, and flex_attention's tiles against the dense form."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.mask import DraftMask, visible
from engine.ops import attention_flex
from engine.ops.attention_flex import block_mask, tiles
from engine.ops.attention_ref import attention_ref

pytestmark = pytest.mark.usefixtures("one_thread")

S = 64
TILE = 16
# K and N with N * K a multiple of the tile: blocks that lie across tiles, fill one, or fill several.
SHAPES = [(4, 8), (7, 16), (10, 8), (16, 5), (32, 2)]
KINDS = [(None, False), (None, True), (1, True), (11, False), (11, True), (200, True)]


def random_mask(K: int, N: int, *, documents: bool = False, ordered: bool = True) -> DraftMask:
    """Three rows: all blocks used; some unused, with remains of another batch in their slots; none used."""
    generator = torch.Generator().manual_seed(K)
    anchors = torch.randint(S, (3, N), generator=generator, dtype=torch.int32)
    keep = torch.ones(3, N, dtype=torch.uint8)
    keep[1, N // 2 :] = 0
    keep[2] = 0
    if ordered:
        anchors = torch.where(keep > 0, anchors, S).sort(-1).values.clamp(max=S - 1)
    start = torch.zeros_like(anchors)
    if documents:
        edges = torch.tensor([0, 9, 40])
        start = edges[torch.bucketize(anchors, edges, right=True) - 1].int()
    return DraftMask(anchors, keep, start, K)


def written_out(mask: DraftMask, *, window: int | None, causal: bool) -> Tensor:
    B, N = mask.anchor_positions.shape
    K = mask.block_size
    seen = torch.zeros(B, N * K, S + N * K, dtype=torch.bool)
    for b in range(B):
        for n in range(N):
            anchor, start = int(mask.anchor_positions[b, n]), int(mask.context_start[b, n])
            for k in range(K):
                for s in range(S):
                    in_window = window is None or s >= anchor + k - (window - 1)
                    if mask.block_keep_mask[b, n] and start <= s < anchor and in_window:
                        seen[b, n * K + k, s] = True
                for j in range(K):
                    if j <= k or not causal:
                        seen[b, n * K + k, S + n * K + j] = True
    return seen


def of_tiles(dense: Tensor) -> Tensor:
    """bool [B, Q/tile, (S + Q)/tile] spread over the elements of every tile."""
    return dense.repeat_interleave(TILE, -2).repeat_interleave(TILE, -1)


@pytest.mark.parametrize(("window", "causal"), KINDS)
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_visible_is_the_written_out_rule(K: int, N: int, window: int | None, causal: bool) -> None:
    for mask in (random_mask(K, N), random_mask(K, N, documents=True)):
        found = visible(mask, S, window=window, causal=causal)
        assert torch.equal(found, written_out(mask, window=window, causal=causal))
        assert found.any(-1).all(), "no query may see nothing"


@pytest.mark.parametrize(("window", "causal"), KINDS)
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_tiles_hold_what_is_visible(K: int, N: int, window: int | None, causal: bool) -> None:
    for ordered, documents in itertools.product([True, False], repeat=2):
        mask = random_mask(K, N, documents=documents, ordered=ordered)
        seen = visible(mask, S, window=window, causal=causal)
        partial, full = (of_tiles(dense) for dense in tiles(mask, S, window=window, tile=TILE))
        assert not (partial & full).any()
        assert seen[full].all(), "a full tile must be visible throughout"
        assert not (seen & ~(partial | full)).any(), "a visible pair must lie in a listed tile"
        in_flex = full | (partial & of_block_mask(block_mask(mask, S, window=window, causal=causal, tile=TILE), N * K))
        assert torch.equal(in_flex, seen)


def of_block_mask(made: BlockMask, Q: int) -> Tensor:
    """mask_mod at every (query, key)."""
    B = made.kv_num_blocks.shape[0]
    b, q, kv = torch.arange(B)[:, None, None], torch.arange(Q)[:, None], torch.arange(S + Q)
    return made.mask_mod(b, torch.tensor(0), q, kv)


def test_tiles_below_the_anchors_are_full_and_those_above_absent() -> None:
    anchors = torch.tensor([[37, 40, 41, 44]], dtype=torch.int32)
    mask = DraftMask(anchors, torch.ones(1, 4, dtype=torch.uint8), torch.zeros_like(anchors), 4)
    partial, full = tiles(mask, S, window=None, tile=TILE)
    assert full.tolist() == [[[True, True, False, False, False]]]
    assert partial.tolist() == [[[False, False, True, False, True]]]


@pytest.mark.parametrize("window", [None, 11])
def test_block_mask_lists_the_tiles_in_ascending_order(window: int | None) -> None:
    mask = random_mask(7, 16, documents=True)
    made = block_mask(mask, S, window=window, causal=False, tile=TILE)
    assert made.full_kv_num_blocks is not None and made.full_kv_indices is not None
    listed = ((made.kv_num_blocks, made.kv_indices), (made.full_kv_num_blocks, made.full_kv_indices))
    for dense, (counts, indices) in zip(tiles(mask, S, window=window, tile=TILE), listed, strict=True):
        for b in range(dense.shape[0]):
            for row, expected in enumerate(dense[b]):
                count = int(counts[b, 0, row])
                assert indices[b, 0, row, :count].tolist() == expected.nonzero()[:, 0].tolist()


def test_shapes_that_do_not_fill_a_tile_are_refused() -> None:
    mask = random_mask(4, 8)
    with pytest.raises(ValueError, match="multiples of its tile 128, found S = 64, Q = 32; pad the bucket"):
        tiles(mask, S, window=None)


def random_qkv(B: int, Q: int, heads: int, G: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v of the context, k and v of the draft; head dim 16."""
    generator = torch.Generator().manual_seed(0)
    lengths = ((Q, heads), (S, G), (S, G), (Q, G), (Q, G))
    return [torch.randn(B, length, h, 16, generator=generator, dtype=dtype) for length, h in lengths]


@pytest.mark.parametrize(("window", "causal"), KINDS)
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_reference_attention_is_a_softmax_over_what_is_visible(
    K: int, N: int, window: int | None, causal: bool
) -> None:
    mask = random_mask(K, N, documents=True, ordered=False)
    inputs = [x.requires_grad_() for x in random_qkv(3, N * K, 6, 2, torch.float64)]
    q, k_context, v_context, k_draft, v_draft = inputs
    found = attention_ref(q, k_context, v_context, k_draft, v_draft, mask, window=window, causal=causal)
    k, v = (torch.cat(pair, 1).repeat_interleave(3, 2) for pair in ((k_context, k_draft), (v_context, v_draft)))
    seen = visible(mask, S, window=window, causal=causal)[:, None]
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / 4
    expected = torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
    torch.testing.assert_close(found, expected)
    do = torch.randn_like(found)
    for a, b in zip(torch.autograd.grad(found, inputs, do), torch.autograd.grad(expected, inputs, do), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("window", "causal"), [(None, False), (11, True)])
@pytest.mark.parametrize("heads", [2, 6])
def test_flex_attention_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch, window: int | None, causal: bool, heads: int
) -> None:
    # Uncompiled, flex_attention evaluates mask_mod everywhere; the tiles are held to it by the tests above.
    uncompiled: Callable[..., Tensor] = flex_attention
    monkeypatch.setattr(attention_flex, "_compiled_flex", uncompiled)
    K, N = 7, 16
    mask = random_mask(K, N, documents=True)
    q, k_context, v_context, k_draft, v_draft = random_qkv(3, N * K, heads, 2)
    made = block_mask(mask, S, window=window, causal=causal, tile=TILE)
    found = attention_flex.attention_flex(q, k_context, v_context, k_draft, v_draft, tiles=made)
    expected = attention_ref(q, k_context, v_context, k_draft, v_draft, mask, window=window, causal=causal)
    torch.testing.assert_close(found, expected)
