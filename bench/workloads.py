"""The named workloads W1, W2, W3 (a 0.6B-, an 8B- and a 27B-class target's drafter) and a tiny one, on random data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from buffers.arena import Arena, packed_size
from buffers.batching import Document
from buffers.dataset import Sample
from buffers.filling import batch_specs, fill_row
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

    def fill(
        self,
        bucket: Bucket,
        seed: int = 0,
        length: int | None = None,
        rows: Sequence[Sequence[Document]] = (),
        supervised: float = 1.0,
    ) -> None:
        """Random rows of `length` tokens (default: full), or of these documents and the rest without content. The last part
        `supervised` of each document has labels; anchors are uniform without replacement."""
        rows = rows or [[Document(b, 0, length or bucket.S)] for b in range(bucket.B)]
        views = self._views[bucket]
        generator = torch.Generator().manual_seed(seed)
        # All but the hidden states is made on the host, as a loader makes it; those are drawn where they are needed.
        indices = [name for name in views if name != "target_hidden"]
        on_host = {name: torch.zeros(views[name].shape, dtype=views[name].dtype) for name in indices}
        on_host["target_hidden"] = torch.zeros(bucket.B, bucket.S, 0)
        for b, row in enumerate(rows):
            samples = [self._sample(d, supervised, generator) for d in row]
            fill_row(on_host, b, samples, bucket=bucket, seed=seed, epoch=0, max_blocks=[d.max_blocks for d in row])
        for name in indices:
            views[name].copy_(on_host[name])
        hidden = views["target_hidden"].zero_()
        on_device = torch.Generator(hidden.device).manual_seed(seed)
        for b, tokens in enumerate(on_host["row_lengths"].tolist()):
            hidden[b, :tokens].normal_(0, 1, generator=on_device)

    def _sample(self, document: Document, supervised: float, generator: torch.Generator) -> Sample:
        length = document.stop - document.start
        ids = torch.randint(self._config.vocab_size - 1, (length,), generator=generator, dtype=torch.int32)
        loss_mask = (torch.arange(length) >= length - math.ceil(supervised * length)).to(torch.uint8)
        return Sample(document.sample_id, ids, loss_mask, torch.zeros(length, 0), None)
