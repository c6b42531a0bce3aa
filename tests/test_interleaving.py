"""Steps over buckets in random order, as training takes them: with the inputs of all buckets in one memory and the order of their
batches chosen freely, every step is what it is where each bucket has fresh memory of its own."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.workloads import RandomInputs
from buffers.shapes import Bucket
from engine.engine import Engine
from engine.settings import ObjectiveSettings, OptimizerSettings
from tests.drafter_helpers import CPU, assert_same_bits, cloned, random_target, random_weights, small_config

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = small_config()
BUCKETS = [
    Bucket(B=1, S=32, N=4, K=4, tile=16),
    Bucket(B=2, S=32, N=8, K=4, tile=16),
    Bucket(B=1, S=64, N=16, K=4, tile=16),
    Bucket(B=2, S=96, N=16, K=4, tile=16),
]
STEPS = 50


class OneEach:
    """A RandomInputs for every bucket, so that none lies where another one does."""

    def __init__(self) -> None:
        self._inputs = {bucket: RandomInputs(CONFIG, [bucket], CPU, torch.float32) for bucket in BUCKETS}

    def __call__(self, bucket: Bucket) -> dict[str, Tensor]:
        return dict(self._inputs[bucket](bucket))

    def fill(self, bucket: Bucket, seed: int, length: int) -> None:
        for tensor in self(bucket).values():
            tensor.zero_()
        self._inputs[bucket].fill(bucket, seed=seed, length=length)


class Shared(RandomInputs):
    """All buckets' inputs in one memory: a batch lies in what the one before it left."""

    def __init__(self) -> None:
        super().__init__(CONFIG, BUCKETS, CPU, torch.float32)


def trained(inputs: OneEach | Shared) -> tuple[list[dict[str, Tensor]], list[Bucket]]:
    """Gradients before and weights after each of 50 steps of one to three micro-batches, and the buckets of these."""
    engine = Engine(
        CONFIG,
        random_target(CONFIG),
        BUCKETS,
        inputs,
        device=CPU,
        objective=ObjectiveSettings(),
        optimizer=OptimizerSettings(weight_decay=0.1),
    )
    engine.params.load_(random_weights(CONFIG))
    engine.build()
    random = np.random.default_rng(5)
    seen, order = [], list[Bucket]()
    for step in range(STEPS):
        for index in random.integers(0, len(BUCKETS), random.integers(1, 4)):
            bucket = BUCKETS[index]
            inputs.fill(
                bucket, seed=int(random.integers(0, 1000)), length=int(random.integers(bucket.S // 2, bucket.S))
            )
            engine.micro_step(bucket)
            order.append(bucket)
        gradients = cloned({f"grad {name}": gradient for name, gradient in engine.gradients().items()})
        engine.update(lr=1e-3 * (1 + step % 5))
        seen.append(gradients | cloned(engine.params.state()) | {"sums": engine.metrics.sums.clone()})
    engine.close()
    return seen, order


def changes_of_bucket(order: Sequence[Bucket]) -> int:
    return sum(a != b for a, b in zip(order, order[1:], strict=False))


def test_fifty_steps_over_buckets_that_share_their_memory_equal_those_with_memory_of_their_own() -> None:
    alone, order = trained(OneEach())
    assert set(order) == set(BUCKETS) and changes_of_bucket(order) > STEPS
    together, same = trained(Shared())
    assert same == order
    for found, expected in zip(together, alone, strict=True):
        assert_same_bits(found, expected)
    assert not torch.equal(alone[0]["fc.weight"], alone[-1]["fc.weight"])
