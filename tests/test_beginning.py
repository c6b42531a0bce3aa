"""The beginning's own check, scaled down for the CPU: one engine, several buckets, lengths that fill them or do not.
tests/gpu/test_beginning.py has it in full, memory included."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.workloads import RandomInputs
from buffers.shapes import Bucket
from engine.engine import Engine
from engine.settings import ObjectiveSettings
from graphs.guards import Counters
from tests.drafter_helpers import CPU, assert_close, random_target, random_weights, small_config

pytestmark = pytest.mark.usefixtures("one_thread")

BUCKETS = [Bucket(B=1, S=S, N=32, K=4) for S in (128, 256, 512, 1024)]


class Shapes(TorchDispatchMode):
    """Every operation that runs inside, with the shapes of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else [result]
        self.seen.append((str(func), [t.shape for t in results if isinstance(t, Tensor)]))
        return result


def engine_over(buckets: list[Bucket]) -> tuple[Engine, RandomInputs]:
    config = small_config()
    inputs = RandomInputs(config, buckets, CPU, torch.float32)
    engine = Engine(
        config,
        random_target(config),
        buckets,
        inputs,
        device=CPU,
        objective=ObjectiveSettings(),
        optimizer=None,
        eval_inputs=inputs,
    )
    engine.params.load_(random_weights(config))
    assert {report.how for report in engine.build()} == {"called"}
    return engine, inputs


def bucket_for(length: int) -> Bucket:
    return next(bucket for bucket in BUCKETS if length <= bucket.S)


def test_every_length_runs_in_the_bucket_that_holds_it_and_nothing_is_compiled() -> None:
    engine, inputs = engine_over(BUCKETS)
    before = Counters.read(CPU)
    for length in (128, 500, 1000):
        bucket = bucket_for(length)
        engine.zero_()
        inputs.fill(bucket, length=length)
        engine.eval_step(bucket)
        seen = engine.eval_metrics.snapshot().read()
        assert (seen.sums["useful_tokens"], seen.sums["blocks"]) == (length, 32)
        assert 0.5 < seen.means()["loss"] / math.log(engine.config.vocab_size) < 2
    inputs.fill(BUCKETS[1], length=200)
    engine.micro_step(BUCKETS[1])
    assert all(gradient.isfinite().all() and gradient.any() for gradient in engine.gradients().values())
    assert Counters.read(CPU) - before == Counters(0, 0)


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_shapes_depend_on_the_bucket_and_never_on_the_length(kind: str) -> None:
    engine, inputs = engine_over(BUCKETS)
    bucket, seen = bucket_for(512), []
    # The last has fewer eligible positions than the bucket has blocks.
    for length in (512, 500, 300, 7):
        inputs.fill(bucket, length=length)
        with Shapes() as shapes:
            engine.executor.run(f"{kind} {bucket.name}")
        seen.append(shapes.seen)
    assert len(seen[0]) > 100
    assert all(other == seen[0] for other in seen[1:])


def outcome(engine: Engine, bucket: Bucket) -> dict[str, Tensor]:
    """Gradient sums, loss sum, weight and hits of one step."""
    engine.zero_()
    engine.micro_step(bucket)
    sums = {"loss and weight": engine.metrics.sums[:2], "slots": engine.metrics.slots}
    return {name: tensor.clone() for name, tensor in (engine.gradients() | sums).items()}


def test_a_row_of_500_tokens_in_a_bucket_of_512_is_what_it_is_alone() -> None:
    engine, inputs = engine_over(BUCKETS)
    bucket = bucket_for(500)
    assert bucket.S == 512
    inputs.fill(bucket, length=500)
    row = {name: tensor.clone() for name, tensor in inputs(bucket).items()}
    found = outcome(engine, bucket)

    alone = Bucket(B=1, S=500, N=32, K=4, tile=4)
    other, other_inputs = engine_over([alone])
    for name, tensor in other_inputs(alone).items():
        tensor.copy_(row[name] if tensor.shape == row[name].shape else row[name][:, :500])
    assert_close(found, outcome(other, alone), 1e-5)

    # And in the next larger bucket, whose padding is longer than the row.
    larger = BUCKETS[-1]
    for tensor in inputs(larger).values():
        tensor.zero_()
    for name, tensor in inputs(larger).items():
        if tensor.shape == row[name].shape:
            tensor.copy_(row[name])
        else:
            tensor[:, :512].copy_(row[name])
    assert_close(outcome(engine, larger), found, 1e-5)
