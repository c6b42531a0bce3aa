"""fp8 kernels against their definitions: the same bytes, and matmuls within fp32's rounding (torch's CPU has fp8 matmuls too).

Triton's interpreter casts to e4m3 wrongly where a mantissa carries into the exponent, so torch casts for it here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from engine.ops.fp8_norm import norm_rows
from engine.ops.fp8_rows import quantise_rows, turned
from engine.ops.fp8_rows_ref import quantise_rows_ref, turned_ref
from engine.ops.fp8_swiglu import swiglu_backward_rows, swiglu_rows
from engine.ops.linear_fp8 import linear_fp8
from engine.ops.linear_fp8_ref import linear_fp8_ref
from engine.ops.norm_linear_fp8 import norm_linear_fp8
from engine.ops.norm_linear_fp8_ref import norm_linear_fp8_ref
from engine.ops.norm_mlp_fp8 import norm_mlp_fp8
from engine.ops.norm_mlp_fp8_ref import norm_mlp_fp8_ref
from engine.ops.rms_norm import norm_forward
from engine.ops.weight import Weight

pytestmark = pytest.mark.usefixtures("one_thread", "right_casts")


@pytest.fixture
def right_casts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cast = interpreter._convert_float

    def right(source: Any, kind: Any, wanted: Any, rounding: Any) -> Any:
        if kind != tl.float32 or wanted != tl.float8e4nv:
            return cast(source, kind, wanted, rounding)
        values = torch.from_numpy(np.frombuffer(source.tobytes(), np.float32).copy())
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(source.shape)

    monkeypatch.setattr(interpreter, "_convert_float", right)
    yield


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(R: int, C: int, seed: int) -> Tensor:
    """Rows of very different sizes, one of them zeros."""
    x = random(R, C, seed=seed) * torch.exp(3 * random(R, 1, seed=seed + 1))
    x[R // 2] = 0.0
    return x


def assert_same_bytes(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("R", [1, 37, 64, 70])
def test_rows_and_their_transpose(R: int) -> None:
    x = uneven(R, 208, seed=0)
    found, (values, scale) = quantise_rows(x), quantise_rows_ref(x)
    assert torch.equal(found.scale, scale)
    assert_same_bytes(found.values, values)
    found_turned, (values, scale) = turned(found), turned_ref(values, scale)
    assert torch.equal(found_turned.scale, scale)
    assert_same_bytes(found_turned.values, values)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("inter", [80, 2064])
def test_swiglu_rows(inter: int, whole: bool) -> None:
    hidden, dact = uneven(5, 2 * inter, seed=0), uneven(5, inter, seed=2)
    gate, up = hidden.requires_grad_().chunk(2, dim=1)
    act = torch.nn.functional.silu(gate) * up
    act.backward(dact)
    assert hidden.grad is not None
    for found, expected in (
        (swiglu_rows(hidden.detach()), act.detach()),
        (swiglu_backward_rows(hidden.detach(), dact, whole=whole), hidden.grad),
    ):
        scale = quantise_rows_ref(expected)[1]
        assert torch.equal(found.scale, scale)
        # A value may fall to the other side of the middle between two e4m3 numbers, 1/8 apart.
        error = (found.values.float() - expected / scale).abs()
        assert (error <= (expected / scale).abs() / 15 + 2.0**-10).all()


@pytest.mark.parametrize("drop", [0, 4])
@pytest.mark.parametrize("has_delta", [True, False])
def test_norm_rows_are_the_quantised_rows_of_the_norm(has_delta: bool, drop: int) -> None:
    residual, weight = uneven(36, 208, seed=0), random(208, seed=2)
    delta = random(36, 208, seed=3) if has_delta else None
    total, found, rstd = norm_rows(residual, delta, weight, 1e-6, drop)
    expected_total, normed, expected_rstd = norm_forward(residual, delta, weight, 1e-6, drop)
    expected = quantise_rows(normed)
    assert torch.equal(total, expected_total) and torch.equal(rstd, expected_rstd)
    assert torch.equal(found.scale, expected.scale)
    assert_same_bytes(found.values, expected.values)


def results(
    op: Callable[..., Any], inputs: list[Tensor], values: list[Tensor], dys: list[Tensor], **options: Any
) -> list[Tensor]:
    """Outputs, then the gradients of inputs and weights."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    weights = [Weight(value.clone().requires_grad_(), torch.full_like(value, 0.25)) for value in values]
    outputs = op([leaf * 1.0 for leaf in leaves], weights, **options)
    torch.autograd.backward(outputs, dys)
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None for gradient in gradients)
    return [y.detach() for y in outputs] + [g for g in gradients if g is not None] + [w.grad for w in weights]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def of_linear(op: Callable[[Tensor, Weight], Tensor]) -> Callable[..., Any]:
    return lambda inputs, weights: [op(inputs[0], weights[0])]


def of_norm_linear(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    return lambda inputs, weights: list(op(*inputs, weights[0], 1e-6, weights[1]))


def of_norm_mlp(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    return lambda inputs, weights, **options: list(op(*inputs, weights[0], 1e-6, *weights[1:], **options))


@pytest.mark.parametrize("R", [1, 37])
def test_linear_fp8(R: int) -> None:
    x, dy, w = uneven(R, 64, seed=0), uneven(R, 48, seed=2), random(48, 64, seed=4)
    found, expected = (results(of_linear(op), [x], [w], [dy]) for op in (linear_fp8, linear_fp8_ref))
    assert_close(found, expected, 1e-6)


# Values that stand in the middle between two e4m3 numbers go either way: the last bit of a norm or of silu decides.
NEAR = 3e-3


@pytest.mark.parametrize("R", [1, 37])
def test_norm_linear_fp8(R: int) -> None:
    inputs, dys = [uneven(R, 64, seed=0), random(R, 64, seed=1)], [random(R, 64, seed=2), uneven(R, 48, seed=3)]
    values = [random(64, seed=4), random(48, 64, seed=5) * 0.2]
    found, expected = (
        results(of_norm_linear(op), inputs, values, dys) for op in (norm_linear_fp8, norm_linear_fp8_ref)
    )
    assert_close(found, expected, NEAR)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("drop", [0, 4])
def test_norm_mlp_fp8(drop: int, recompute: bool) -> None:
    R, kept = 36, 27 if drop else 36
    inputs, dys = [uneven(R, 64, seed=0), random(R, 64, seed=1)], [random(kept, 64, seed=2), uneven(kept, 64, seed=3)]
    values = [random(64, seed=4), random(160, 64, seed=5) * 0.2, random(64, 80, seed=6) * 0.2]
    found, expected = (
        results(of_norm_mlp(op), inputs, values, dys, drop_first_of=drop, recompute=recompute)
        for op in (norm_mlp_fp8, norm_mlp_fp8_ref)
    )
    assert_close(found, expected, NEAR)


def test_what_is_formed_again_is_the_same() -> None:
    inputs, dys = [random(37, 64, seed=0), random(37, 64, seed=1)], [random(37, 64, seed=2), uneven(37, 64, seed=3)]
    values = [random(64, seed=4), random(160, 64, seed=5) * 0.2, random(64, 80, seed=6) * 0.2]
    kept, again = (
        results(of_norm_mlp(norm_mlp_fp8), inputs, values, dys, recompute=recompute) for recompute in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
