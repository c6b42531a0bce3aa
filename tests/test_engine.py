"""The engine as a whole on the CPU: what building leaves alone, what steps add up, and that a drafter learns."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.workloads import RandomInputs
from buffers.batching import BatchPlan
from buffers.dataset import Dataset, DatasetWriter
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.drafter_config import FULL, DrafterConfig
from engine.engine import Engine
from engine.kernels import select_ops
from engine.metrics import Metrics
from engine.ops.weight import GradientSums
from engine.optimizer import Schedule
from engine.params import initial_parameters
from engine.settings import ObjectiveSettings, OptimizerSettings
from graphs.guards import Counters
from tests.drafter_helpers import (
    CPU,
    assert_same_bits,
    cloned,
    make_batch,
    random_sample,
    random_target,
    random_weights,
    small_config,
)

pytestmark = pytest.mark.usefixtures("one_thread")

BUCKETS = [Bucket(B=2, S=32, N=4, K=4, tile=16), Bucket(B=1, S=64, N=16, K=4, tile=16)]


def build_engine(inputs: Any, buckets: list[Bucket], config: DrafterConfig | None = None, **changes: Any) -> Engine:
    config = config or small_config()
    settings: dict[str, Any] = {"objective": ObjectiveSettings(), "optimizer": OptimizerSettings(), "device": CPU}
    engine = Engine(config, random_target(config), buckets, inputs, **{**settings, **changes})
    engine.params.load_(random_weights(config))
    return engine


@pytest.fixture
def inputs() -> RandomInputs:
    return RandomInputs(small_config(), BUCKETS, CPU, torch.float32)


def state_of(engine: Engine) -> dict[str, Tensor]:
    assert engine.optimizer is not None
    tensors = {"grad": engine.params.grad, "sums": engine.metrics.sums, "slots": engine.metrics.slots}
    tensors |= engine.optimizer.state() | {"denominator": engine.optimizer.denominator, "weight": engine.params.weight}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_building_leaves_everything_as_it_was(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS, eval_inputs=inputs)
    before = state_of(engine)
    for bucket in BUCKETS:
        inputs.fill(bucket)
    reports = engine.build()
    names = ["train 2x32x4", "add 2x32x4", "train 1x64x16", "add 1x64x16", "eval 2x32x4", "eval 1x64x16", "update"]
    assert sorted(report.name for report in reports) == sorted(names)
    assert {report.how for report in reports} == {"called"}
    assert_same_bits(state_of(engine), before)


def test_the_largest_bucket_is_built_first(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS)
    largest = max(BUCKETS, key=lambda bucket: bucket.tokens)
    assert engine.build()[0].name == f"train {largest.name}"


def test_a_step_of_two_buckets_equals_a_fresh_one(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS)
    engine.build()
    outcomes = []
    for _ in range(2):
        engine.params.load_(random_weights(engine.config))
        assert engine.optimizer is not None
        for tensor in engine.optimizer.state().values():
            tensor.zero_()
        engine.zero_()
        for seed, bucket in enumerate(BUCKETS):
            inputs.fill(bucket, seed=seed)
            engine.micro_step(bucket)
        assert int(engine.metrics.snapshot().read().means()["micro_batches"]) == 2  # type: ignore[arg-type]
        assert engine.optimizer.denominator > 0
        engine.update(lr=1e-3)
        assert int(engine.optimizer.step) == 1
        outcomes.append(state_of(engine))
    assert_same_bits(outcomes[0], outcomes[1])


def test_gradients_bear_the_names_of_a_checkpoint() -> None:
    config = small_config(layer_types=(FULL,) * 5, sliding_window=None)
    inputs = RandomInputs(config, BUCKETS, CPU, torch.float32)
    engine = build_engine(inputs, BUCKETS, config)
    engine.build()
    inputs.fill(BUCKETS[0])
    engine.micro_step(BUCKETS[0])
    gradients = engine.gradients()
    assert len(gradients) == 58
    of_layer = [
        f"{name}.weight"
        for name in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
            "input_layernorm", "post_attention_layernorm",
        )
    ]  # fmt: skip
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}" for i in range(5) for name in of_layer}
    assert gradients.keys() == expected
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())
    assert engine.params.state()["fc.weight"].shape == (64, 128)


@pytest.mark.parametrize("optimizer", [OptimizerSettings(), None])
def test_replay_and_eager_twin_agree(inputs: RandomInputs, optimizer: OptimizerSettings | None) -> None:
    engine = build_engine(inputs, BUCKETS, optimizer=optimizer)
    engine.build()
    for bucket in BUCKETS:
        inputs.fill(bucket)
        assert engine.verify(bucket) is None
    assert (engine.params.grad == 0).all()
    assert engine.metrics.snapshot().read().sums["micro_batches"] == 0


def test_steps_of_one_micro_batch_need_no_graph_that_adds(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS, adds=False)
    assert [report.name for report in engine.build()] == ["train 1x64x16", "train 2x32x4", "update"]
    for bucket in BUCKETS:
        inputs.fill(bucket)
        assert engine.verify(bucket) is None
        engine.micro_step(bucket)
        engine.update(lr=1e-3)
    engine.micro_step(BUCKETS[0])
    with pytest.raises(AssertionError, match="a second micro-batch of a step: the engine was built with adds = False"):
        engine.micro_step(BUCKETS[0])
    engine.zero_()
    assert [report.name for report in engine.regenerate(adds=True)][:2] == ["train 1x64x16", "add 1x64x16"]
    engine.micro_step(BUCKETS[0])
    engine.micro_step(BUCKETS[0])


def test_a_step_that_there_is_not_is_named(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS[:1], adds=False)
    engine.build()
    message = r"expected one of the generation's steps \(train 2x32x4, update\), found {}; take the bucket of a batch"
    for take, name in ((engine.micro_step, "train 1x64x16"), (engine.eval_step, "eval 1x64x16")):
        with pytest.raises(ValueError, match=message.format(name)):
            take(BUCKETS[1])
    inputs.fill(BUCKETS[0])
    engine.micro_step(BUCKETS[0])  # it was no step
    engine.close()
    with pytest.raises(ValueError, match="none: it is closed.*, found update"):
        engine.update(lr=1e-3)


def test_an_engine_without_optimizer_keeps_no_masters(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS, optimizer=None)
    assert engine.params.master is None
    names = ["train 1x64x16", "add 1x64x16", "train 2x32x4", "add 2x32x4"]
    assert [report.name for report in engine.build()] == names


def test_evaluation_counts_apart_from_training(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS, eval_inputs=inputs)
    engine.build()
    inputs.fill(BUCKETS[0])
    kept = cloned(inputs(BUCKETS[0]))
    engine.micro_step(BUCKETS[0])
    before = state_of(engine)
    for name, tensor in inputs(BUCKETS[0]).items():
        tensor.copy_(kept[name])
    engine.eval_step(BUCKETS[0])
    assert_same_bits(state_of(engine), before)
    assert engine.eval_metrics.snapshot().read() == engine.metrics.snapshot().read()


def test_every_number_of_eligible_positions_runs_in_one_shape() -> None:
    config = small_config()
    bucket = Bucket(B=1, S=32, N=16, K=4, tile=16)
    inputs = RandomInputs(config, [bucket], CPU, torch.float32)
    engine = build_engine(inputs, [bucket], config)
    engine.build()
    static = inputs(bucket)
    places = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in static.items()}
    before = Counters.read(CPU)
    for count in range(bucket.N + 1):
        loss_mask = torch.zeros(32, dtype=torch.uint8)
        loss_mask[8 : 9 + count] = 1  # count + 1 supervised tokens in a row: count eligible positions
        batch = make_batch(config, bucket, [random_sample(config, 32, count, loss_mask)])
        for name, tensor in static.items():
            tensor.copy_(batch[name])
        assert static["block_keep_mask"].sum() == count
        engine.zero_()
        engine.micro_step(bucket)
        seen = engine.metrics.snapshot().read()
        assert sum(seen.supervised) == sum(min(3, count - i) for i in range(count))
        assert seen.sums["blocks"] == count
        engine.update(lr=1e-3)
    assert engine.optimizer is not None
    assert (int(engine.optimizer.step), int(engine.optimizer.skipped)) == (bucket.N, 1)
    assert Counters.read(CPU) - before == Counters(0, 0)
    assert {name: (tensor.data_ptr(), tensor.shape) for name, tensor in inputs(bucket).items()} == places


def test_a_bad_micro_batch_is_counted_and_does_not_hide_the_good_ones(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS)
    engine.build()
    assert engine.optimizer is not None
    readings = [engine.metrics.snapshot().read()]
    for bad in (False, True, False):
        inputs.fill(BUCKETS[0])
        if bad:
            inputs(BUCKETS[0])["target_hidden"][0, 0, 0] = float("nan")
        engine.micro_step(BUCKETS[0])
        engine.update(lr=0.0)
        readings.append(engine.metrics.snapshot().read())
    good, bad_one, good_again = (b - a for a, b in zip(readings, readings[1:], strict=False))
    assert good.sums["bad_micro_batches"] == 0
    assert good.sums["loss"] > 0
    assert good_again == good
    assert bad_one.sums["bad_micro_batches"] == bad_one.sums["micro_batches"] == 1
    assert bad_one.sums["loss"] == bad_one.sums["weight"] == sum(bad_one.supervised) == 0
    assert (int(engine.optimizer.step), int(engine.optimizer.skipped)) == (2, 1)
    assert engine.params.weight.isfinite().all()


def test_means_are_ratios_of_sums(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS)
    engine.build()
    inputs.fill(BUCKETS[0], length=20)
    engine.micro_step(BUCKETS[0])
    sums = engine.metrics.snapshot().read()
    means = sums.means()
    assert means["loss"] == means["ce"] == sums.sums["loss"] / sums.sums["weight"]
    assert means["accuracy"] == sum(sums.correct) / sum(sums.supervised)
    assert means["useful_tokens"] == 40
    assert means["padding"] == 1 - 40 / 64
    assert means["tokens_per_verification"] == sums.sums["accepted"] / 8 + 1
    assert math.isnan(Metrics(4, CPU).snapshot().read().means()["loss"])  # no loss is not a loss of 0


def test_a_snapshot_holds_what_was_when_it_was_taken(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS)
    engine.build()
    inputs.fill(BUCKETS[0])
    engine.micro_step(BUCKETS[0])
    snapshot = engine.metrics.snapshot(torch.tensor(7.0))
    engine.micro_step(BUCKETS[0])
    assert snapshot.ready()
    assert snapshot.read().sums["micro_batches"] == 1
    assert snapshot.beside() == [7.0]


def test_attention_that_the_device_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match='expected attention "auto" or one of .*found "flash"'):
        select_ops(CPU, "flash")
    with pytest.raises(ValueError, match='attention = "flex" needs a CUDA device, found cpu'):
        select_ops(CPU, "flex")
    assert select_ops(CPU).name == select_ops(CPU, "reference").name == "reference"


@pytest.mark.parametrize("grad_dtype", ["bf16", "fp32"])
def test_bf16_keeps_masters_in_fp32(grad_dtype: Any) -> None:
    inputs = RandomInputs(small_config(), BUCKETS, CPU, torch.bfloat16)
    engine = build_engine(inputs, BUCKETS, precision="bf16", optimizer=OptimizerSettings(grad_dtype=grad_dtype))
    engine.build()
    for bucket in BUCKETS:
        inputs.fill(bucket)
        engine.micro_step(bucket)
    before = engine.params.state()["fc.weight"].clone()
    engine.update(lr=1e-3)
    assert engine.params.weight.dtype == torch.bfloat16
    assert engine.params.grad.dtype == (torch.bfloat16 if grad_dtype == "bf16" else torch.float32)
    assert engine.params.master is not None
    assert engine.params.master.dtype == torch.float32
    assert not torch.equal(engine.params.state()["fc.weight"], before)
    assert torch.equal(engine.params.weight, engine.params.master.bfloat16())


def sixteen_samples(path: Path, config: DrafterConfig) -> Dataset:
    """Random tokens beside random hidden states: there is nothing to learn but the samples themselves."""
    writer = DatasetWriter(
        path,
        target_name="none",
        target_config={},
        hidden_size=config.hidden_size,
        target_layer_ids=config.target_layer_ids,
        vocab_size=config.vocab_size,
        mask_token_id=config.mask_token_id,
    )
    generator = torch.Generator().manual_seed(0)
    with writer as out:
        for length in np.random.default_rng(0).integers(16, 49, 16).tolist():
            out.add(
                input_ids=torch.randint(config.mask_token_id, (length,), generator=generator, dtype=torch.int32),
                loss_mask=torch.ones(length, dtype=torch.uint8),
                hidden_states=torch.randn(length, config.num_taps * config.hidden_size, generator=generator).bfloat16(),
            )
    return Dataset(path)


def test_two_layers_learn_sixteen_samples_by_heart(tmp_path: Path) -> None:
    config = small_config(vocab_size=64, mask_token_id=63)
    dataset = sixteen_samples(tmp_path, config)
    buckets = [Bucket(B=4, S=32, N=32, K=4, tile=16), Bucket(B=4, S=48, N=48, K=4, tile=16)]
    plan = BatchPlan(dataset.lengths, buckets, seed=0)
    with InputPipeline(dataset, buckets, seed=0, device=CPU, dtype=torch.float32, poison=True) as pipeline:
        engine = build_engine(pipeline.inputs, buckets, config, objective=ObjectiveSettings(weighting="uniform"))
        engine.params.load_(initial_parameters(config, seed=0))
        engine.build()
        epochs = 60
        schedule = Schedule("cosine", lr=3e-3, total_steps=epochs * len(plan.epoch(0)), warmup_steps=10)
        step = 0
        for epoch in range(epochs):
            engine.metrics.zero_()
            pipeline.start(plan.epoch(epoch))
            while batch := pipeline.next():
                engine.micro_step(batch.bucket)
                engine.update(schedule(step))
                step += 1
        means = engine.metrics.snapshot().read().means()
    assert engine.optimizer is not None
    assert (int(engine.optimizer.step), int(engine.optimizer.skipped)) == (step, 0)
    assert isinstance(means["accuracy"], float)
    assert means["accuracy"] > 0.95


def test_the_first_micro_batch_of_a_step_overwrites_the_last_steps_gradients(inputs: RandomInputs) -> None:
    engine = build_engine(inputs, BUCKETS)
    engine.build()
    for bucket in BUCKETS:
        inputs.fill(bucket)

    def step() -> dict[str, Tensor]:
        for bucket in BUCKETS:
            inputs.fill(bucket)
            engine.micro_step(bucket)
        return {name: gradient.clone() for name, gradient in engine.gradients().items()}

    expected = step()
    for _, gradient in engine.params.named(engine.params.grad):
        gradient.fill_(float("nan"))
    engine.update(0.0)
    assert all(torch.equal(found, expected[name]) for name, found in step().items())


def test_a_part_whose_gradient_comes_before_the_wholes_is_an_error() -> None:
    arena, sums = torch.zeros(12), GradientSums()
    sums.begin(first=True)
    assert not sums.adds(arena[:4])
    assert sums.adds(arena[1:3]) and sums.adds(arena[:4])
    assert not sums.adds(arena[6:8])
    with pytest.raises(AssertionError, match="before that of the whole"):
        sums.adds(arena[4:10])


def test_new_weights_are_the_seeds_whoever_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    first = initial_parameters(config, seed=3)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert all(torch.equal(first[name], tensor) for name, tensor in initial_parameters(config, seed=3).items())
    layers = [first[f"layers.{i}.mlp.up_proj.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)
    assert not torch.equal(layers[0], initial_parameters(config, seed=4)["layers.0.mlp.up_proj.weight"])
    assert layers[0].std().item() == pytest.approx(0.02, rel=0.05)
