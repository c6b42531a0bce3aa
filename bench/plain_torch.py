"""The drafter's step as plain PyTorch would have it, compiled as a whole: a rival, not a reference.

No operation of the engine's and none of its short cuts: every slot goes through every layer and the weight gradients are
autograd's. `collect_gradients` brings them to the engine's arena for the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import ATTENTIONS, Attend
from engine.mask import DraftMask
from engine.model import Drafter
from engine.ops.qkv_rope_ref import rotate
from engine.ops.rms_norm_ref import normalise
from engine.ops.supervision_ref import supervision_ref
from engine.ops.weight import Weight
from engine.step import StepParts


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, in fp32 inside."""
    return (normalise(x, eps) * weight).to(x.dtype)


def heads_with_rope(x_RF: Tensor, norm: Tensor, cos_RE: Tensor, sin_RE: Tensor, head_dim: int, eps: float) -> Tensor:
    """[R, heads * E] -> [R, heads, E], normed per head and rotated."""
    heads = x_RF.unflatten(-1, (-1, head_dim))
    return rotate(normalise(heads, eps) * norm, cos_RE, sin_RE).to(x_RF.dtype)


def gated_mlp(x_RD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [R, D], gate_up [2 inter, D], down [D, inter] -> [R, D]."""
    gate, up = F.linear(x_RD, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def row_losses(h_RD: Tensor, head_VD: Tensor, labels_R: Tensor) -> Tensor:
    """Cross entropy of each row, fp32 [R]."""
    logits = F.linear(h_RD, head_VD)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels_R, reduction="none")


def cross_entropy(
    h_RD: Tensor, head_VD: Tensor, labels_R: Tensor, *, chunk_rows: int, losses: Callable[..., Tensor] = row_losses
) -> tuple[Tensor, Tensor]:
    """(ce fp32 [R], the gradient of its sum [R, D]) by autograd, a chunk of rows at a time. losses: row_losses or compiled."""
    ces, dhs = [], []
    for h, labels in zip(h_RD.split(chunk_rows), labels_R.split(chunk_rows), strict=True):
        h = h.detach().requires_grad_()
        ce = losses(h, head_VD, labels)
        dhs.append(torch.autograd.grad(ce.sum(), h)[0])
        ces.append(ce.detach())
    return torch.cat(ces), torch.cat(dhs)


def forward(drafter: Drafter, batch: Mapping[str, Tensor], attention: str) -> Tensor:
    """The hidden states of slots 1..K-1 [B, N, K - 1, D], from an engine's weights and a batch's static inputs."""
    config, eps = drafter.config, drafter.config.rms_norm_eps
    hidden_BSF = batch["target_hidden"]
    B, S, _ = hidden_BSF.shape
    N, K, E = batch["anchor_positions"].shape[1], config.block_size, config.head_dim
    HE, GE = config.num_attention_heads * E, config.num_key_value_heads * E
    mask = DraftMask(batch["anchor_positions"], batch["block_keep_mask"], batch["context_start"], K)

    padding_BS = torch.arange(S, device=hidden_BSF.device) >= batch["row_lengths"][:, None]
    context = F.linear(hidden_BSF.masked_fill(padding_BS[..., None], 0).flatten(0, 1), drafter.fc.value)
    context = rms_norm(context, drafter.hidden_norm.value, eps)
    anchors_BN, kept_BN = mask.anchor_positions.long(), mask.block_keep_mask > 0
    slot = torch.arange(K, device=hidden_BSF.device)
    known_BNK = kept_BN[..., None] & (slot == 0)
    ids = torch.where(known_BNK, batch["input_ids"].gather(1, anchors_BN)[..., None], config.mask_token_id)
    stream = F.embedding(ids.flatten(), drafter.embedding)
    draft_at = torch.where(kept_BN, batch["position_ids"].gather(1, anchors_BN), 0)[..., None] + slot
    context_at = torch.where(padding_BS, 0, batch["position_ids"])
    tables = [(drafter.cos_PE[at.flatten()], drafter.sin_PE[at.flatten()]) for at in (draft_at, context_at)]

    def rows(x: Tensor) -> Tensor:
        return x.unflatten(0, (B, -1))

    for i, layer in enumerate(drafter.layers):
        weights = {name: weight.value for name, weight in layer.items()}
        q_norm, k_norm = weights["self_attn.q_norm"], weights["self_attn.k_norm"]
        x = rms_norm(stream, weights["input_layernorm"], eps)
        q, k, v = F.linear(x, weights["qkv"]).split([HE, GE, GE], dim=-1)
        k_context, v_context = F.linear(context, weights["kv"]).split([GE, GE], dim=-1)
        attend: Attend = ATTENTIONS[attention](mask, S, window=config.layer_window(i), causal=config.layer_causal(i))
        o = attend(
            rows(heads_with_rope(q, q_norm, *tables[0], E, eps)),
            rows(heads_with_rope(k_context, k_norm, *tables[1], E, eps)),
            rows(v_context.unflatten(-1, (-1, E))),
            rows(heads_with_rope(k, k_norm, *tables[0], E, eps)),
            rows(v.unflatten(-1, (-1, E))),
        )
        stream = stream + F.linear(o.flatten(0, 1).flatten(1), weights["self_attn.o_proj"])
        x = rms_norm(stream, weights["post_attention_layernorm"], eps)
        stream = stream + gated_mlp(x, weights["gate_up"], weights["mlp.down_proj"])
    return rms_norm(stream, drafter.norm.value, eps).unflatten(0, (B, N, K))[:, :, 1:]


class CompiledStep:
    """Forward and backward of one batch over an engine's weights and head, compiled at the first call. Cross entropy with
    decaying or uniform weights only."""

    def __init__(
        self, parts: StepParts, batch: Mapping[str, Tensor], *, attention: str, backend: str = "inductor"
    ) -> None:
        """batch: the static inputs; attention: a key of ATTENTIONS that can be compiled; backend: torch.compile's."""
        if parts.objective.uses_kl or parts.objective.weighting == "dpace":
            raise ValueError(
                "expected cross entropy with decaying or uniform weights for the compiled step, found soft labels or D-PACE; "
                "leave the compiled step out with --no-compiled"
            )
        self._parts, self._batch = parts, batch
        # Sizes are static: one compilation a bucket, as fast as it gets.
        options: dict[str, Any] = {"dynamic": False, "backend": backend}
        self._forward: Callable[..., Tensor] = torch.compile(forward, **options)
        self._losses: Callable[..., Tensor] = torch.compile(row_losses, **options)
        self._attention = attention

    def __call__(self) -> None:
        """One step, from no gradients to autograd's own."""
        self.forget()
        parts = self._parts
        hidden_BNKD = self._forward(parts.drafter, self._batch, self._attention)
        s = supervision_ref(
            self._batch["input_ids"],
            self._batch["loss_mask"],
            self._batch["anchor_positions"],
            self._batch["block_keep_mask"],
            self._batch["context_end"],
            parts.objective.gamma if parts.objective.weighting == "decay" else None,
            block_size=parts.drafter.config.block_size,
        )
        rows = hidden_BNKD.detach().flatten(0, 2)
        _, dh = cross_entropy(
            rows, parts.head.weight, s.labels.flatten(), chunk_rows=parts.chunk_rows, losses=self._losses
        )
        hidden_BNKD.backward(dh.view_as(hidden_BNKD) * (s.decayed * parts.objective.ce_weight)[..., None].to(dh.dtype))

    def collect_gradients(self) -> None:
        """Adds autograd's gradients to the arena, where the engine's own lie, and forgets them."""
        for weight in self._weights():
            if weight.value.grad is not None:
                weight.grad.add_(weight.value.grad)
        self.forget()

    def forget(self) -> None:
        """Frees autograd's gradients."""
        for weight in self._weights():
            weight.value.grad = None

    def _weights(self) -> Iterator[Weight]:
        drafter = self._parts.drafter
        yield from (drafter.fc, drafter.hidden_norm, drafter.norm)
        for layer in drafter.layers:
            yield from layer.values()
