"""Every fused operation in fp32 against its definition in fp64: at most twice plain torch's error, and a rounding.

The sizes fill no block of any kernel.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.adamw import adamw
from engine.ops.adamw_arenas import AdamWArenas
from engine.ops.adamw_ref import adamw_ref
from engine.ops.frozen_head import frozen_head
from engine.ops.frozen_head_ref import frozen_head_ref
from engine.ops.linear import linear
from engine.ops.linear_ref import linear_ref
from engine.ops.norm_linear import norm_linear
from engine.ops.norm_linear_ref import norm_linear_ref
from engine.ops.norm_mlp import norm_mlp
from engine.ops.norm_mlp_ref import norm_mlp_ref
from engine.ops.qkv_rope import qkv_rope
from engine.ops.qkv_rope_ref import qkv_rope_ref
from engine.ops.rms_norm import add_rms_norm
from engine.ops.rms_norm_ref import add_rms_norm_ref
from engine.ops.row_loss import RowLoss, Teacher
from engine.ops.weigh_rows import weigh_rows
from engine.ops.weigh_rows_ref import weigh_rows_ref
from engine.ops.weight import Weight
from engine.ops.zero_padding import zero_padding
from engine.ops.zero_padding_ref import zero_padding_ref

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [1, 37]
D = 200
Results = dict[str, Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_within_budget(
    found: Results, plain: Results, exact: Results, terms: Mapping[str, float] | None = None
) -> None:
    """terms: magnitude of the numbers whose difference a result is, where that is more than the result's own."""
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        assert found[name].shape == expected.shape, name
        error, allowed = ((x.double() - expected).abs().max().item() for x in (found[name], plain[name]))
        magnitude = max(expected.abs().max().item(), (terms or {}).get(name, 0.0))
        rounding = 4 * torch.finfo(torch.float32).eps * magnitude
        assert error <= 2 * allowed + rounding, f"{name}: error {error}, plain torch's {allowed}"


def weight_of(value: Tensor, dtype: torch.dtype) -> Weight:
    """The gradient arena holds something already: an earlier micro-batch's sum."""
    return Weight(value.clone().to(dtype).requires_grad_(), torch.full_like(value, 0.25, dtype=dtype))


def run(
    op: Callable[..., Any], inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor], dtype: torch.dtype
) -> Results:
    """Outputs and gradients of op(**inputs, **weights), for output gradients that differ from element to element."""
    leaves = {name: x.clone().to(dtype).requires_grad_() for name, x in inputs.items()}
    holders = {name: weight_of(value, dtype) for name, value in weights.items()}
    # An operation may take its input's memory over for the backward pass: it gets what a matmul left.
    outputs = op(**{name: leaf * 1.0 for name, leaf in leaves.items()}, **holders)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = torch.stack([(y * random(*y.shape, seed=90 + i).to(dtype)).sum() for i, y in enumerate(outputs)]).sum()
    results = {f"output {i}": y.detach().clone() for i, y in enumerate(outputs)}
    loss.backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        results[f"d{name}"] = leaf.grad
    for name, weight in holders.items():
        assert weight.value.grad is None, "the gradient goes to the arena only"
        results[f"d{name}"] = weight.grad
    return results


def check(
    op: Callable[..., Any], definition: Callable[..., Any], inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> None:
    found = run(op, inputs, weights, torch.float32)
    plain = run(definition, inputs, weights, torch.float32)
    exact = run(definition, inputs, weights, torch.float64)
    assert_within_budget(found, plain, exact)


@pytest.mark.parametrize("R", ROWS)
def test_linear(R: int) -> None:
    def call(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w: op(x, w)

    check(call(linear), call(linear_ref), {"x": random(R, D, seed=0)}, {"w": random(71, D, seed=1)})


def test_weight_gradients_of_bf16_are_summed_in_fp32_where_the_arena_is() -> None:
    # Each product is a bf16 number; 1 + 2^-9 twice over is not.
    weight = Weight(torch.ones(1, 1, dtype=torch.bfloat16).requires_grad_(), torch.zeros(1, 1))
    x = torch.tensor([[1.0], [2.0**-9]], dtype=torch.bfloat16).requires_grad_()
    linear(x, weight).sum().backward()
    assert weight.grad.item() == 1 + 2.0**-9


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("has_delta", [True, False])
def test_add_rms_norm(R: int, has_delta: bool) -> None:
    def call(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda residual, w, delta=None: op(residual, delta, w, 1e-6)

    inputs = {"residual": random(R, D, seed=0)} | ({"delta": random(R, D, seed=1)} if has_delta else {})
    check(call(add_rms_norm), call(add_rms_norm_ref), inputs, {"w": random(D, seed=2)})


@pytest.mark.parametrize("K", [2, 7])
@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("has_delta", [True, False])
def test_add_rms_norm_without_the_first_of_every_block(K: int, blocks: int, has_delta: bool) -> None:
    def call(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def norm(residual: Tensor, w: Weight, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
            total, out = op(residual, delta, w, 1e-6, drop_first_of=K)
            assert total.shape == out.shape == (blocks * (K - 1), D)
            return total, out

        return norm

    inputs = {"residual": random(blocks * K, D, seed=0)} | (
        {"delta": random(blocks * K, D, seed=1)} if has_delta else {}
    )
    check(call(add_rms_norm), call(add_rms_norm_ref), inputs, {"w": random(D, seed=2)})


@pytest.mark.parametrize("op", [add_rms_norm, add_rms_norm_ref])
def test_norm_of_an_input_without_gradient(op: Callable[..., tuple[Tensor, Tensor]]) -> None:
    weight = weight_of(random(D, seed=2), torch.float32)
    _, out = op(random(37, D, seed=0), None, weight, 1e-6)
    out.sum().backward()
    assert not (weight.grad == 0.25).any()


def check_qkv_rope(rows: int, R: int, H: int, G: int, E: int, **options: int) -> None:
    """A projection of `rows` rows spread over R positions."""
    angles = random(50, E // 2, seed=5)
    positions = torch.randint(50, (R,), dtype=torch.int32, generator=torch.Generator().manual_seed(6))
    sizes = {"num_heads": H, "num_kv_heads": G, "head_dim": E}

    def call(op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def split(qkv: Tensor, q_norm: Weight, k_norm: Weight) -> tuple[Tensor, ...]:
            # The tables are fp32 in training: cos and sin of fp64 angles would be other numbers.
            tables = (angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype))
            q, k, v = op(qkv, q_norm, k_norm, *tables, positions, eps=1e-6, **sizes, **options)
            assert [t.shape for t in (q, k, v)] == [(R, H, E), (R, G, E), (R, G, E)]
            return (q, k, v) if H else (k, v)

        return split

    weights = {"q_norm": random(E, seed=2), "k_norm": random(E, seed=3)}
    check(call(qkv_rope), call(qkv_rope_ref), {"qkv": random(rows, (H + 2 * G) * E, seed=0)}, weights)


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize(("H", "G", "E"), [(5, 1, 16), (6, 3, 24), (0, 3, 16)])
def test_qkv_rope(R: int, H: int, G: int, E: int) -> None:
    check_qkv_rope(R, R, H, G, E)


@pytest.mark.parametrize("K", [2, 7])
@pytest.mark.parametrize("blocks", [1, 5])
def test_qkv_rope_of_slots_that_share_a_row(blocks: int, K: int) -> None:
    check_qkv_rope(blocks + 1, blocks * K, 6, 3, 24, shared_slots=K)


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("has_delta", [True, False])
def test_norm_linear(R: int, has_delta: bool) -> None:
    def call(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda residual, norm, w, delta=None: op(residual, delta, norm, 1e-6, w)

    inputs = {"residual": random(R, D, seed=0)} | ({"delta": random(R, D, seed=1)} if has_delta else {})
    check(call(norm_linear), call(norm_linear_ref), inputs, {"norm": random(D, seed=2), "w": random(71, D, seed=3)})


@pytest.mark.parametrize(("R", "drop"), [(1, 0), (37, 0), (35, 7)])
@pytest.mark.parametrize(("inter", "recompute"), [(333, False), (1100, True)])
def test_norm_mlp(R: int, drop: int, inter: int, recompute: bool) -> None:
    def call(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        options = {"drop_first_of": drop, "recompute": recompute}
        return lambda residual, delta, norm, gate_up, down: op(residual, delta, norm, 1e-6, gate_up, down, **options)

    weights = {"gate_up": random(2 * inter, D, seed=1) * 0.1, "down": random(D, inter, seed=2) * 0.1}
    inputs = {"residual": random(R, D, seed=0), "delta": random(R, D, seed=3)}
    check(call(norm_mlp), call(norm_mlp_ref), inputs, weights | {"norm": random(D, seed=4)})


@pytest.mark.parametrize("op", [norm_linear, norm_linear_ref])
def test_norm_linear_of_an_input_without_gradient(op: Callable[..., tuple[Tensor, Tensor]]) -> None:
    norm, weight = weight_of(random(D, seed=2), torch.float32), weight_of(random(71, D, seed=3), torch.float32)
    _, out = op(random(37, D, seed=0), None, norm, 1e-6, weight)
    out.sum().backward()
    assert not (norm.grad == 0.25).any()
    assert not (weight.grad == 0.25).any()


@pytest.mark.parametrize("op", [weigh_rows, weigh_rows_ref])
@pytest.mark.parametrize("has_scale", [True, False])
def test_weigh_rows(op: Callable[..., None], has_scale: bool) -> None:
    dh, scale, weight = random(37, D, seed=0), random(37, seed=1) if has_scale else None, random(37, seed=2).relu()
    factor = weight if scale is None else weight * scale
    expected = dh * factor[:, None]
    dh[weight == 0] = float("nan")
    op(dh, scale, weight)
    torch.testing.assert_close(dh, expected)


@pytest.mark.parametrize("op", [zero_padding, zero_padding_ref])
def test_zero_padding(op: Callable[[Tensor, Tensor], None]) -> None:
    x, lengths = random(3, 9, 5000, seed=0), torch.tensor([0, 4, 9], dtype=torch.int32)
    expected = x.clone()
    expected[0] = expected[1, 4:] = 0
    x[0], x[1, 4:] = float("nan"), float("inf")
    op(x, lengths)
    assert torch.equal(x, expected)


LARGEST_LOGIT = 10.0


def head_results(op: Callable[..., RowLoss], dtype: torch.dtype, R: int, T: int | None, V: int, ce: float) -> Results:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(V, (R,), generator=generator, dtype=torch.int32)
    head, h = random(V, 64, seed=1), random(R, 64, seed=0) * 0.3
    h[::2] += head[labels[::2].long()] * 0.5
    teacher = None
    if T is not None:
        row = torch.randint(T, (R,), generator=generator, dtype=torch.int32)
        teacher = Teacher(random(T, 64, seed=2).to(dtype) * 0.5, row)
    weights = {"ce_weight": torch.tensor(ce), "kl_weight": torch.tensor(0.3)}
    rows = op(h.to(dtype), head.to(dtype), labels, **weights, teacher=teacher, chunk_rows=10)
    assert rows.dh is not None
    assert (h @ head.t()).abs().max() > LARGEST_LOGIT
    dh = rows.dh if rows.dh_scale is None else rows.dh * rows.dh_scale[:, None]
    return {"ce": rows.ce, "kl": rows.kl, "correct": rows.correct.double(), "dh": dh}


# Beyond the vocabulary the kernel multiplies 0 and -inf, and does not use the product.
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
# A teacher of fewer rows than the draft, as many, and more: the two ways of gathering its logits.
@pytest.mark.parametrize("T", [None, 5, 37, 60])
@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize(("V", "ce"), [(1003, 1.0), (1003, 0.0), (9001, 0.7)])
def test_frozen_head(R: int, T: int | None, V: int, ce: float) -> None:
    found = head_results(frozen_head, torch.float32, R, T, V, ce)
    plain = head_results(frozen_head_ref, torch.float32, R, T, V, ce)
    exact = head_results(frozen_head_ref, torch.float64, R, T, V, ce)
    assert R == 1 or 0 < exact["correct"].sum() < R
    assert_within_budget(found, plain, exact, {"ce": LARGEST_LOGIT, "kl": LARGEST_LOGIT, "dh": 3.0})


@pytest.mark.parametrize("op", [frozen_head, frozen_head_ref])
def test_of_equal_logits_the_first_wins(op: Callable[..., RowLoss]) -> None:
    head = torch.zeros(9001, 4)
    head[[70, 71, 5000], 0] = 1.0
    h = torch.tensor([[2.0, 0, 0, 0]]).repeat(3, 1)
    weights = {"ce_weight": torch.tensor(1.0), "kl_weight": torch.tensor(0.0)}
    rows = op(h, head, torch.tensor([70, 71, 5000]), **weights)
    assert rows.correct.tolist() == [True, False, False]


@pytest.mark.parametrize("op", [frozen_head, frozen_head_ref])
def test_without_gradient_none_is_formed(op: Callable[..., RowLoss]) -> None:
    h, head, labels = random(37, 16, seed=0), random(1003, 16, seed=1), torch.arange(37)
    weights = {"ce_weight": torch.tensor(1.0), "kl_weight": torch.tensor(0.0)}
    without, with_gradient = (
        op(h, head, labels, **weights, gradient=gradient, chunk_rows=10) for gradient in (False, True)
    )
    assert without.dh is None
    assert torch.equal(without.ce, with_gradient.ce)


@pytest.mark.parametrize("largest", [1.0, 70.0, 1e4])
def test_a_first_block_that_is_no_guide(largest: float) -> None:
    """The kernel writes e^(z - reference) as it reads, and the reference comes from the first 4096 logits."""
    h, head, labels = torch.ones(4, 1), random(13_001, 1, seed=1), torch.tensor([3, 4096, 9000, 13_000])
    head[5000], head[9500] = largest, 1.9 * largest
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    head = torch.cat([head, random(13_001, 15, seed=2)], 1)
    h = torch.cat([h, torch.zeros(4, 15)], 1)
    found = frozen_head(h, head, labels, ce_weight=one, kl_weight=zero)
    exact = frozen_head_ref(h.double(), head.double(), labels, ce_weight=one, kl_weight=zero)
    assert found.dh is not None
    assert found.dh_scale is not None
    assert exact.dh is not None
    torch.testing.assert_close(found.ce, exact.ce.float())
    torch.testing.assert_close(found.dh * found.dh_scale[:, None], exact.dh.float(), rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
@pytest.mark.parametrize("op", [frozen_head, frozen_head_ref])
def test_logits_of_any_size_are_finite(op: Callable[..., RowLoss]) -> None:
    h, head, labels = random(37, 16, seed=0) * 1e4, random(1003, 16, seed=1), torch.arange(37)
    weights = {"ce_weight": torch.tensor(1.0), "kl_weight": torch.tensor(1.0)}
    teacher = Teacher(random(37, 16, seed=2) * 1e4, torch.arange(37, dtype=torch.int32))
    rows = op(h, head, labels, **weights, teacher=teacher)
    assert rows.dh is not None
    assert all(t.isfinite().all() for t in (rows.ce, rows.kl, rows.dh))
    assert (rows.kl >= -1e-3 * rows.kl.abs().max()).all()


SIZE, NUM_DECAYED = 5003, 1234


def arenas_of(dtype: torch.dtype, shared: bool) -> AdamWArenas:
    master = random(SIZE, seed=0).to(dtype)
    zeros = torch.zeros(SIZE, dtype=dtype)
    weight = master if shared else master.clone()
    return AdamWArenas(weight, zeros.clone(), master, zeros.clone(), zeros.clone(), NUM_DECAYED)


def scalars_of(step: int, ok: float, dtype: torch.dtype) -> Tensor:
    beta1, beta2 = 0.9, 0.95
    values = [1e-2, 0.1, beta1, beta2, 1e-8, 0.125 * ok, 1 - beta1**step, (1 - beta2**step) ** 0.5, ok]
    return torch.tensor(values, dtype=torch.float32).to(dtype)


def adamw_results(op: Callable[[AdamWArenas, Tensor], None], dtype: torch.dtype, shared: bool) -> Results:
    arenas = arenas_of(dtype, shared)
    for step in (1, 2, 3):
        arenas.grad.copy_(random(SIZE, seed=step) * 4)
        op(arenas, scalars_of(step, 1.0, dtype))
    return {
        field.name: getattr(arenas, field.name) for field in dataclasses.fields(arenas) if field.name != "num_decayed"
    }


@pytest.mark.parametrize("shared", [True, False])
def test_adamw(shared: bool) -> None:
    found = adamw_results(adamw, torch.float32, shared)
    assert torch.equal(found["weight"], found["master"])
    assert_within_budget(
        found, adamw_results(adamw_ref, torch.float32, shared), adamw_results(adamw_ref, torch.float64, shared)
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
@pytest.mark.parametrize("op", [adamw, adamw_ref])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_adamw_without_ok_changes_nothing(op: Callable[[AdamWArenas, Tensor], None], value: float) -> None:
    arenas = arenas_of(torch.float32, shared=False)
    arenas.grad.copy_(random(SIZE, seed=1))
    op(arenas, scalars_of(1, 1.0, torch.float32))
    before = {name: getattr(arenas, name).clone() for name in ("weight", "master", "exp_avg", "exp_avg_sq")}
    arenas.grad.fill_(value)
    op(arenas, scalars_of(2, 0.0, torch.float32))
    assert all(torch.equal(getattr(arenas, name), tensor) for name, tensor in before.items())
