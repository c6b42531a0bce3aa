"""The named workloads W1, W2, W3 (a 0.6B-, an 8B- and a 27B-class target's drafter) on random data, and their arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from buffers.anchors import sample_anchors
from buffers.arena import Arena, packed_size
from buffers.batching import batch_specs
from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.engine import FrozenTarget


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
    )
}


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

    def fill(self, bucket: Bucket, seed: int = 0, length: int | None = None) -> None:
        """Rows of `length` tokens (default: full), every token supervised, anchors uniform without replacement."""
        length = bucket.S if length is None else length
        views = self._views[bucket]
        device = views["input_ids"].device
        generator = torch.Generator(device).manual_seed(seed)
        for tensor in views.values():
            tensor.zero_()
        views["target_hidden"][:, :length].normal_(0, 1, generator=generator)
        views["input_ids"][:, :length].random_(0, self._config.vocab_size - 1, generator=generator)
        views["position_ids"][:, :length] = torch.arange(length, device=device, dtype=torch.int32)
        views["loss_mask"][:, :length] = 1
        views["row_lengths"].fill_(length)
        eligible = torch.arange(length - 1).numpy()
        for b in range(bucket.B):
            anchors, keep = sample_anchors(eligible, bucket.N, seed=seed, epoch=0, sample_id=b)
            views["anchor_positions"][b] = torch.from_numpy(anchors).to(device)
            views["block_keep_mask"][b] = torch.from_numpy(keep).to(device)
        views["context_end"].copy_(torch.where(views["block_keep_mask"] > 0, length, 0))
