"""What a draft block may depend on, and what must not matter: the future, other blocks, padding, order, neighbours."""

import dataclasses

import pytest
import torch
from torch import Tensor

from buffers.shapes import Bucket
from engine.drafter_config import FULL, SLIDING
from tests.drafter_helpers import (
    Step,
    assert_close,
    assert_nothing_stays,
    assert_same_bits,
    cloned,
    make_batch,
    make_step,
    objective,
    random_sample,
    random_target,
    set_anchors,
    small_config,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# The window is as long as the row where every block must see every earlier position.
LAYERS = [(FULL, FULL), (FULL, SLIDING), (SLIDING, SLIDING)]
BUCKET = Bucket(B=1, S=32, N=24, K=4, tile=16)


def step_for(layer_types: tuple[str, ...] = (FULL, SLIDING), window: int = 12, kl: float = 0.0) -> Step:
    config = small_config(layer_types=layer_types, sliding_window=window if SLIDING in layer_types else None)
    return make_step(config, random_target(config), objective(kl=kl))


def blocks(step: Step, batch: dict[str, Tensor]) -> Tensor:
    """Final hidden states [N, (K - 1) * D] of the only row: slots 1..K-1 of every block."""
    with torch.no_grad():
        return step.parts.drafter(cloned(batch))[0].flatten(1)


def same_blocks(a: Tensor, b: Tensor) -> Tensor:
    """bool [N]: every bit of the block."""
    return (a == b).all(-1)


@pytest.fixture
def overlapping() -> dict[str, Tensor]:
    """Anchors at every position from 8 to 30, so that blocks overlap, and one unused block."""
    config = small_config()
    loss_mask = (torch.arange(32) >= 8).to(torch.uint8)
    batch = make_batch(config, BUCKET, [random_sample(config, 32, 0, loss_mask)])
    assert batch["anchor_positions"][0].tolist() == [*range(8, 31), 0]
    assert batch["block_keep_mask"][0].tolist() == [1] * 23 + [0]
    return batch


@pytest.mark.parametrize("layer_types", LAYERS)
@pytest.mark.parametrize("p", [0, 8, 9, 17, 29, 30, 31])
def test_a_block_sees_hidden_states_before_its_anchor_only(
    overlapping: dict[str, Tensor], layer_types: tuple[str, ...], p: int
) -> None:
    step = step_for(layer_types, window=64)
    before = blocks(step, overlapping)
    overlapping["target_hidden"][0, p] += 1.0
    same = same_blocks(before, blocks(step, overlapping))
    anchors = overlapping["anchor_positions"][0]
    sees = (anchors > p) & (overlapping["block_keep_mask"][0] > 0)
    assert torch.equal(same, ~sees)


@pytest.mark.parametrize("layer_types", LAYERS)
@pytest.mark.parametrize("p", [0, 8, 17, 30, 31])
def test_a_block_sees_the_token_at_its_anchor_only(
    overlapping: dict[str, Tensor], layer_types: tuple[str, ...], p: int
) -> None:
    step = step_for(layer_types, window=64)
    before = blocks(step, overlapping)
    overlapping["input_ids"][0, p] = (overlapping["input_ids"][0, p] + 1) % 511
    same = same_blocks(before, blocks(step, overlapping))
    is_anchor = (overlapping["anchor_positions"][0] == p) & (overlapping["block_keep_mask"][0] > 0)
    assert torch.equal(same, ~is_anchor)


def test_a_sliding_layer_forgets_what_lies_before_its_window(overlapping: dict[str, Tensor]) -> None:
    # Two layers, but context keys come from the target alone: the reach does not grow with depth.
    step = step_for((SLIDING, SLIDING), window=6)
    before = blocks(step, overlapping)
    overlapping["target_hidden"][0, 15] += 1.0
    same = same_blocks(before, blocks(step, overlapping))
    # Slot 0 of an anchor a sees context from a - 5 on; later slots see less of it, but see slot 0 through their own block.
    assert same.tolist() == [not 16 <= anchor <= 20 for anchor in range(8, 31)] + [True]


def test_blocks_do_not_see_each_other(overlapping: dict[str, Tensor]) -> None:
    step = step_for()
    before = blocks(step, overlapping)
    moved = cloned(overlapping)
    moved["anchor_positions"][0, 5] = 2
    same = same_blocks(before, blocks(step, moved))
    assert same.tolist() == [n != 5 for n in range(24)]


def short_rows(step: Step) -> dict[str, Tensor]:
    """Three rows of 32: two shorter samples, the second with fewer anchors than slots, and a row of weight zero."""
    sparse = torch.zeros(13, dtype=torch.uint8)
    sparse[[3, 4, 5, 9, 12]] = 1
    samples = [random_sample(step.config, 21, 0), random_sample(step.config, 13, 1, sparse)]
    bucket = dataclasses.replace(BUCKET, B=3)
    batch = make_batch(step.config, bucket, samples)
    assert batch["block_keep_mask"].sum(-1).tolist() == [20, 2, 0]
    return batch


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("layer_types", LAYERS)
def test_what_lies_in_padding_never_matters(layer_types: tuple[str, ...], kl: float) -> None:
    step = step_for(layer_types, kl=kl)
    batch = short_rows(step)
    expected = step.outcome(batch)
    assert expected["loss"].isfinite() and expected["denominator"] > 0
    padding = torch.arange(32) >= batch["row_lengths"][:, None]
    for value in (float("nan"), float("inf"), 1e30):
        for name in ("target_hidden", "last_hidden"):
            batch[name][padding] = value
        batch["input_ids"][padding] = torch.randint(-(2**31), 2**31 - 1, (int(padding.sum()),), dtype=torch.int32)
        batch["position_ids"][padding] = torch.randint(0, 2**31 - 1, (int(padding.sum()),), dtype=torch.int32)
        batch["loss_mask"][padding] = 1
        assert_same_bits(step.outcome(batch), expected)


@pytest.mark.parametrize("layer_types", LAYERS)
def test_what_unused_blocks_hold_never_matters(layer_types: tuple[str, ...]) -> None:
    step = step_for(layer_types)
    batch = short_rows(step)
    expected = step.outcome(batch)
    unused = batch["block_keep_mask"] == 0
    for name in ("anchor_positions", "context_start", "context_end"):
        batch[name][unused] = torch.randint(0, 32, (int(unused.sum()),), dtype=torch.int32)
    assert_same_bits(step.outcome(batch), expected)


@pytest.mark.parametrize("layer_types", LAYERS)
def test_the_number_of_unused_blocks_and_the_length_of_the_bucket_do_not_matter(layer_types: tuple[str, ...]) -> None:
    step = step_for(layer_types, kl=0.3)
    samples = [random_sample(step.config, 20, 0), random_sample(step.config, 17, 1)]
    tight = make_batch(step.config, Bucket(B=2, S=32, N=20, K=4, tile=16), samples)
    wide = make_batch(step.config, Bucket(B=3, S=96, N=32, K=4, tile=16), samples)
    found, expected = step.outcome(wide), step.outcome(tight)
    for outcome in (found, expected):
        outcome["metrics"] = outcome["metrics"][:-3]  # slot_tokens and the counts of batches
    assert_close(found, expected, 1e-5)


def test_the_order_of_anchors_does_not_matter() -> None:
    step = step_for()
    batch = short_rows(step)
    expected = step.outcome(batch)
    order = torch.randperm(24)
    for name in ("anchor_positions", "block_keep_mask", "context_start", "context_end"):
        batch[name].copy_(batch[name][:, order])
    assert_close(step.outcome(batch), expected, 1e-5)


@pytest.mark.parametrize("weighting", ["decay", "uniform"])
@pytest.mark.parametrize("layer_types", LAYERS)
def test_packed_documents_are_as_far_apart_as_rows(layer_types: tuple[str, ...], weighting: str) -> None:
    config = small_config(layer_types=layer_types, sliding_window=12 if SLIDING in layer_types else None)
    step = make_step(config, random_target(config), objective(weighting, kl=0.2))
    first, second = random_sample(config, 14, 0), random_sample(config, 16, 1)
    apart = make_batch(config, Bucket(B=2, S=32, N=16, K=4, tile=16), [first, second])
    # Anchors up to the last token of each document; those near its end have labels only up to the end.
    anchors = ([0, 3, 9, 11, 12, 13], [0, 1, 7, 13, 14, 15])
    set_anchors(apart, anchors)
    expected = step.outcome(apart)
    assert expected["slots"][1].tolist() == [10, 8, 6]

    packed = make_batch(config, Bucket(B=1, S=32, N=16, K=4, tile=16), [random_sample(config, 30, 2)])
    for name in ("target_hidden", "last_hidden", "input_ids", "position_ids", "loss_mask"):
        packed[name][0, :14], packed[name][0, 14:30] = apart[name][0, :14], apart[name][1, :16]
    set_anchors(packed, [[*anchors[0], *(a + 14 for a in anchors[1])]])
    packed["context_start"][0, 6:12] = 14
    packed["context_end"][0, :6] = 14
    found = step.outcome(packed)
    for outcome in (found, expected):
        outcome["metrics"] = torch.cat([outcome["metrics"][:7], outcome["metrics"][8:]])  # without slot_tokens
    assert_close(found, expected, 1e-5)


def test_a_step_leaves_no_tensor_behind() -> None:
    config = small_config()
    step = make_step(config, random_target(config), objective())
    assert_nothing_stays(step, make_batch(config, BUCKET, [random_sample(config, 32, 0)]))
