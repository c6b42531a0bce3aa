"""The golden cases captured and replayed on the GPU, in fp32."""

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from buffers.shapes import Bucket
from engine.engine import Engine
from engine.settings import ObjectiveSettings
from tests.golden_cases import CASES, load_case
from tests.gpu.engine_helpers import CUDA


@pytest.fixture(autouse=True)
def fp32_matmuls_in_full() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("attention", ["reference", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_a_replay_equals_the_golden_case(name: str, attention: str) -> None:
    golden = load_case(name)
    B, S = golden.batch["input_ids"].shape
    N = golden.batch["anchor_positions"].shape[1]
    bucket = Bucket(B, S, N, golden.config.block_size, tile=8)
    static = {key: torch.empty_like(tensor, device=CUDA) for key, tensor in golden.batch.items()}
    engine = Engine(
        golden.config,
        golden.target,
        [bucket],
        lambda bucket: static,
        device=CUDA,
        objective=ObjectiveSettings(
            weighting="dpace" if golden.case["loss_type"] == "dpace" else "decay", gamma=golden.case["gamma"] or 1.0
        ),
        optimizer=None,
        attention=attention,
        chunk_rows=7,
    )
    engine.params.load_(golden.weights)
    engine.build()
    for key, tensor in golden.batch.items():
        static[key].copy_(tensor)
    engine.micro_step(bucket)

    metrics = engine.metrics.snapshot().read()
    means = metrics.means()
    assert abs(means["loss"] / golden.case["loss"] - 1) <= 1e-6
    assert abs(means["accuracy"] - golden.case["accuracy"]) <= 1e-6
    if "metric.accept_len" in golden.outputs:
        assert abs(means["tokens_per_verification"] - golden.outputs["metric.accept_len"].item()) <= 1e-6
    for parameter, gradient in engine.gradients().items():
        reference = golden.outputs[f"grad.{parameter}"]
        error = (gradient.cpu() / metrics.sums["weight"] - reference).abs().max().item()
        assert error <= 2e-5 * reference.abs().max().item(), f"{parameter} differs by {error}"
    engine.close()
