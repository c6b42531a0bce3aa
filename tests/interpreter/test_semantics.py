"""What a draft block may depend on, with the Triton kernels: bit for bit nothing but its past and itself."""

import pytest
import torch

from buffers.shapes import Bucket
from engine.drafter_config import FULL
from engine.kernels import fused_ops
from tests.drafter_helpers import (
    assert_nothing_stays,
    make_batch,
    make_step,
    objective,
    random_sample,
    random_target,
    small_config,
)
from tests.test_semantics import BUCKET, blocks, same_blocks


@pytest.mark.parametrize("p", [17])
def test_a_block_depends_on_its_past_and_its_anchor_alone(p: int) -> None:
    config = small_config()
    step = make_step(config, random_target(config), objective(), ops=fused_ops("triton"))
    loss_mask = (torch.arange(32) >= 8).to(torch.uint8)
    batch = make_batch(config, BUCKET, [random_sample(config, 32, 0, loss_mask)])
    anchors, kept = batch["anchor_positions"][0], batch["block_keep_mask"][0] > 0
    before = blocks(step, batch)
    for name, change, depends in (
        ("target_hidden", lambda old: old + 1.0, anchors > p),
        ("input_ids", lambda old: (old + 1) % 511, anchors == p),
    ):
        changed = {key: tensor.clone() for key, tensor in batch.items()}
        changed[name][0, p] = change(changed[name][0, p])
        assert torch.equal(same_blocks(before, blocks(step, changed)), ~(depends & kept)), name


def test_a_step_leaves_no_tensor_behind() -> None:
    config = small_config(layer_types=(FULL,), sliding_window=None)
    step = make_step(config, random_target(config), objective(), ops=fused_ops("triton"))
    bucket = Bucket(B=1, S=16, N=4, K=config.block_size, tile=16)
    assert_nothing_stays(step, make_batch(config, bucket, [random_sample(config, 16, 0)]))
