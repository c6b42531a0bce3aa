"""Every fused operation on the GPU against its definition in fp64, in fp32 and bf16: at most twice plain torch's error in
the same precision, and a rounding. The sizes fill no block of any kernel; memory that nobody wrote to holds NaN."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

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
from engine.ops.weight import GradientSums, Weight, add_outer
from engine.ops.zero_padding import zero_padding
from engine.ops.zero_padding_ref import zero_padding_ref
from tests.attention_helpers import relative_error
from tests.gpu.engine_helpers import CUDA

# Where the first matmul of a thread finds no context, torch says so and makes one.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")

Results = dict[str, Tensor]
ROWS = [1, 301]
D = 328
# Of the weights and of the gradient arena.
DTYPES = [
    pytest.param(torch.float32, torch.float32, id="fp32"),
    pytest.param(torch.bfloat16, torch.bfloat16, id="bf16"),
    pytest.param(torch.bfloat16, torch.float32, id="bf16-fp32-arena"),
]
every_dtype = pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))


def fill_free_memory_with_nan() -> None:
    """What torch.empty hands out next was written here, from small blocks and from large ones."""
    blocks = [torch.full((size,), float("nan"), device=CUDA) for size in (1 << 28, *[1 << 16] * 64)]
    del blocks


def assert_within_budget(
    found: Results, plain: Results, exact: Results, dtype: torch.dtype, terms: Mapping[str, float] | None = None
) -> None:
    """terms: magnitude of the numbers whose difference a result is, where that is more than the result's own."""
    assert found.keys() == exact.keys()
    roundings = 4 if dtype == torch.float32 else 1
    for name, expected in exact.items():
        assert found[name].shape == expected.shape, name
        assert found[name].isfinite().all(), name
        error, allowed = ((x.double() - expected).abs().max().item() for x in (found[name], plain[name]))
        magnitude = max(expected.abs().max().item(), (terms or {}).get(name, 0.0))
        rounding = roundings * torch.finfo(dtype).eps * magnitude
        assert error <= 2 * allowed + rounding, f"{name}: error {error}, plain torch's {allowed}"


def run(
    op: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    rounded: torch.dtype,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> Results:
    """Outputs and gradients of op(**inputs, **weights), computed in dtype from values that are numbers of `rounded`."""
    leaves = {name: x.to(rounded).to(dtype, copy=True).requires_grad_() for name, x in inputs.items()}
    # The gradient arena holds something already: an earlier micro-batch's sum.
    holders = {
        name: Weight(w.to(rounded).to(dtype, copy=True).requires_grad_(), torch.full_like(w, 0.25, dtype=grad_dtype))
        for name, w in weights.items()
    }
    fill_free_memory_with_nan()
    # An operation may take its input's memory over for the backward pass: it gets what a matmul left.
    outputs = op(**{name: leaf * 1.0 for name, leaf in leaves.items()}, **holders)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {f"output {i}": y.detach().clone() for i, y in enumerate(outputs)}
    gradients = [random(*y.shape, seed=90 + i).to(rounded).to(dtype) for i, y in enumerate(outputs)]
    fill_free_memory_with_nan()
    torch.autograd.backward(outputs, gradients)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        results[f"d{name}"] = leaf.grad
    for name, weight in holders.items():
        assert weight.value.grad is None, "the gradient goes to the arena only"
        results[f"d{name}"] = weight.grad
    return results


def check(
    op: Callable[..., Any],
    definition: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> None:
    found = run(op, inputs, weights, dtype, dtype, grad_dtype)
    plain = run(definition, inputs, weights, dtype, dtype, grad_dtype)
    exact = run(definition, inputs, weights, dtype, torch.float64, torch.float64)
    assert_within_budget(found, plain, exact, dtype)


@every_dtype
@pytest.mark.parametrize("R", ROWS)
def test_linear(R: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    def call(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w: op(x, w)

    inputs, weights = {"x": random(R, D, seed=0)}, {"w": random(71, D, seed=1)}
    check(call(linear), call(linear_ref), inputs, weights, dtype, grad_dtype)


@pytest.mark.parametrize("R", ROWS)
def test_weight_gradients_of_bf16_are_summed_in_fp32_where_the_arena_is(R: int) -> None:
    grad, exact = torch.full((71, D), 0.25, device=CUDA), torch.zeros(71, D, device=CUDA, dtype=torch.float64)
    sums = GradientSums()
    sums.begin(first=True)
    for seed in (0, 1):
        dy, x = random(R, 71, seed=seed).bfloat16(), random(R, D, seed=10 + seed).bfloat16()
        add_outer(Weight(torch.empty_like(grad), grad, sums), dy, x)
        exact += dy.double().t() @ x.double()
    assert relative_error(grad, exact) < 1e-6


@every_dtype
@pytest.mark.parametrize("R", [7, 301])
@pytest.mark.parametrize(("width", "has_delta", "drop"), [(D, True, 0), (D, False, 0), (D, True, 7), (5120, True, 0)])
def test_add_rms_norm(
    R: int, width: int, has_delta: bool, drop: int, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    def call(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda residual, w, delta=None: op(residual, delta, w, 1e-6, drop_first_of=drop)

    inputs = {"residual": random(R, width, seed=0)} | ({"delta": random(R, width, seed=1)} if has_delta else {})
    check(call(add_rms_norm), call(add_rms_norm_ref), inputs, {"w": random(width, seed=2)}, dtype, grad_dtype)


@every_dtype
@pytest.mark.parametrize("blocks", [1, 43])
@pytest.mark.parametrize(
    ("H", "G", "E", "shared_slots"), [(32, 8, 128, 0), (5, 1, 64, 0), (6, 3, 24, 7), (16, 8, 128, 7), (0, 8, 128, 0)]
)
def test_qkv_rope(
    blocks: int, H: int, G: int, E: int, shared_slots: int, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    R = blocks * 7
    angles = random(50, E // 2, seed=5)
    positions = torch.randint(50, (R,), dtype=torch.int32, device=CUDA)

    def call(op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def qkv(qkv: Tensor, q_norm: Weight, k_norm: Weight) -> tuple[Tensor, ...]:
            # The tables are fp32 in training: cos and sin of fp64 angles would be other numbers.
            wide = torch.promote_types(qkv.dtype, torch.float32)
            tables = (angles.cos().to(wide), angles.sin().to(wide))
            sizes: dict[str, Any] = {"num_heads": H, "num_kv_heads": G, "head_dim": E, "shared_slots": shared_slots}
            q, k, v = op(qkv, q_norm, k_norm, *tables, positions, eps=1e-6, **sizes)
            assert [t.shape for t in (q, k, v)] == [(R, H, E), (R, G, E), (R, G, E)]
            return (q, k, v) if H else (k, v)

        return qkv

    rows = blocks + 1 if shared_slots else R
    inputs = {"qkv": random(rows, (H + 2 * G) * E, seed=0)}
    weights = {"q_norm": random(E, seed=2), "k_norm": random(E, seed=3)}
    check(call(qkv_rope), call(qkv_rope_ref), inputs, weights, dtype, grad_dtype)


@every_dtype
@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("has_delta", [True, False])
def test_norm_linear(R: int, has_delta: bool, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    def call(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda residual, norm, w, delta=None: op(residual, delta, norm, 1e-6, w)

    inputs = {"residual": random(R, D, seed=0)} | ({"delta": random(R, D, seed=1)} if has_delta else {})
    weights = {"norm": random(D, seed=2), "w": random(71, D, seed=3)}
    check(call(norm_linear), call(norm_linear_ref), inputs, weights, dtype, grad_dtype)


@every_dtype
@pytest.mark.parametrize("R", [7, 301])
@pytest.mark.parametrize(("inter", "drop", "recompute"), [(334, 0, False), (1100, 7, False), (334, 7, True)])
def test_norm_mlp(R: int, inter: int, drop: int, recompute: bool, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    def call(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        options = {"drop_first_of": drop, "recompute": recompute}
        return lambda residual, delta, norm, gate_up, down: op(residual, delta, norm, 1e-6, gate_up, down, **options)

    inputs = {"residual": random(R, D, seed=0), "delta": random(R, D, seed=1)}
    weights = {
        "norm": random(D, seed=2),
        "gate_up": random(2 * inter, D, seed=3) * 0.1,
        "down": random(D, inter, seed=4) * 0.1,
    }
    check(call(norm_mlp), call(norm_mlp_ref), inputs, weights, dtype, grad_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("has_scale", [True, False])
def test_weigh_rows(has_scale: bool, dtype: torch.dtype) -> None:
    dh, scale = random(37, D, seed=0).to(dtype), random(37, seed=1) if has_scale else None
    weight = random(37, seed=2).relu()
    dh[weight == 0] = float("nan")
    found, expected = dh.clone(), dh.clone()
    weigh_rows(found, scale, weight)
    weigh_rows_ref(expected, scale, weight)
    torch.testing.assert_close(found, expected)
    assert not found[weight == 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_zero_padding(dtype: torch.dtype) -> None:
    x, lengths = random(3, 40, 5000, seed=0).to(dtype), torch.tensor([0, 17, 40], dtype=torch.int32, device=CUDA)
    x[0], x[1, 17:] = float("nan"), float("inf")
    expected = x.clone()
    zero_padding(x, lengths)
    zero_padding_ref(expected, lengths)
    assert torch.equal(x, expected)
    assert x.isfinite().all()


def scalar(value: float) -> Tensor:
    return torch.tensor(value, device=CUDA)


def head_results(
    op: Callable[..., RowLoss], rounded: torch.dtype, dtype: torch.dtype, R: int, T: int | None, V: int
) -> Results:
    generator = torch.Generator(CUDA).manual_seed(7)
    labels = torch.randint(V, (R,), generator=generator, device=CUDA)
    head, h = random(V, 256, seed=1) * 0.1, random(R, 256, seed=0)
    h[::2] += head[labels[::2]] * 5
    teacher = None
    if T is not None:
        row = torch.randint(T, (R,), generator=generator, dtype=torch.int32, device=CUDA)
        teacher = Teacher(random(T, 256, seed=2).to(rounded).to(dtype), row)
    h, head = (x.to(rounded).to(dtype) for x in (h, head))
    fill_free_memory_with_nan()
    rows = op(h, head, labels, ce_weight=scalar(0.7), kl_weight=scalar(0.3), teacher=teacher, chunk_rows=128)
    assert rows.dh is not None
    dh = rows.dh if rows.dh_scale is None else rows.dh * rows.dh_scale[:, None]
    return {"ce": rows.ce, "kl": rows.kl, "correct": rows.correct.double(), "dh": dh}


# A teacher of fewer rows than the draft, and of more: the two ways of gathering its logits.
@pytest.mark.parametrize("T", [None, 100, 500])
@pytest.mark.parametrize(("R", "V"), [(301, 151_936), (1, 1003)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_frozen_head(R: int, T: int | None, V: int, dtype: torch.dtype) -> None:
    found = head_results(frozen_head, dtype, dtype, R, T, V)
    plain = head_results(frozen_head_ref, dtype, dtype, R, T, V)
    exact = head_results(frozen_head_ref, dtype, torch.float64, R, T, V)
    assert R == 1 or R / 3 < exact["correct"].sum() < 2 * R / 3
    assert_within_budget(found, plain, exact, dtype, {"ce": 10.0, "kl": 10.0, "dh": 1.0})


def test_of_equal_logits_the_first_wins() -> None:
    head = torch.zeros(9001, 4, device=CUDA)
    head[[70, 71, 5000], 0] = 1.0
    h = torch.tensor([[2.0, 0, 0, 0]], device=CUDA).repeat(3, 1)
    labels = torch.tensor([70, 71, 5000], device=CUDA)
    rows = frozen_head(h, head, labels, ce_weight=scalar(1.0), kl_weight=scalar(0.0))
    assert rows.correct.tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("soft", [True, False])
def test_logits_of_any_size_are_finite(soft: bool, dtype: torch.dtype) -> None:
    h, head = random(37, 16, seed=0).to(dtype) * 1e4, random(20_003, 16, seed=1).to(dtype)
    labels = torch.arange(37, device=CUDA)
    teacher = Teacher(random(37, 16, seed=2).to(dtype) * 1e4, labels.int())
    ce_weight, kl_weight = scalar(1.0), scalar(1.0)
    rows = frozen_head(h, head, labels, ce_weight=ce_weight, kl_weight=kl_weight, teacher=teacher if soft else None)
    exact = frozen_head_ref(h.float(), head.float(), labels, ce_weight=ce_weight, kl_weight=kl_weight)
    assert rows.dh is not None
    assert exact.dh is not None
    assert all(t.isfinite().all() for t in (rows.ce, rows.kl, rows.dh))
    if not soft:
        assert rows.dh_scale is not None
        # Where one logit is all, softmax is a column or two of the head; the largest lies beyond the first block for most.
        assert relative_error(rows.dh * rows.dh_scale[:, None], exact.dh) < (1e-4 if dtype == torch.float32 else 2e-2)


SIZE, NUM_DECAYED = 50_003, 12_345


def arenas_of(dtype: torch.dtype, grad_dtype: torch.dtype) -> AdamWArenas:
    """In fp32 the drafter computes with the masters themselves."""
    master = random(SIZE, seed=0)
    weight = master if dtype == torch.float32 else master.to(dtype)
    grad, *moments = (torch.zeros(SIZE, dtype=kind, device=CUDA) for kind in (grad_dtype, torch.float32, torch.float32))
    return AdamWArenas(weight, grad, master, moments[0], moments[1], NUM_DECAYED)


def scalars_of(step: int, ok: float) -> Tensor:
    beta1, beta2 = 0.9, 0.95
    values = [1e-2, 0.1, beta1, beta2, 1e-8, 0.125 * ok, 1 - beta1**step, (1 - beta2**step) ** 0.5, ok]
    return torch.tensor(values, device=CUDA)


@every_dtype
def test_adamw_is_close_to_the_bits_of_its_definition(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    found, expected = arenas_of(dtype, grad_dtype), arenas_of(dtype, grad_dtype)
    for step in (1, 2, 3):
        for arenas, op in ((found, adamw), (expected, adamw_ref)):
            arenas.grad.copy_(random(SIZE, seed=step) * 4)
            op(arenas, scalars_of(step, 1.0))
    for name in ("master", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=2e-7)
    assert torch.equal(found.weight, found.master.to(dtype))


@every_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_adamw_without_ok_changes_nothing(value: float, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    arenas = arenas_of(dtype, grad_dtype)
    arenas.grad.copy_(random(SIZE, seed=1))
    adamw(arenas, scalars_of(1, 1.0))
    kept = [field.name for field in dataclasses.fields(arenas) if field.name not in ("grad", "num_decayed")]
    before = {name: getattr(arenas, name).clone() for name in kept}
    arenas.grad.fill_(value)
    adamw(arenas, scalars_of(2, 0.0))
    assert all(torch.equal(getattr(arenas, name), tensor) for name, tensor in before.items())
