"""The golden cases as a training step reads them: weights, a batch, and what an independent implementation made of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.drafter_config import DrafterConfig
from engine.engine import FrozenTarget
from engine.kernels import Ops
from engine.params import ParamArena
from engine.step import forward_backward
from tests.drafter_helpers import CPU, Step, objective, step_with

GOLDEN = Path(__file__).parent / "golden"
CASES = ("dflash-full", "dflash-dpace", "dflash-sliding", "dflash-packed")


@dataclass(frozen=True)
class GoldenCase:
    """config.json, case.json and the tensors of one folder; `batch` has the names of buffers.filling.batch_specs."""

    config: DrafterConfig
    case: dict[str, Any]
    weights: dict[str, Tensor]
    target: FrozenTarget
    batch: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def step(self, ops: Ops) -> Step:
        """The case's drafter and objective. The chunks of the head are uneven on purpose."""
        params = ParamArena(self.config, CPU, dtype=torch.float32, grad_dtype=torch.float32)
        params.load_(self.weights)
        weighting = "dpace" if self.case["loss_type"] == "dpace" else "decay"
        ends_at = self.batch["input_ids"].shape[1] + self.config.block_size
        loss = objective(weighting, gamma=self.case["gamma"] or 1.0)
        return step_with(self.config, params, self.target, loss, max_positions=ends_at, ops=ops, chunk_rows=7)


def load_case(name: str) -> GoldenCase:
    """Read tests/golden/<name>."""
    folder = GOLDEN / name
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    config = DrafterConfig.from_json(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    weights, target, inputs, outputs = (
        load_file(folder / f"{part}.safetensors") for part in ("weights", "target", "inputs", "outputs")
    )
    frozen = FrozenTarget(target["embed_tokens.weight"], target["lm_head.weight"], torch.ones(config.hidden_size))
    return GoldenCase(config, case, weights, frozen, _batch(case, inputs), outputs)


def _batch(case: dict[str, Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    B, S = inputs["input_ids"].shape
    anchors = inputs["anchor_positions"].int()
    if "document_ids" in inputs:
        # One packed row: a block's context begins and its labels end with the document that its anchor lies in.
        documents = inputs["document_ids"][0]
        in_document = documents[None, None] == documents[anchors.long()][..., None]
        start, end = in_document.int().argmax(-1), S - in_document.flip(-1).int().argmax(-1)
        positions, lengths = inputs["position_ids"], (documents >= 0).sum()[None]
    else:
        lengths = torch.tensor(case["lengths"])
        start, end = torch.zeros_like(anchors), lengths[:, None].expand_as(anchors)
        positions = torch.arange(S).expand(B, S)
    return {
        "target_hidden": inputs["hidden_states"],
        "input_ids": inputs["input_ids"].int(),
        "position_ids": positions.int(),
        "loss_mask": inputs["loss_mask"],
        "row_lengths": lengths.int(),
        "anchor_positions": anchors,
        "block_keep_mask": inputs["block_keep_mask"],
        "context_start": start.int(),
        "context_end": end.int(),
    }


def check_case(name: str, ops: Ops) -> None:
    """Asserts hidden states of slots 1..K-1 to 1e-5, loss to 1e-6 relative, accuracy, and every gradient to 1e-5 of its
    largest element."""
    golden = load_case(name)
    step = golden.step(ops)
    with torch.no_grad():
        hidden_BNKD = step.parts.drafter(golden.batch)
    kept = golden.batch["block_keep_mask"] > 0
    B, N, slots, D = hidden_BNKD.shape
    expected = golden.outputs["draft_hidden"].view(B, N, slots + 1, D)[:, :, 1:]
    assert kept.any()
    torch.testing.assert_close(hidden_BNKD[kept], expected[kept], rtol=0, atol=1e-5)

    sums = forward_backward(step.parts, golden.batch, step.denominator)
    loss = (sums.loss / step.denominator).item()
    assert abs(loss / golden.case["loss"] - 1) <= 1e-6, f"loss {loss}, expected {golden.case['loss']}"
    accuracy = (sums.slots[0].sum() / sums.slots[1].sum()).item()
    assert abs(accuracy - golden.case["accuracy"]) <= 1e-6
    if "metric.accept_len" in golden.outputs:
        accept_len = golden.outputs["metric.accept_len"].item()  # theirs counts the bonus token
        assert abs(((sums.totals[4] / sums.totals[5]).item() + 1) - accept_len) <= 1e-6
    assert {f"grad.{name}" for name in step.params.shapes} <= golden.outputs.keys()
    for parameter, gradient in step.params.named(step.params.grad):
        reference = golden.outputs[f"grad.{parameter}"]
        error = (gradient / step.denominator - reference).abs().max().item()
        assert error <= 1e-5 * reference.abs().max().item(), f"{parameter} differs by {error}"
