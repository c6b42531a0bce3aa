"""model.recompute on the reference operations: the same bits, less kept. Triton's: tests/interpreter, tests/gpu."""

import pytest

from buffers.shapes import Bucket
from engine.model import Recompute
from tests.drafter_helpers import assert_same_bits
from tests.recompute_helpers import drafted

pytestmark = pytest.mark.usefixtures("one_thread")

# The second adds to the sums that the first begins.
BUCKETS = (Bucket(B=1, S=32, N=8, K=4, tile=16), Bucket(B=2, S=48, N=4, K=4, tile=16))


@pytest.mark.parametrize(("recompute", "share"), [("mlp", 1.0), ("layer", 0.5)])
def test_what_is_formed_again_gives_the_same_bits(recompute: Recompute, share: float) -> None:
    expected, all_kept = drafted("none", BUCKETS)
    assert all(tensor.any() for tensor in expected.values())
    found, kept = drafted(recompute, BUCKETS)
    assert_same_bits(found, expected)
    assert all(some <= share * whole for some, whole in zip(kept, all_kept, strict=True))
