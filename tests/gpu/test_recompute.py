"""model.recompute under both attentions and in fp8: a replay is the eager step, the bits are those of a step that keeps all,
and less is kept."""

from contextlib import closing
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.drafter_config import FULL
from engine.model import Recompute
from tests.drafter_helpers import assert_same_bits
from tests.gpu.engine_helpers import BUCKETS, Built, build, medium_config

MODES: tuple[Recompute, ...] = ("none", "mlp", "layer")
# One kind of layer and one bucket: flex compiles for each.
CONFIG = medium_config(layer_types=(FULL, FULL), sliding_window=None)
BUCKET = BUCKETS[-1]


def kept_bytes(built: Built) -> int:
    """What a forward pass leaves behind for the backward pass."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    hidden = built.engine.drafter(built.inputs(BUCKET))
    kept = torch.cuda.memory_allocated() - before
    assert hidden.requires_grad
    return kept


@pytest.mark.parametrize(
    "kind",
    [
        {"precision": "bf16", "attention": "triton"},
        {"precision": "bf16", "attention": "flex"},
        {"precision": "fp8", "attention": "triton"},
    ],
    ids=["triton", "flex", "fp8"],
)
def test_the_same_bits_from_less_memory(kind: dict[str, Any]) -> None:
    outcomes, kept = [], []
    for recompute in MODES:
        built = build(CONFIG, [BUCKET], recompute=recompute, **kind)
        with closing(built.engine):
            built.inputs.load(BUCKET, seed=0)
            outcomes.append(built.replay(BUCKET, BUCKET))
            assert_same_bits(built.eager(BUCKET, BUCKET), outcomes[-1])
            kept.append(kept_bytes(built))
    for outcome in outcomes[1:]:
        assert_same_bits(outcome, outcomes[0])
    assert kept[0] > kept[1] > kept[2]
