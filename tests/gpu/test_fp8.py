"""fp8 on the GPU: the kernels' bytes are the definition's, the matmuls are within a rounding of it, a run learns, and the
drafter is evaluated as it will be used, in bf16. Capture and replay: tests/gpu/test_engine.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.ops.fp8_norm import norm_rows
from engine.ops.fp8_rows import quantise_rows, turned
from engine.ops.fp8_rows_ref import quantise_rows_ref, turned_ref
from engine.ops.linear_fp8 import linear_fp8
from engine.ops.linear_fp8_ref import linear_fp8_ref
from engine.ops.norm_linear_fp8 import norm_linear_fp8
from engine.ops.norm_linear_fp8_ref import norm_linear_fp8_ref
from engine.ops.norm_mlp_fp8 import norm_mlp_fp8
from engine.ops.norm_mlp_fp8_ref import norm_mlp_fp8_ref
from engine.ops.rms_norm import norm_forward
from engine.ops.weight import Weight
from engine.settings import OptimizerSettings
from tests.drafter_helpers import assert_same_bits
from tests.gpu.engine_helpers import BUCKETS, CUDA, assemble, build, medium_config

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 matmuls")


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=CUDA).bfloat16()


def uneven(R: int, C: int, seed: int) -> Tensor:
    """Rows of very different sizes, one of them zeros."""
    x = (random(R, C, seed=seed).float() * torch.exp(3 * random(R, 1, seed=seed + 1).float())).bfloat16()
    x[R // 2] = 0.0
    return x


def assert_same_bytes(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("R", "C"), [(1, 16), (37, 208), (300, 12288)])
def test_bytes_are_those_of_the_definition(R: int, C: int) -> None:
    x = uneven(R, C, seed=0)
    found, (values, scale) = quantise_rows(x), quantise_rows_ref(x)
    assert torch.equal(found.scale, scale)
    assert_same_bytes(found.values, values)
    found_turned, (values, scale) = turned(found), turned_ref(values, scale)
    assert torch.equal(found_turned.scale, scale)
    assert_same_bytes(found_turned.values, values)


@pytest.mark.parametrize("drop", [0, 4])
@pytest.mark.parametrize("has_delta", [True, False])
def test_norm_rows_are_the_quantised_rows_of_the_norm(has_delta: bool, drop: int) -> None:
    residual, weight = uneven(36, 208, seed=0), random(208, seed=2)
    delta = random(36, 208, seed=3) if has_delta else None
    total, found, rstd = norm_rows(residual, delta, weight, 1e-6, drop)
    expected_total, normed, expected_rstd = norm_forward(residual, delta, weight, 1e-6, drop)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(rstd, expected_rstd, rtol=1e-6, atol=0)
    # The last bit of a norm may move a number across the middle between two e4m3 numbers, but nothing else.
    expected = quantise_rows(normed)
    assert torch.equal(found.scale, expected.scale)
    assert (found.values.view(torch.uint8) != expected.values.view(torch.uint8)).float().mean() <= 1e-3
    assert ((found.values.float() * found.scale - normed).abs() <= normed.abs() / 15 + 2.0**-9 * found.scale).all()


def results(
    op: Callable[..., Any],
    inputs: list[Tensor],
    values: list[Tensor],
    dys: list[Tensor],
    grad: torch.dtype = torch.bfloat16,
    **options: Any,
) -> list[Tensor]:
    """Outputs, then the gradients of inputs and weights."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    weights = [Weight(v.clone().requires_grad_(), torch.full_like(v, 0.25, dtype=grad)) for v in values]
    outputs = op([leaf * 1.0 for leaf in leaves], weights, **options)
    torch.autograd.backward(outputs, dys)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == len(leaves)
    return [y.detach() for y in outputs] + gradients + [w.grad for w in weights]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.float() - b.float()).norm() <= tolerance * b.float().norm()


def of_linear(op: Callable[[Tensor, Weight], Tensor]) -> Callable[..., Any]:
    return lambda inputs, weights: [op(inputs[0], weights[0])]


def of_norm_linear(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    return lambda inputs, weights: list(op(*inputs, weights[0], 1e-6, weights[1]))


def of_norm_mlp(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    return lambda inputs, weights, **options: list(op(*inputs, weights[0], 1e-6, *weights[1:], **options))


# Rows that are no multiple of 16: the weight gradient sums over them.
@pytest.mark.parametrize("R", [1, 37, 300])
@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_linear_fp8(R: int, grad: torch.dtype) -> None:
    x, dy, w = uneven(R, 512, seed=0), uneven(R, 208, seed=2), random(208, 512, seed=4)
    found, expected = (results(of_linear(op), [x], [w], [dy], grad) for op in (linear_fp8, linear_fp8_ref))
    # bf16's rounding, and forward the 14 bits that the fp8 unit sums with.
    assert_close(found, expected, 6e-3)


# A rounding in between moves some values to the next e4m3 number.
NEAR = 3e-2


@pytest.mark.parametrize("R", [1, 37, 300])
def test_norm_linear_fp8(R: int) -> None:
    inputs, dys = [uneven(R, 256, seed=0), random(R, 256, seed=1)], [random(R, 256, seed=2), uneven(R, 208, seed=3)]
    values = [random(256, seed=4), random(208, 256, seed=5) * 0.1]
    found, expected = (
        results(of_norm_linear(op), inputs, values, dys) for op in (norm_linear_fp8, norm_linear_fp8_ref)
    )
    assert_close(found, expected, NEAR)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("drop", [0, 4])
@pytest.mark.parametrize("inter", [208, 2064])
def test_norm_mlp_fp8(inter: int, drop: int, recompute: bool) -> None:
    R, kept = 300, 225 if drop else 300
    inputs = [random(R, 256, seed=0), random(R, 256, seed=1)]
    dys = [random(kept, 256, seed=2), uneven(kept, 256, seed=3)]
    values = [random(256, seed=4), random(2 * inter, 256, seed=5) * 0.1, random(256, inter, seed=6) * 0.1]
    found, expected = (
        results(of_norm_mlp(op), inputs, values, dys, drop_first_of=drop, recompute=recompute)
        for op in (norm_mlp_fp8, norm_mlp_fp8_ref)
    )
    assert_close(found, expected, NEAR)


def test_a_run_in_fp8_learns_what_one_in_bf16_does() -> None:
    bucket, config = BUCKETS[1], medium_config()
    losses: dict[str, list[float]] = {}
    for precision in ("bf16", "fp8"):
        made = build(config, [bucket], precision=precision, attention="triton", optimizer=OptimizerSettings())
        made.inputs.load(bucket, seed=0)
        losses[precision] = []
        for _ in range(60):
            made.engine.metrics.zero_()
            made.engine.micro_step(bucket)
            losses[precision].append(made.engine.metrics.snapshot().read().means()["loss"])
            made.engine.update(lr=2e-3)
        made.engine.close()
    first, last = losses["bf16"][0], losses["bf16"][-1]
    assert abs(losses["fp8"][0] - first) <= 0.01 * first
    assert last < 0.7 * first
    assert abs(losses["fp8"][-1] - last) <= 0.1 * (first - last)


def test_evaluation_is_in_bf16() -> None:
    bucket, config = BUCKETS[0], medium_config()
    sums = []
    for precision in ("bf16", "fp8"):
        made = build(config, [bucket], precision=precision, attention="triton", evaluate=True)
        made.inputs.load(bucket, seed=0)
        made.engine.eval_step(bucket)
        sums.append({"sums": made.engine.eval_metrics.sums.clone(), "slots": made.engine.eval_metrics.slots.clone()})
        made.engine.close()
    assert_same_bits(*sums)


def test_sizes_that_do_not_divide_are_refused() -> None:
    config = replace(medium_config(), intermediate_size=500)
    with pytest.raises(ValueError, match="multiples of 16, found intermediate_size 500"):
        assemble(config, [BUCKETS[0]], precision="fp8", attention="triton")
