"""Triton's attention in fp32, output and five gradients, against the reference in fp64."""

from typing import Any

import pytest
import torch

from bench.tile_check import tile_check
from engine.ops.attention import attention, attention_backward, attention_forward
from engine.ops.attention_ref import attention_ref
from engine.ops.attention_tiles import Tile, Tiles, tiles_for
from engine.ops.card import LARGE_SHARED_MEMORY
from tests.attention_helpers import NAMES, Case, inputs_of, leaves, mask_of, relative_error

TOLERANCE = 2e-6
# Small enough that a context of 160 keys has whole tiles and edges; rows that do not all hold whole blocks.
TILES = Tiles(Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1))
CASES = [
    pytest.param(Case(K=4, N=21, H=1, G=1, S=160), 1, id="odd-N"),
    pytest.param(
        Case(K=8, N=9, H=2, G=1, S=150, causal=True, documents=True, unused=2), 2, id="causal-documents-unused"
    ),
    pytest.param(Case(K=10, N=9, H=4, G=1, S=200, window=70), 1, id="K-does-not-divide-window"),
    pytest.param(
        Case(K=16, N=4, H=4, G=2, S=130, B=2, window=9, causal=True), 1, id="tiny-window-empty-row-of-the-batch"
    ),
    pytest.param(Case(K=32, N=3, H=4, G=1, S=130, causal=True, documents=True), 3, id="block-larger-than-tile"),
    pytest.param(Case(K=10, N=3, H=10, G=2, S=96), 1, id="group-of-five-larger-than-tile"),
    # Documents of whole tiles of keys: some of them are seen by every block of a tile, though not from position 0 on.
    pytest.param(Case(K=4, N=48, H=2, G=1, S=480, documents=True, unused=5), 2, id="documents-of-whole-tiles"),
    # Every tile of blocks spans several documents, and some blocks start theirs: they see no context.
    pytest.param(
        Case(K=4, N=60, H=1, G=1, S=200, documents=True, pieces=20, window=7), 3, id="documents-within-a-tile"
    ),
    pytest.param(Case(K=4, N=60, H=1, G=1, S=200, documents=True, pieces=20, causal=True), 1, id="many-documents"),
    pytest.param(
        Case(K=16, N=8, H=2, G=1, S=160, window=100, documents=True, ordered=False), 2, id="any-order-of-anchors"
    ),
]


# (K, heads of a group) that fill the tiles which bf16 runs with by several blocks, by one, and by a part of one.
BLOCKS = {64: [(4, 1), (32, 4)], 128: [(16, 2), (16, 4), (32, 4)], 256: [(10, 8)]}


@pytest.mark.parametrize(("case", "splits"), CASES)
def test_output_and_gradients(case: Case, splits: int) -> None:
    check(case, TILES, splits)


@pytest.mark.parametrize("shared_memory", [LARGE_SHARED_MEMORY, 99 * 1024], ids=["large", "small"])
@pytest.mark.parametrize("E", [64, 128, 256])
def test_the_tiles_of_every_card(E: int, shared_memory: int) -> None:
    for K, R in BLOCKS[E]:
        case = Case(K=K, N=128 // (K * R) + 2, H=R, G=1, S=200, E=E, window=None if K == 16 else 150, causal=K == 4)
        check(case, tiles_for(E, 2, shared_memory, K * R), splits=2 if R == 4 else 1)


def check(case: Case, tiles: Tiles, splits: int) -> None:
    """Output and gradients are the definition's, whatever lies where nobody may look."""
    inputs, do = inputs_of(case, torch.float32)
    mask, window, causal = mask_of(case), case.window, case.causal
    exact = leaves(inputs, torch.float64)
    expected = attention_ref(*exact, mask, window=window, causal=causal)
    expected_gradients = torch.autograd.grad(expected, exact, do.double())

    # What nobody may see: whether it is NaN must not matter.
    used = torch.where(mask.block_keep_mask > 0, mask.anchor_positions, 0)
    for b in range(case.B):
        for context in inputs[1:3]:
            context[b, int(used[b].max()) :] = float("nan")
    o, lse = attention_forward(*inputs, mask, window=window, causal=causal, tiles=tiles)
    gradients = attention_backward(do, *inputs, o, lse, mask, window=window, causal=causal, tiles=tiles, splits=splits)

    assert relative_error(o, expected) < TOLERANCE
    for name, found, gradient in zip(NAMES, gradients, expected_gradients, strict=True):
        assert found.is_contiguous() and found.shape == gradient.shape
        assert relative_error(found, gradient) < TOLERANCE, name


def test_autograd_with_the_cards_own_tiles_and_a_gradient_that_is_not_contiguous() -> None:
    case = Case(K=8, N=8, H=4, G=2, S=128)
    inputs, do = inputs_of(case, torch.float32)
    do = do.transpose(1, 2).contiguous().transpose(1, 2)
    mask = mask_of(case)
    exact = leaves(inputs, torch.float64)
    for x in inputs:
        x.requires_grad_()
    o, expected = attention(*inputs, mask), attention_ref(*exact, mask)
    assert relative_error(o, expected) < TOLERANCE
    expected_gradients = torch.autograd.grad(expected, exact, do.double())
    for found, gradient in zip(torch.autograd.grad(o, inputs, do), expected_gradients, strict=True):
        assert relative_error(found, gradient) < TOLERANCE


def test_tiles_are_timed_only_where_they_compute_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(K=8, N=9, H=2, G=1, S=150)
    inputs, do = inputs_of(case, torch.float32)
    found = tile_check(inputs, do, mask_of(case))
    found.refuse(TILES, 2)

    def wrong(*args: Any, **options: Any) -> Any:
        o, lse = attention_forward(*args, **options)
        return o * (1 + 1e-4), lse

    monkeypatch.setattr("bench.tile_check.attention_forward", wrong)
    with pytest.raises(ValueError, match="^o is off by 1.0e-04, at most .*e-0[67] was allowed; no speed is shown"):
        found.refuse(TILES)
