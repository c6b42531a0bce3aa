"""The update against torch.optim.AdamW, its fp32 masters, the skip of bad steps, and the schedules."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import reference_ops
from engine.optimizer import AdamW, Schedule
from engine.params import ParamArena
from engine.settings import OptimizerSettings
from tests.drafter_helpers import CPU, random_weights, small_config

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = OptimizerSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0)


def arena_and_optimizer(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[ParamArena, AdamW]:
    config = small_config()
    params = ParamArena(config, CPU, dtype=dtype, grad_dtype=dtype)
    params.load_(random_weights(config))
    return params, AdamW(params, reference_ops(), replace(SETTINGS, **changes))


def add_random_gradients(params: ParamArena, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, gradient in params.named(params.grad):
        gradient += torch.randn(gradient.shape, generator=generator) * scale


def everything(params: ParamArena, optimizer: AdamW) -> dict[str, Tensor]:
    assert params.master is not None
    named = {"weight": params.weight, "master": params.master, **optimizer.state()}
    return {name: tensor.clone() for name, tensor in named.items() if name != "skipped"}


def test_weights_are_the_masters_rounded_once() -> None:
    params = ParamArena(small_config(), CPU, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
    given = random_weights(small_config())
    params.load_(given)
    for name, master in params.state().items():
        assert torch.equal(master, given[name])
        assert torch.equal(params.view(params.weight, name), given[name].bfloat16())


@pytest.mark.parametrize("clip_norm", [1.0, 1e9, 0.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twenty_steps_equal_torch(clip_norm: float, weight_decay: float) -> None:
    params, optimizer = arena_and_optimizer(clip_norm=clip_norm, weight_decay=weight_decay)
    mine = dict(params.named(params.weight))
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in mine.items()}
    groups = [
        {"params": [value for value in theirs.values() if value.dim() == 2], "weight_decay": weight_decay},
        {"params": [value for value in theirs.values() if value.dim() == 1], "weight_decay": 0.0},
    ]
    torch_optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    schedule = Schedule("cosine", lr=1e-2, total_steps=20, warmup_steps=5, min_ratio=0.1)
    for step in range(20):
        # Two micro-batches of sums whose weight is 640: of a size that is clipped in some of the steps only.
        for micro in range(2):
            add_random_gradients(params, 2 * step + micro, scale=2.5 if step % 3 else 0.5)
            optimizer.denominator += 320
        for name, gradient in params.named(params.grad):
            theirs[name].grad = gradient / 640
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip_norm or float("inf"))
        for group in torch_optimizer.param_groups:
            group["lr"] = schedule(step)
        torch_optimizer.step()
        optimizer.lr.fill_(schedule(step))
        optimizer.update()
        torch.testing.assert_close(optimizer.grad_norm.float(), norm, rtol=1e-5, atol=0)
        params.grad.zero_()
        assert optimizer.denominator == 0
    assert (int(optimizer.step), int(optimizer.skipped)) == (20, 0)
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name].detach(), rtol=1e-5, atol=2e-6)


def test_norm_weights_do_not_decay() -> None:
    params, optimizer = arena_and_optimizer(weight_decay=0.5)
    before = {name: value.clone() for name, value in params.named(params.weight)}
    optimizer.lr.fill_(0.1)
    optimizer.denominator.fill_(1.0)
    optimizer.update()
    for name, value in params.named(params.weight):
        expected = before[name] if value.dim() == 1 else before[name] * (1 - 0.1 * 0.5)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


def test_masters_move_where_bf16_alone_stands_still() -> None:
    # 1.0 and 1.0 - 1e-4 are one number in bf16: three trainers shipped norm weights of 1.0 because of it.
    params, optimizer = arena_and_optimizer(torch.bfloat16, weight_decay=0.0, clip_norm=0.0)
    name = "layers.0.self_attn.q_norm.weight"
    params.load_(random_weights(small_config()) | {name: torch.ones(16)})
    alone = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    torch_optimizer = torch.optim.AdamW([alone], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(100):
        params.view(params.grad, name).fill_(0.01)
        optimizer.denominator.fill_(1.0)
        optimizer.lr.fill_(1e-4)
        optimizer.update()
        alone.grad = torch.full_like(alone, 0.01)
        torch_optimizer.step()
    assert params.master is not None
    master = params.view(params.master, name)
    torch.testing.assert_close(master, torch.full((16,), 0.99), rtol=1e-4, atol=0)
    assert torch.equal(params.view(params.weight, name), master.bfloat16())
    assert (params.view(params.weight, name) < 1).all()
    assert (alone == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(value: float, dtype: torch.dtype) -> None:
    params, optimizer = arena_and_optimizer(dtype)
    twin_params, twin = arena_and_optimizer(dtype)
    for p, o in ((params, optimizer), (twin_params, twin)):
        o.lr.fill_(1e-2)
        o.denominator.fill_(3.0)
        add_random_gradients(p, 0)
        o.update()
        p.grad.zero_()
    before = everything(params, optimizer)
    add_random_gradients(params, 1)
    params.view(params.grad, "fc.weight")[3, 5] = value
    optimizer.denominator.fill_(3.0)
    optimizer.update()
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(params, optimizer).items())
    assert (int(optimizer.step), int(optimizer.skipped)) == (1, 1)
    assert not optimizer.grad_norm.isfinite()
    params.grad.zero_()
    assert optimizer.denominator == 0
    # The next step is the one that would have followed without the bad one.
    for p, o in ((params, optimizer), (twin_params, twin)):
        o.denominator.fill_(3.0)
        add_random_gradients(p, 2)
        o.update()
    expected = everything(twin_params, twin)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in everything(params, optimizer).items())
    assert params.weight.isfinite().all()


def test_a_step_without_weight_is_skipped_even_where_there_are_gradients() -> None:
    params, optimizer = arena_and_optimizer()
    before = everything(params, optimizer)
    optimizer.lr.fill_(1e-2)
    for gradients in (False, True):
        if gradients:
            add_random_gradients(params, 0)
        optimizer.update()
        assert all(torch.equal(tensor, before[name]) for name, tensor in everything(params, optimizer).items())
    assert (int(optimizer.step), int(optimizer.skipped)) == (0, 2)


def test_bad_steps_in_a_row_are_counted_and_a_good_one_ends_them() -> None:
    params, optimizer = arena_and_optimizer()
    nan, inf = float("nan"), float("inf")
    counted, steps = (
        [],
        [(1.0, 1.0), (nan, 1.0), (inf, 1.0), (0.0, 0.0), (nan, 1.0), (1.0, nan), (1.0, 1.0), (nan, 2.0)],
    )
    for gradient, weight in steps:
        params.grad.fill_(gradient)
        optimizer.denominator.fill_(weight)
        optimizer.update()
        counted.append(int(optimizer.bad_in_row))
    # A step without weight neither adds to them nor ends them.
    assert counted == [0, 1, 2, 2, 3, 4, 0, 1]
    assert int(optimizer.skipped) == 6


def test_warm_up_then_cosine() -> None:
    schedule = Schedule("cosine", lr=2.0, total_steps=14, warmup_steps=4, min_ratio=0.1)
    assert [schedule(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert schedule(9) == pytest.approx(1.1)  # half way down
    assert schedule(14) == schedule(99) == pytest.approx(0.2)
    values = [schedule(step) for step in range(4, 15)]
    assert values == sorted(values, reverse=True)


def test_constant_and_no_warm_up() -> None:
    assert [Schedule("constant", 3.0, 10, 2)(step) for step in (0, 1, 2, 9, 50)] == [1.5, 3.0, 3.0, 3.0, 3.0]
    assert Schedule("cosine", 3.0, 10, 0)(0) == 3.0
    assert Schedule("cosine", 3.0, 10, 0)(10) == pytest.approx(0.0)
    # A run as short as its warm-up still has a rate for every step.
    assert [Schedule("cosine", 1.0, 2, 2)(step) for step in range(3)] == [0.5, 1.0, 1.0]


def test_parameters_lie_in_whole_shards_with_the_undecayed_last() -> None:
    params, _ = arena_and_optimizer()
    assert params.size % 8192 == 0
    for name, value in params.named(params.weight):
        offset = value.storage_offset()
        assert (offset >= params.num_decayed) == (value.dim() == 1), name
    assert sum(value.numel() for _, value in params.named(params.weight)) <= params.size


def test_tensors_that_do_not_fit_are_named() -> None:
    params, _ = arena_and_optimizer()
    tensors = random_weights(small_config())
    tensors["fc.bias"] = tensors.pop("fc.weight")
    tensors["norm.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"found no fc\.weight, unexpected fc\.bias, norm\.weight \(3,\) for \(64,\)"):
        params.load_(tensors)
