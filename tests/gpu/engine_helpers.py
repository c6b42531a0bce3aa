"""Engines small enough to build in seconds, and inputs for them that lie in memory of their own for every bucket."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffers.arena import Arena, packed_size
from buffers.dataset_writer import DatasetWriter
from buffers.filling import batch_specs
from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.engine import Engine
from engine.model import Recompute
from engine.precision import compute_dtype
from engine.settings import ObjectiveSettings, OptimizerSettings
from graphs.executor import BuildReport
from tests.drafter_helpers import make_batch, random_sample, random_target, random_weights, small_config
from tests.run_helpers import LENGTHS, TARGET_CONFIG

CUDA = torch.device("cuda", 0)
# The last is far larger than the others together: what the pool grows by afterwards tells whether they share it.
BUCKETS = (Bucket(1, 128, 16, 8), Bucket(1, 256, 64, 8), Bucket(3, 384, 32, 8), Bucket(2, 1024, 256, 8))


def medium_config(**changes: Any) -> DrafterConfig:
    """A full and a sliding layer with heads wide enough for every kernel; K = 8 and an odd vocabulary."""
    sizes = {
        "block_size": 8,
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "vocab_size": 4099,
        "mask_token_id": 4098,
        "sliding_window": 100,
    }
    return small_config(**(sizes | changes))


class StaticInputs:
    """A bucket's inputs keep their addresses and are nobody else's; load() puts other rows there."""

    def __init__(
        self, config: DrafterConfig, buckets: Sequence[Bucket], dtype: torch.dtype, device: torch.device = CUDA
    ) -> None:
        self._config = config
        self._views: dict[Bucket, dict[str, Tensor]] = {}
        for bucket in buckets:
            specs = batch_specs(
                bucket, num_taps=config.num_taps, hidden_size=config.hidden_size, dtype=dtype, with_last_hidden=True
            )
            self._views[bucket] = Arena(bucket.name, packed_size(specs), device, poison=True).views(specs)

    def __call__(self, bucket: Bucket) -> Mapping[str, Tensor]:
        return self._views[bucket]

    def load(self, bucket: Bucket, seed: int) -> None:
        """Rows of random lengths and loss masks; odd seeds leave the last row of several without content."""
        random = np.random.default_rng((seed, bucket.S))
        samples = []
        for b in range(max(1, bucket.B - seed % 2)):
            length = int(random.integers(bucket.S // 2, bucket.S + 1))
            loss_mask = torch.from_numpy((random.random(length) < 0.9).astype(np.uint8))
            samples.append(random_sample(self._config, length, 100 * seed + b, loss_mask))
        for name, tensor in make_batch(self._config, bucket, samples).items():
            self._views[bucket][name].copy_(tensor)


@dataclass(frozen=True)
class Built:
    """An engine, its inputs, and what capturing took."""

    engine: Engine
    inputs: StaticInputs
    reports: tuple[BuildReport, ...] = ()

    def replay(self, *buckets: Bucket) -> dict[str, Tensor]:
        """Gradient sums, metrics and weight of one step over these buckets' inputs, replayed."""
        return self._outcome(self.engine.executor.run, buckets)

    def eager(self, *buckets: Bucket) -> dict[str, Tensor]:
        """The same from the steps called in Python."""
        return self._outcome(self.engine.executor.call, buckets)

    def _outcome(self, run: Callable[[str], None], buckets: Sequence[Bucket]) -> dict[str, Tensor]:
        engine = self.engine
        assert engine.optimizer is not None
        engine.zero_()
        for _, gradient in engine.params.named(engine.params.grad):
            gradient.fill_(float("nan"))  # the first micro-batch overwrites it
        for i, bucket in enumerate(buckets):
            run(f"{'add' if i else 'train'} {bucket.name}")
        sums = {"sums": engine.metrics.sums, "slots": engine.metrics.slots, "denominator": engine.optimizer.denominator}
        return {name: tensor.clone() for name, tensor in (engine.gradients() | sums).items()}


def assemble(
    config: DrafterConfig,
    buckets: Sequence[Bucket],
    *,
    precision: str = "fp32",
    attention: str = "reference",
    objective: ObjectiveSettings | None = None,
    optimizer: OptimizerSettings | None = None,
    evaluate: bool = False,
    recompute: Recompute = "none",
    device: torch.device = CUDA,
) -> Built:
    """An engine with random weights, not captured yet; the chunks of its head are uneven. Close it."""
    inputs = StaticInputs(config, buckets, compute_dtype(precision), device)
    engine = Engine(
        config,
        random_target(config),
        buckets,
        inputs,
        device=device,
        objective=objective or ObjectiveSettings(),
        optimizer=optimizer or OptimizerSettings(),
        precision=precision,
        attention=attention,
        chunk_rows=300,
        recompute=recompute,
        eval_inputs=inputs if evaluate else None,
    )
    engine.params.load_(random_weights(config))
    return Built(engine, inputs)


def build(config: DrafterConfig, buckets: Sequence[Bucket], **settings: Any) -> Built:
    """The engine of assemble(), captured."""
    made = assemble(config, buckets, **settings)
    return replace(made, reports=tuple(made.engine.build()))


def state_of(built: Built) -> dict[str, Tensor]:
    engine = built.engine
    assert engine.optimizer is not None
    tensors = {"sums": engine.metrics.sums, "slots": engine.metrics.slots, "weight": engine.params.weight}
    tensors |= engine.params.state() | engine.optimizer.state()
    return {name: tensor.clone() for name, tensor in tensors.items()}


def reset(built: Built) -> None:
    engine = built.engine
    assert engine.optimizer is not None
    engine.params.load_(random_weights(engine.config))
    for tensor in engine.optimizer.state().values():
        tensor.zero_()
    engine.zero_()


def fifty_steps(built: Built, *, seed: int = 3, buckets: Sequence[Bucket] = BUCKETS) -> list[dict[str, Tensor]]:
    """Gradients before, loss and weights after each of 50 steps of one to three micro-batches of random buckets."""
    engine, random = built.engine, np.random.default_rng(seed)
    seen = []
    for step in range(50):
        for index in random.integers(0, len(buckets), random.integers(1, 4)):
            built.inputs.load(buckets[index], seed=int(random.integers(0, 3)))
            engine.micro_step(buckets[index])
        gradients = {f"grad {name}": gradient.clone() for name, gradient in engine.gradients().items()}
        engine.update(lr=1e-3 * (1 + step % 5))
        seen.append(gradients if step % 10 else gradients | state_of(built))
    return [*seen, state_of(built)]


def drafters_data(path: Path) -> Path:
    """A dataset for a drafter whose heads are wide enough for every kernel."""
    D, V, taps = 256, 1021, (1, 3, 4)
    sizes = {"hidden_size": D, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    with DatasetWriter(
        path,
        target_name="random",
        target_config=TARGET_CONFIG | sizes | {"head_dim": 64, "vocab_size": V},
        hidden_size=D,
        target_layer_ids=taps,
        vocab_size=V,
        mask_token_id=V - 1,
        last_hidden_norm="pre",
    ) as out:
        out.write_target(draw(V, D) * 0.02, draw(V, D) * 0.02, torch.ones(D))
        for length in LENGTHS:
            ids = torch.arange(length, dtype=torch.int32) % 7 + 1
            hidden, last = draw(length, len(taps) * D).bfloat16(), draw(length, D).bfloat16()
            out.add(ids, torch.ones(length, dtype=torch.uint8), hidden, last)
    return path


def side_by_side(works: Sequence[Callable[[], None]]) -> list[BaseException]:
    raised: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised
