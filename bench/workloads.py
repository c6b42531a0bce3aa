"""The named workloads W1, W2, W3 (a 0.6B-, an 8B- and a 27B-class target's drafter) and a tiny one, on random data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from buffers.anchors import sample_anchors
from buffers.arena import Arena, packed_size
from buffers.batching import batch_specs
from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.engine import FrozenTarget
from engine.settings_fields import SettingsError
from engine.work import step_flop

# A minute or more for one step of a named workload would help nobody.
MOST_FLOP_ON_CPU = 1e12
TINY = "tiny"


@dataclass(frozen=True)
class Workload:
    """One row of S context tokens with N anchors; 5 layers, 8 kv heads, head dim 128, 5 taps; anchors uniform, seed 0."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    S: int
    N: int
    K: int

    @property
    def bucket(self) -> Bucket:
        """The workload's shape."""
        return Bucket(B=1, S=self.S, N=self.N, K=self.K)

    def config(self) -> DrafterConfig:
        """The drafter of this workload."""
        return DrafterConfig(
            block_size=self.K,
            mask_token_id=self.vocab_size - 1,
            target_layer_ids=(1, 2, 3, 4, 5),
            num_target_layers=12,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=self.vocab_size,
            layer_types=("full_attention",) * 5,
        )

    def target_config(self) -> dict[str, Any]:
        """The target's config.json, as far as a dataset's drafter takes its sizes from it: those of config()."""
        return {
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 12,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "vocab_size": self.vocab_size,
        }

    def target(self, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
        """Random embedding and head with the scale of trained ones."""
        V, D = self.vocab_size, self.hidden_size
        generator = torch.Generator(device).manual_seed(1)
        embed, head = (
            torch.empty(V, D, device=device, dtype=dtype).normal_(0, 0.02, generator=generator) for _ in range(2)
        )
        return FrozenTarget(embed, head, torch.ones(D, device=device, dtype=dtype))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", 1024, 3072, 16, 151936, S=512, N=512, K=16),
        Workload("W2", 4096, 12288, 32, 151936, S=2048, N=512, K=16),
        Workload("W3", 5120, 17408, 32, 248320, S=4096, N=1024, K=32),
        Workload(TINY, 64, 128, 8, 512, S=128, N=32, K=4),
    )
}


def chosen_workloads(names: Sequence[str], device: torch.device, *, default: Sequence[str]) -> list[Workload]:
    """The workloads of these names; without names the default, and on the CPU the tiny one. Raises SettingsError for one
    whose steps the CPU would take minutes for."""
    names = names or (default if device.type == "cuda" else (TINY,))
    chosen = [WORKLOADS[name] for name in names]
    for workload in chosen:
        flop = step_flop(workload.config(), workload.bucket)
        if device.type == "cpu" and flop > MOST_FLOP_ON_CPU:
            raise SettingsError(
                f"--workload {workload.name}: expected a CUDA device for steps of {flop / 1e12:.0f} TFLOP, found the CPU; "
                f"--workload {TINY} runs here"
            )
    return chosen


class RandomInputs:
    """Static inputs for buckets without a dataset: one arena, shared as in training; fill() writes random rows."""

    def __init__(self, config: DrafterConfig, buckets: list[Bucket], device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        specs = {
            b: batch_specs(
                b, num_taps=config.num_taps, hidden_size=config.hidden_size, dtype=dtype, with_last_hidden=False
            )
            for b in buckets
        }
        self.arena = Arena("static inputs", max(packed_size(s) for s in specs.values()), device)
        self._views = {b: self.arena.views(s) for b, s in specs.items()}

    def __call__(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """The bucket's inputs, at fixed addresses."""
        return self._views[bucket]

    def fill(self, bucket: Bucket, seed: int = 0, length: int | Sequence[int] | None = None) -> None:
        """Rows of `length` tokens (default: full; a list: one a row, rows beyond it without content), every token supervised,
        anchors uniform without replacement."""
        lengths = [bucket.S if length is None else length] * bucket.B if not isinstance(length, Sequence) else length
        views = self._views[bucket]
        device = views["input_ids"].device
        generator = torch.Generator(device).manual_seed(seed)
        for tensor in views.values():
            tensor.zero_()
        for b, tokens in enumerate(lengths):
            views["target_hidden"][b, :tokens].normal_(0, 1, generator=generator)
            views["input_ids"][b, :tokens].random_(0, self._config.vocab_size - 1, generator=generator)
            views["position_ids"][b, :tokens] = torch.arange(tokens, device=device, dtype=torch.int32)
            views["loss_mask"][b, :tokens] = 1
            views["row_lengths"][b] = tokens
            eligible = torch.arange(tokens - 1).numpy()
            anchors, keep = sample_anchors(eligible, bucket.N, seed=seed, epoch=0, sample_id=b)
            views["anchor_positions"][b] = torch.from_numpy(anchors).to(device)
            views["block_keep_mask"][b] = torch.from_numpy(keep).to(device)
            views["context_end"][b] = torch.where(views["block_keep_mask"][b] > 0, tokens, 0)
