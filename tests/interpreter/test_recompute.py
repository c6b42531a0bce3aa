"""model.recompute with the Triton kernels: the same bits, and each mode keeps less than the one before."""

import pytest

from buffers.shapes import Bucket
from engine.kernels import fused_ops
from tests.drafter_helpers import assert_same_bits
from tests.recompute_helpers import drafted

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_same_bits_from_less_memory() -> None:
    bucket, ops = Bucket(B=1, S=16, N=4, K=4, tile=16), fused_ops("triton")
    (expected, none), (mlp_found, mlp), (layer_found, layer) = (
        drafted(recompute, [bucket], ops) for recompute in ("none", "mlp", "layer")
    )
    assert_same_bits(mlp_found, expected)
    assert_same_bits(layer_found, expected)
    assert none[0] > mlp[0] > layer[0]
