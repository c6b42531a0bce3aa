"""precision = "fp8": what its definition keeps of the numbers, where it is refused, and that it touches nothing else."""

import pytest
import torch
from torch import Tensor

from bench.fp8_kernels import bytes_off, product_off, rows_off, swiglu_ref, timed
from buffers.shapes import Bucket
from engine.assemble import resolve_precision
from engine.drafter_config import DrafterConfig
from engine.engine import Engine
from engine.kernels import select_ops
from engine.ops.fp8_rows import Fp8Rows
from engine.ops.fp8_rows_ref import quantise_rows_ref, turned_ref
from engine.ops.linear_fp8_ref import linear_fp8_ref
from engine.ops.linear_ref import linear_ref
from engine.ops.norm_mlp_fp8_ref import mlp_fp8_ref
from engine.ops.norm_mlp_ref import mlp_ref
from engine.ops.weight import Weight
from engine.precision import check_fp8_sizes, compute_dtype
from engine.settings import ObjectiveSettings, load_settings
from engine.settings_fields import SettingsError
from tests.drafter_helpers import CPU, random_target, small_config

pytestmark = pytest.mark.usefixtures("one_thread")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(R: int, C: int, seed: int) -> Tensor:
    """Rows whose sizes differ by factors of thousands."""
    return random(R, C, seed=seed) * torch.exp(3 * random(R, 1, seed=seed + 1))


def test_a_row_keeps_its_relative_precision_whatever_its_size() -> None:
    x = uneven(200, 64, seed=0)
    values, scale = quantise_rows_ref(x)
    assert (torch.frexp(scale).mantissa == 0.5).all(), "powers of two"
    assert ((values.float().abs().amax(1) >= 128) & (values.float().abs().amax(1) <= 256)).all()
    found = values.float() * scale
    # Half of the last of three bits, and below the smallest normal number an absolute error.
    assert ((found - x).abs() <= x.abs() / 16 + 2.0**-10 * scale).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = random(3, 32, seed=0)
    x[1, 5] = bad
    y = linear_fp8_ref(x, Weight(random(16, 32, seed=1), torch.zeros(16, 32)))
    assert y[[0, 2]].isfinite().all()
    assert not y[1].isfinite().any()


def test_a_transpose_has_one_scale_and_is_padded_with_zeros() -> None:
    x = random(37, 20, seed=0) * 2.0 ** -torch.arange(37.0)[:, None]
    values, scale = turned_ref(*quantise_rows_ref(x))
    assert values.shape == (20, 48) and values.is_contiguous() and scale.dim() == 0
    assert not values[:, 37:].float().any()
    found = values[:, :37].float().t() * scale
    assert ((found - x).abs() <= x.abs() / 16 + 2.0**-9 * scale).all()


def results(op: object, x: Tensor, values: list[Tensor], dy: Tensor) -> list[Tensor]:
    assert callable(op)
    x = x.clone().requires_grad_()
    weights = [Weight(value.clone().requires_grad_(), torch.zeros_like(value)) for value in values]
    y = op(x, *weights)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(weight.grad for weight in weights)]


def test_a_linear_map_errs_by_a_few_per_cent_in_every_row() -> None:
    x, dy, w = uneven(300, 128, seed=0), uneven(300, 64, seed=2), random(64, 128, seed=4)
    found, expected = (results(op, x, [w], dy) for op in (linear_fp8_ref, linear_ref))
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert ((a - b).norm(dim=1) <= 0.06 * b.norm(dim=1)).all()
    assert (found[2] - expected[2]).norm() <= 0.05 * expected[2].norm()


def test_an_mlp_errs_by_a_few_per_cent() -> None:
    x, dy = random(300, 64, seed=0), uneven(300, 64, seed=2) * 1e-6
    values = [random(192, 64, seed=4) * 0.2, random(64, 96, seed=5) * 0.2]
    for a, b in zip(results(mlp_fp8_ref, x, values, dy), results(mlp_ref, x, values, dy), strict=True):
        assert (a - b).norm() <= 0.09 * b.norm()


def test_a_batch_without_gradient_adds_nothing() -> None:
    x, w = random(20, 32, seed=0), random(16, 32, seed=1)
    x[3] = 0.0
    _, dx, dw = results(linear_fp8_ref, x, [w], torch.zeros(20, 16))
    assert not dx.any() and not dw.any()


def test_fp8_is_off_by_default_and_computes_beside_bf16() -> None:
    assert load_settings().run.precision == "auto"
    assert load_settings(None, ["run.precision=fp8"]).run.precision == "fp8"
    assert [compute_dtype(p) for p in ("fp8", "bf16", "fp32")] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_the_cpu_is_refused() -> None:
    message = r'run.precision = "fp8" needs a GPU of compute capability 8.9 or newer .* found the CPU; set .* "auto"'
    with pytest.raises(SettingsError, match=message):
        resolve_precision("fp8", CPU)
    with pytest.raises(ValueError, match=message):
        select_ops(CPU, "auto", "fp8")


def test_an_older_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(SettingsError, match=r"found NVIDIA A100 with 8\.0; set"):
        resolve_precision("fp8", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert resolve_precision("fp8", torch.device("cuda", 0)) == "fp8"


def test_sizes_that_do_not_divide_are_refused_by_name() -> None:
    check_fp8_sizes(small_config())
    with pytest.raises(ValueError, match=r"multiples of 16, found hidden_size 60, intermediate_size 100; set"):
        check_fp8_sizes(small_config(hidden_size=60, intermediate_size=100))
    heads: DrafterConfig = small_config(num_attention_heads=3, num_key_value_heads=3, head_dim=8)
    with pytest.raises(ValueError, match=r"num_attention_heads \* head_dim 24, .*head_dim 72"):
        check_fp8_sizes(heads)


def test_an_engine_refuses_sizes_before_it_looks_for_a_device() -> None:
    config = small_config(intermediate_size=100)
    with pytest.raises(ValueError, match="intermediate_size 100"):
        Engine(
            config,
            random_target(config),
            [Bucket(1, 128, 32, 4)],
            lambda bucket: {},
            device=CPU,
            objective=ObjectiveSettings(),
            optimizer=None,
            precision="fp8",
        )


def test_no_speed_is_shown_for_what_is_not_the_definitions(capsys: pytest.CaptureFixture[str]) -> None:
    def never() -> None:
        raise AssertionError("it was run to be timed")

    line = timed("turn x", never, off=lambda: 0.02, most=6e-3)
    assert line == {"name": "turn x", "error": "off by 2.0e-02, at most 6.0e-03 was allowed; no speed is shown"}
    assert "turn x" in capsys.readouterr().out
    assert "off by nan" in timed("turn x", never, off=lambda: float("nan"), most=1.0)["error"]


def test_how_far_quantised_rows_and_products_are_off() -> None:
    x, other = uneven(40, 64, seed=0), random(24, 64, seed=2)
    rows = Fp8Rows(*quantise_rows_ref(x))
    assert rows_off(rows, x) == 0.0 and rows_off(Fp8Rows(rows.values, rows.scale * 2), x) == pytest.approx(1.0)
    assert bytes_off((rows.values, rows.scale), quantise_rows_ref(x)) == 0.0
    changed = rows.values.float()
    changed[0, :32] += 64
    assert bytes_off((changed, rows.scale), quantise_rows_ref(x)) == pytest.approx(32 / (40 * 64))
    assert product_off(x @ other.t(), x, other) < 1e-6
    assert product_off(2.02 * (x @ other.t()), x, other, 2.0) == pytest.approx(0.01, rel=1e-3)


def test_the_definition_of_swiglu_that_the_kernels_are_held_to() -> None:
    hidden, dact = random(5, 32, seed=0), random(5, 16, seed=1)
    act, dhidden = swiglu_ref(hidden, dact)
    gate, up = hidden.chunk(2, dim=1)
    torch.testing.assert_close(act, gate * torch.sigmoid(gate) * up)
    torch.testing.assert_close(dhidden[:, 16:], dact * gate * torch.sigmoid(gate))
