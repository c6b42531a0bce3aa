"""A small drafter, its frozen target, and batches for it: random, reproducible, and without a dataset on disk."""

import gc
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from buffers.arena import Arena, packed_size
from buffers.dataset import Sample
from buffers.filling import batch_specs, clear_row, fill_row
from buffers.shapes import Bucket
from engine.drafter_config import FULL, SLIDING, DrafterConfig
from engine.engine import FrozenTarget
from engine.kernels import Ops, reference_ops
from engine.metrics import Metrics
from engine.model import Drafter, Recompute
from engine.objective import Objective, TargetHead
from engine.params import ParamArena, initial_parameters
from engine.step import StepParts, forward_backward

CPU = torch.device("cpu")


def small_config(**changes: Any) -> DrafterConfig:
    """Two layers, one of them sliding (and so causal inside a block); K = 4, GQA with two heads a group."""
    settings: dict[str, Any] = {
        "block_size": 4,
        "mask_token_id": 511,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "layer_types": (FULL, SLIDING),
        "sliding_window": 12,
    }
    return DrafterConfig(**{**settings, **changes})


def random_target(config: DrafterConfig, dtype: torch.dtype = torch.float32) -> FrozenTarget:
    """Embedding, head and norm of a target whose logits are of the order of one."""
    generator = torch.Generator().manual_seed(1)
    V, D = config.vocab_size, config.hidden_size
    embed, head = (torch.randn(V, D, generator=generator) * scale for scale in (0.5, D**-0.5))
    norm = torch.rand(D, generator=generator) + 0.5
    return FrozenTarget(embed.to(dtype), head.to(dtype), norm.to(dtype), last_hidden_norm="pre")


def random_sample(config: DrafterConfig, length: int, seed: int, loss_mask: Tensor | None = None) -> Sample:
    """Every token supervised unless loss_mask uint8 [length] says otherwise; hidden states in fp32."""
    generator = torch.Generator().manual_seed(seed)
    D = config.hidden_size
    return Sample(
        seed,
        torch.randint(config.mask_token_id, (length,), generator=generator, dtype=torch.int32),
        torch.ones(length, dtype=torch.uint8) if loss_mask is None else loss_mask,
        torch.randn(length, config.num_taps * D, generator=generator),
        torch.randn(length, D, generator=generator),
    )


def make_batch(config: DrafterConfig, bucket: Bucket, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The bucket's inputs with these samples; the rest of the rows hold nothing."""
    specs = batch_specs(
        bucket, num_taps=config.num_taps, hidden_size=config.hidden_size, dtype=torch.float32, with_last_hidden=True
    )
    views = Arena("batch", packed_size(specs), "cpu", poison=True).views(specs)
    for b, sample in enumerate(samples):
        fill_row(views, b, [sample], bucket=bucket, seed=0, epoch=0)
    for b in range(len(samples), bucket.B):
        clear_row(views, b)
    return views


def cloned(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs in memory of their own."""
    return {name: tensor.clone() for name, tensor in batch.items()}


def set_anchors(batch: Mapping[str, Tensor], anchors: Sequence[Sequence[int]]) -> None:
    """These anchors in the given order, in place of the sampled ones; what is left of the slots is unused."""
    for name in ("anchor_positions", "block_keep_mask", "context_start", "context_end"):
        batch[name].zero_()
    for b, row in enumerate(anchors):
        used = slice(0, len(row))
        batch["anchor_positions"][b, used] = torch.tensor(row, dtype=torch.int32)
        batch["block_keep_mask"][b, used] = 1
        batch["context_end"][b, used] = batch["row_lengths"][b]


def objective(weighting: str = "decay", *, ce: float = 1.0, kl: float = 0.0, gamma: float = 4.0) -> Objective:
    """Weights and gamma as tensors, as a step reads them."""
    ce_weight, kl_weight, gamma_ = (torch.tensor(value) for value in (ce, kl, gamma))
    return Objective(weighting, kl > 0, 0.5, ce_weight=ce_weight, kl_weight=kl_weight, gamma=gamma_)


@dataclass(frozen=True)
class Step:
    """A drafter with all that its step needs."""

    config: DrafterConfig
    params: ParamArena
    parts: StepParts
    denominator: Tensor

    def zero_(self) -> None:
        """Forgets gradients, weight and metrics."""
        for tensor in (self.params.grad, self.denominator):
            tensor.zero_()
        self.parts.metrics.zero_()

    def outcome(self, *batches: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss sum, weight, metrics and gradient sums of a step over these micro-batches, whose inputs stay as they are."""
        self.zero_()
        losses = [forward_backward(self.parts, cloned(batch), self.denominator).loss for batch in batches]
        metrics = {"metrics": self.parts.metrics.sums, "slots": self.parts.metrics.slots}
        sums = {"loss": torch.stack(losses).sum(), "denominator": self.denominator} | metrics
        return {name: tensor.clone() for name, tensor in (sums | dict(self.params.named(self.params.grad))).items()}


def make_step(
    config: DrafterConfig,
    target: FrozenTarget,
    loss: Objective | None = None,
    *,
    max_positions: int = 256,
    ops: Ops | None = None,
    chunk_rows: int = 64,
    recompute: Recompute = "none",
) -> Step:
    """A drafter in fp32 with random weights; its loss is CE with decay unless given."""
    params = ParamArena(config, CPU, dtype=torch.float32, grad_dtype=torch.float32)
    params.load_(random_weights(config))
    return step_with(
        config,
        params,
        target,
        loss or objective(),
        max_positions=max_positions,
        ops=ops,
        chunk_rows=chunk_rows,
        recompute=recompute,
    )


def random_weights(config: DrafterConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights that tell apart what new ones leave equal: norm weights of 0.5 to 1.5."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(value.shape, generator=generator) + 0.5 if value.dim() == 1 else value
        for name, value in initial_parameters(config, seed, std=0.05).items()
    }


def step_with(
    config: DrafterConfig,
    params: ParamArena,
    target: FrozenTarget,
    loss: Objective,
    *,
    max_positions: int,
    ops: Ops | None = None,
    chunk_rows: int = 64,
    recompute: Recompute = "none",
) -> Step:
    """A step around parameters that exist."""
    ops = ops or reference_ops()
    drafter = Drafter(config, params, target.embed_tokens, ops, max_positions=max_positions, recompute=recompute)
    head = TargetHead(target.lm_head, None if target.last_hidden_norm == "post" else target.norm, target.norm_eps)
    parts = StepParts(drafter, head, loss, ops, Metrics(config.block_size, CPU), chunk_rows)
    return Step(config, params, parts, torch.zeros((), dtype=torch.float64))


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Every tensor is bit for bit the expected one."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Every tensor is within `tolerance` of the expected one, relative to its largest element."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name] - tensor).abs().max().item()
        assert error <= tolerance * tensor.abs().max().item(), f"{name} differs by {error}"


def assert_nothing_stays(step: Step, batch: Mapping[str, Tensor]) -> None:
    """After forward and backward no more tensors are alive than after the time before: a captured step's memory would never be
    given back."""

    def alive() -> int:
        forward_backward(step.parts, cloned(batch), step.denominator, first=True)
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some objects of torch warn when they are asked what they are
            return sum(isinstance(found, Tensor) for found in gc.get_objects())

    alive()
    assert alive() == alive()
