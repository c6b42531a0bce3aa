"""The captured update against torch.optim.AdamW, and that what may change between steps is read when it is replayed."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.engine import Engine
from engine.optimizer import Schedule
from engine.settings import ObjectiveSettings, OptimizerSettings
from tests.drafter_helpers import assert_same_bits, random_target, random_weights, small_config
from tests.gpu.engine_helpers import BUCKETS, CUDA, Built, StaticInputs, build, medium_config

OPTIMIZER = OptimizerSettings(weight_decay=0.1, clip_norm=1.0)
SCHEDULE = Schedule("cosine", lr=1e-3, total_steps=20, warmup_steps=5, min_ratio=0.1)
TRAINED = BUCKETS[:2]


@pytest.fixture(scope="module")
def shared() -> Iterator[Built]:
    made = build(medium_config(), TRAINED, optimizer=OPTIMIZER)
    yield made
    made.engine.close()


@pytest.fixture
def built(shared: Built) -> Built:
    """As if it had just been built: weights, moments and every device value that a test may have changed."""
    engine = shared.engine
    assert engine.optimizer is not None
    engine.params.load_(random_weights(engine.config))
    for tensor in engine.optimizer.state().values():
        tensor.zero_()
    engine.optimizer.weight_decay.fill_(OPTIMIZER.weight_decay)
    engine.optimizer.clip_norm.fill_(OPTIMIZER.clip_norm)
    engine.objective.ce_weight.fill_(1.0)
    engine.zero_()
    return shared


def torch_adamw(weights: Mapping[str, Tensor]) -> torch.optim.AdamW:
    """Over these very tensors; norm weights do not decay."""
    groups = [
        {"params": [w for w in weights.values() if w.dim() == 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)


def torch_step(optimizer: torch.optim.AdamW, weights: Mapping[str, Tensor], lr: float) -> Tensor:
    """Clip and step from the gradients that the weights hold. Returns the norm before the clip."""
    norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), OPTIMIZER.clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return norm


def random_gradients(engine: Engine, seed: int, scale: float) -> None:
    generator = torch.Generator(CUDA).manual_seed(seed)
    for _, gradient in engine.params.named(engine.params.grad):
        gradient += torch.randn(gradient.shape, device=CUDA, generator=generator) * scale


def test_twenty_updates_from_given_gradients_equal_torch(built: Built) -> None:
    engine, optimizer = built.engine, built.engine.optimizer
    assert optimizer is not None
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in engine.params.state().items()}
    plain = torch_adamw(theirs)
    for step in range(20):
        # Sums of two micro-batches whose weight is 640, of a size that is clipped in some of the steps only.
        for micro in range(2):
            random_gradients(engine, 2 * step + micro, 0.5 if step % 3 else 0.01)
            optimizer.denominator += 320
        for name, gradient in engine.gradients().items():
            theirs[name].grad = gradient / 640
        norm = torch_step(plain, theirs, SCHEDULE(step))
        engine.update(SCHEDULE(step))
        assert (norm > 1) == bool(step % 3)
        torch.testing.assert_close(optimizer.grad_norm.float(), norm, rtol=1e-4, atol=0)
        engine.params.grad.zero_()
        assert optimizer.denominator == 0
    assert (int(optimizer.step), int(optimizer.skipped)) == (20, 0)
    for name, value in engine.params.state().items():
        error = (value - theirs[name]).abs().max()
        assert error <= 1e-5 * value.abs().max(), f"{name} differs by {error}"


def test_twenty_training_steps_equal_a_plain_loop_with_torch(built: Built) -> None:
    """The plain loop calls the same step in Python and leaves the rest to torch. Every step is a micro-batch of each bucket."""
    for step in range(20):
        for bucket in TRAINED:
            built.inputs.load(bucket, seed=step)
            built.engine.micro_step(bucket)
        built.engine.update(SCHEDULE(step))
    found = {name: value.clone() for name, value in built.engine.params.state().items()}

    config = built.engine.config
    inputs = StaticInputs(config, TRAINED, torch.float32)
    twin = Engine(
        config,
        random_target(config),
        TRAINED,
        inputs,
        device=CUDA,
        objective=ObjectiveSettings(),
        optimizer=None,
        attention="reference",
        chunk_rows=300,
    )
    initial = random_weights(config)
    twin.params.load_(initial)
    weights = {name: torch.nn.Parameter(value) for name, value in twin.params.named(twin.params.weight)}
    optimizer = torch_adamw(weights)
    norms = []
    for step in range(20):
        twin.zero_()
        for i, bucket in enumerate(TRAINED):
            inputs.load(bucket, seed=step)
            twin.executor.call(f"{'add' if i else 'train'} {bucket.name}")
        weight = twin.metrics.sums[1].float()  # the summed weight of the loss
        for name, gradient in twin.gradients().items():
            weights[name].grad = gradient / weight
        norms.append(torch_step(optimizer, weights, SCHEDULE(step)).item())
    assert max(norms) > 1, "the clip is never reached"
    for name, value in found.items():
        plain = weights[name].detach()
        moved, error = (plain - initial[name].to(CUDA)).norm(), (value - plain).norm()
        assert error <= 1e-5 * plain.norm(), f"{name}: error {error}"
        assert error <= 1e-4 * moved, f"{name}: error {error}, moved {moved}"
    twin.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped(built: Built, value: float) -> None:
    engine, optimizer = built.engine, built.engine.optimizer
    assert optimizer is not None

    def state() -> dict[str, Tensor]:
        tensors = {"weight": engine.params.weight} | optimizer.state()
        return {name: tensor.clone() for name, tensor in tensors.items() if name != "skipped"}

    bucket = TRAINED[0]
    built.inputs.load(bucket, seed=0)
    engine.micro_step(bucket)
    engine.update(1e-3)
    before = state()
    engine.micro_step(bucket)
    engine.params.view(engine.params.grad, "fc.weight")[3, 5] = value
    engine.update(1e-3)
    assert_same_bits(state(), before)
    assert (int(optimizer.step), int(optimizer.skipped)) == (1, 1)
    assert not optimizer.grad_norm.isfinite()
    assert optimizer.denominator == 0
    engine.micro_step(bucket)
    engine.update(1e-3)
    assert (int(optimizer.step), int(optimizer.skipped)) == (2, 1)
    assert engine.params.weight.isfinite().all()
    assert not torch.equal(engine.params.weight, before["weight"])


def test_a_bad_batch_costs_a_step_and_nothing_else(built: Built) -> None:
    engine, optimizer, bucket = built.engine, built.engine.optimizer, TRAINED[0]
    assert optimizer is not None
    before = engine.params.weight.clone()
    built.inputs.load(bucket, seed=0)
    built.inputs(bucket)["target_hidden"][0, 0, 0] = float("nan")
    engine.micro_step(bucket)
    engine.update(1e-3)
    assert torch.equal(engine.params.weight, before)
    assert (int(optimizer.step), int(optimizer.skipped)) == (0, 1)
    sums = engine.metrics.snapshot().read().sums
    assert (sums["micro_batches"], sums["bad_micro_batches"]) == (1, 1)


def test_a_step_without_weight_is_skipped(built: Built) -> None:
    engine, optimizer = built.engine, built.engine.optimizer
    assert optimizer is not None
    before = engine.params.weight.clone()
    random_gradients(engine, 0, 1.0)
    engine.update(1e-3)
    assert torch.equal(engine.params.weight, before)
    assert (int(optimizer.step), int(optimizer.skipped)) == (0, 1)


def first_move(built: Built, lr: float) -> Tensor:
    """Where the first update from given gradients moves the weights to."""
    engine, optimizer = built.engine, built.engine.optimizer
    assert optimizer is not None
    engine.params.load_(random_weights(engine.config))
    for tensor in optimizer.state().values():
        tensor.zero_()
    before = engine.params.weight.clone()
    random_gradients(engine, 0, 1.0)
    optimizer.denominator.fill_(1.0)
    engine.update(lr)
    return engine.params.weight - before


def test_the_learning_rate_is_not_baked_into_the_graph(built: Built) -> None:
    assert not first_move(built, 0.0).any()
    once, thrice = first_move(built, 1e-3), first_move(built, 3e-3)
    assert once.any()
    torch.testing.assert_close(thrice, 3 * once, rtol=1e-3, atol=1e-6)


def test_nor_are_weight_decay_and_clip(built: Built) -> None:
    optimizer = built.engine.optimizer
    assert optimizer is not None
    weights = random_weights(built.engine.config)["fc.weight"].to(CUDA)

    def move_of_fc() -> Tensor:
        return built.engine.params.view(first_move(built, 1e-3), "fc.weight")

    with_decay = move_of_fc()
    optimizer.weight_decay.fill_(0.0)
    without = move_of_fc()
    torch.testing.assert_close(with_decay - without, -1e-3 * OPTIMIZER.weight_decay * weights, rtol=1e-2, atol=1e-7)
    # Adam's first step does not depend on the gradient's size until the clip makes it as small as eps.
    optimizer.clip_norm.fill_(1e-12)
    assert move_of_fc().abs().max() < 0.1 * without.abs().max()


def test_the_weights_of_the_loss_are_values_on_the_device(built: Built) -> None:
    bucket = TRAINED[1]
    built.inputs.load(bucket, seed=0)
    once = built.replay(bucket)
    built.engine.objective.ce_weight.fill_(2.0)
    twice = built.replay(bucket)
    # Twice is exact in binary floating point.
    for name in built.engine.gradients():
        torch.testing.assert_close(twice[name], 2 * once[name], rtol=1e-5, atol=0)
    assert twice["sums"][0] == 2 * once["sums"][0]


@pytest.mark.parametrize("grad_dtype", ["bf16", "fp32"])
def test_bf16_weights_are_the_rounded_masters(grad_dtype: str) -> None:
    optimizer = OptimizerSettings(grad_dtype="bf16" if grad_dtype == "bf16" else "fp32")
    made = build(small_config(block_size=8), TRAINED, precision="bf16", optimizer=optimizer)
    engine = made.engine
    assert engine.params.grad.dtype == (torch.bfloat16 if grad_dtype == "bf16" else torch.float32)
    before = engine.params.state()["fc.weight"].clone()
    for step in range(3):
        for bucket in TRAINED:
            made.inputs.load(bucket, seed=step)
            engine.micro_step(bucket)
        engine.update(1e-3)
    assert engine.params.master is not None
    assert engine.params.master.dtype == torch.float32
    assert not torch.equal(engine.params.state()["fc.weight"], before)
    assert torch.equal(engine.params.weight, engine.params.master.bfloat16())
    engine.close()
