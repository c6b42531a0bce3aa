"""A training model over one row, with the names through which SpecForge's is used. Not SpecForge's code."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# A test sets it to 1: the mask then lets a block see its anchor's own hidden state.
SEEN_TOO_MANY = 0


class OnlineDFlashModel(nn.Module):
    def __init__(
        self,
        draft_model: nn.Module,
        target_lm_head: nn.Module,
        target_embed_tokens: nn.Module,
        mask_token_id: int,
        block_size: int,
        attention_backend: str,
        num_anchors: int,
        loss_decay_gamma: float | None = None,
    ) -> None:
        super().__init__()
        assert attention_backend == "sdpa"
        self.draft_model, self.lm_head, self.embed_tokens = draft_model, target_lm_head, target_embed_tokens
        self.mask_token_id, self.K, self.N, self.gamma = mask_token_id, block_size, num_anchors, loss_decay_gamma

    def _sample_anchor_positions(self, seq_len: int, loss_mask: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        width = min(self.N, seq_len - 1)
        return torch.arange(width, device=device)[None], torch.ones(1, width, dtype=torch.bool, device=device)

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, None, dict[str, Any]]:
        S, K, device = input_ids.shape[1], self.K, input_ids.device
        anchors, _ = self._sample_anchor_positions(S, loss_mask, device)
        at = (anchors[0, :, None] + torch.arange(K, device=device)).flatten()
        slot = torch.arange(K, device=device).repeat(anchors.shape[1])
        block = torch.arange(len(at), device=device) // K
        draft = torch.where(slot == 0, input_ids[0, at.clamp(max=S - 1)], self.mask_token_id)
        everywhere = torch.arange(S, device=device)
        mask = torch.cat([everywhere < anchors[0][block][:, None] + SEEN_TOO_MANY, block == block[:, None]], 1)
        positions = torch.cat([everywhere, at])
        logits = self.lm_head(self.draft_model(self.embed_tokens(draft), hidden_states[0], positions, mask))
        inside = at.clamp(max=S - 1)
        weight = (slot > 0) * (at < S) * loss_mask[0, inside].float()
        if self.gamma is not None:
            weight = weight * torch.exp(-(slot - 1).clamp(min=0) / self.gamma)
        numerator = (F.cross_entropy(logits.float(), input_ids[0, inside], reduction="none") * weight).sum()
        return numerator / weight.sum(), None, {"loss_terms": (numerator, weight.sum())}
