"""The beginning's own check: one engine, the drafter of a 27B target (W3), buckets of 512, 2048, 4096 and 8192 tokens;
forward on lengths 512, 2000 and 8000, forward and backward on 4000. Nothing is compiled after the warm-up, and the forward
pass takes the same memory at every length once the buffers that grow with S are taken off.

How the memory is measured: the evaluation step is called from Python (a replay allocates nothing), once so that what is made
only once exists, then again between a reset of torch's peak and its reading; what was allocated before is subtracted. That
leaves out the static inputs, which lie in an arena of their own. The peak stands in the MLP of a middle layer. Alive there
and growing with S are the context, [S, D], the layer's context keys and values, [S, G, E] each, all in bf16, and the
context's int32 positions: they are subtracted by arithmetic. The tile lists of flex (200 KB) are left in.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from bench.workloads import WORKLOADS, RandomInputs
from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.engine import Engine
from engine.settings import ObjectiveSettings
from graphs.guards import Counters, host_sync_is_an_error
from tests.gpu.engine_helpers import CUDA

W3 = WORKLOADS["W3"]
BUCKETS = [Bucket(B=1, S=S, N=512, K=W3.K) for S in (512, 2048, 4096, 8192)]


@dataclass(frozen=True)
class Beginning:
    """The engine and its inputs, one arena that the buckets share as in training."""

    engine: Engine
    inputs: RandomInputs

    def load(self, length: int) -> Bucket:
        """A random row of this length in the smallest bucket that holds it."""
        bucket = next(bucket for bucket in BUCKETS if length <= bucket.S)
        self.inputs.fill(bucket, length=length)
        return bucket


@pytest.fixture(scope="module", params=["flex", "triton"])
def beginning(request: pytest.FixtureRequest) -> Iterator[Beginning]:
    config = W3.config()
    inputs = RandomInputs(config, BUCKETS, CUDA, torch.bfloat16)
    engine = Engine(
        config,
        W3.target(CUDA, torch.bfloat16),
        BUCKETS,
        inputs,
        device=CUDA,
        objective=ObjectiveSettings(),
        optimizer=None,
        precision="bf16",
        attention=request.param,
        eval_inputs=inputs,
    )
    engine.params.draw_(seed=0)
    engine.build()
    yield Beginning(engine, inputs)
    engine.close()


def grows_with_length(config: DrafterConfig, bucket: Bucket) -> int:
    """Bytes at the forward pass's peak that are proportional to S."""
    context = 2 * config.hidden_size
    keys_and_values = 2 * 2 * config.num_key_value_heads * config.head_dim
    positions = 4
    return bucket.B * bucket.S * (context + keys_and_values + positions)


def peak_bytes(engine: Engine, step: str) -> int:
    """What calling the step allocates at its peak, on top of what was allocated before it."""
    engine.executor.call(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.executor.call(step)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_forward_takes_the_same_memory_at_every_length(beginning: Beginning) -> None:
    engine, rest = beginning.engine, {}
    for length in (512, 2000, 8000):
        bucket = beginning.load(length)
        peak = peak_bytes(engine, f"eval {bucket.name}")
        rest[length] = peak - grows_with_length(engine.config, bucket)
        print(
            f"{engine.ops.name}, {length} tokens: peak {peak / 2**20:.1f} MiB, without context {rest[length] / 2**20:.1f}"
        )
    assert max(rest.values()) <= 1.05 * min(rest.values()), rest
    # Dense attention alone would hold every head's scores of all queries with all context keys, in bf16 at best.
    assert max(rest.values()) < 2 * W3.num_attention_heads * BUCKETS[-1].Q * BUCKETS[-1].S


def test_every_length_runs_and_nothing_is_compiled(beginning: Beginning) -> None:
    engine = beginning.engine
    before = Counters.read(CUDA)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (512, 2000, 8000):
            bucket = beginning.load(length)
            seen = []
            for run in (engine.executor.run, engine.executor.call):
                engine.zero_()
                run(f"eval {bucket.name}")
                seen.append(engine.eval_metrics.snapshot().read())
            assert seen[0] == seen[1], f"the replay of {bucket.name} differs from the eager step"
            assert seen[0].sums["useful_tokens"] == length
            assert seen[0].sums["blocks"] == min(bucket.N, length - 1)
            # Random weights know nothing: the loss is about that of guessing.
            loss = seen[0].means()["loss"]
            assert isinstance(loss, float) and 0.9 < loss / math.log(W3.vocab_size) < 1.3

        bucket = beginning.load(4000)
        assert bucket.S == 4096
        assert engine.verify(bucket) is None
        engine.zero_()
        allocated = Counters.read(CUDA)
        with host_sync_is_an_error():
            engine.micro_step(bucket)
        assert Counters.read(CUDA) - allocated == Counters(0, 0)
    assert (Counters.read(CUDA) - before).compilations == 0
    for name, gradient in engine.gradients().items():
        assert gradient.isfinite().all() and gradient.any(), name
    assert engine.metrics.snapshot().read().sums["bad_micro_batches"] == 0
