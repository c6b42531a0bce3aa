"""Greedy speculative decoding with a DFlash drafter, batch of one.

Each round drafts a block in one pass, lets the target check it in one pass, keeps the longest matching prefix and the
target's own next token, and rolls the target's cache back to what was kept. The text is the target's greedy text. As
z-lab does at inference, the drafter's context grows by the keys and values of newly accepted tokens; none is computed
twice.
"""

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.drafter_config import DrafterConfig
from engine.rope import apply_rope, rope_attention_scaling, rope_cos_sin, rope_inv_freq
from engine.target import Target

# Two best logits closer than this may change places with the rounding of another batch shape.
NEAR_TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter ready to draft: z-lab's tensors by name, and the target's frozen embedding and head [V, D]."""

    config: DrafterConfig
    weights: Mapping[str, Tensor]
    embed_tokens: Tensor
    lm_head: Tensor


def drafter_for(config: DrafterConfig, weights: Mapping[str, Tensor], target: Target) -> Drafter:
    """The drafter on the target's device and in its dtype. Raises ValueError when the two do not belong together."""
    sizes = (config.hidden_size, config.vocab_size, config.num_target_layers)
    found = (target.config.hidden_size, target.config.vocab_size, target.config.num_hidden_layers)
    if sizes != found:
        raise ValueError(
            f"drafter: expected a target of hidden size, vocabulary and layers {sizes}, found {found}. "
            "Decode with the target that the drafter was trained for."
        )
    placed = {name: tensor.detach().to(target.device, target.dtype) for name, tensor in weights.items()}
    return Drafter(config, placed, target.model.embed_tokens.weight, target.head_weight)


class DraftCache:
    """Keys and values of the accepted context in every drafter layer, allocated once: [layers, G, capacity, E].

    `length` positions are valid. Only accepted tokens enter, so nothing is ever rolled back.
    """

    def __init__(self, drafter: Drafter, capacity: int) -> None:
        config, like = drafter.config, drafter.embed_tokens
        shape = (config.num_hidden_layers, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.values = torch.empty_like(self.keys)
        self.inv_freq = rope_inv_freq(config.rope, config.head_dim, like.device)
        self.capacity = capacity
        self.length = 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in fp32, rounded to x's dtype before the weight as in Hugging Face."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def append_context(drafter: Drafter, cache: DraftCache, taps_TL: Tensor) -> None:
    """Append the keys and values of T newly accepted tokens; `taps_TL` [T, L*D] are the target's hidden states at them.

    Raises ValueError when the cache is full.
    """
    config, start, stop = drafter.config, cache.length, cache.length + taps_TL.shape[0]
    if stop > cache.capacity:
        raise ValueError(
            f"draft cache: expected at most {cache.capacity} positions, found {stop}. Make a larger DraftCache."
        )
    weights = drafter.weights
    context_TD = rms_norm(F.linear(taps_TL, weights["fc.weight"]), weights["hidden_norm.weight"], config.rms_norm_eps)
    cos, sin = _angles(drafter, cache, start, taps_TL.shape[0])
    for i in range(config.num_hidden_layers):
        cache.keys[i, :, start:stop], cache.values[i, :, start:stop] = _keys_values(drafter, i, context_TD, cos, sin)
    cache.length = stop


def block_mask(config: DrafterConfig, layer: int, context: int, device: torch.device) -> Tensor | None:
    """Which of `context` (C) + K keys each of the K slots of a block at position `context` sees, bool[K, C + K].

    None where every slot sees everything. A window bounds the context only; causality is a matter of the block only.
    """
    window, causal = config.layer_window(layer), config.layer_causal(layer)
    if window is None and not causal:
        return None
    slots = torch.arange(config.block_size, device=device)
    first = torch.full_like(slots, 0) if window is None else context + slots - (window - 1)
    sees_context = torch.arange(context, device=device)[None, :] >= first[:, None]
    within = slots[None, :] <= slots[:, None]
    return torch.cat((sees_context, within if causal else torch.ones_like(within)), dim=1)


def draft_block(
    drafter: Drafter, cache: DraftCache, taps_TL: Tensor, anchor: int, position: int
) -> tuple[Tensor, Tensor]:
    """Append the accepted `taps_TL` [T, L*D], then draft the block whose slot 0 is token `anchor` at `position`.

    Returns the hidden states after the final norm [K, D] and the drafted token ids int64[K-1]. Raises ValueError when
    the context does not end right before the anchor.
    """
    config, weights = drafter.config, drafter.weights
    append_context(drafter, cache, taps_TL)
    if position != cache.length:
        raise ValueError(
            f"draft block: expected the anchor right after {cache.length} context tokens, found position {position}. "
            "Pass the hidden states of every accepted token once."
        )
    ids = torch.full((config.block_size,), config.mask_token_id, device=drafter.embed_tokens.device)
    ids[0] = anchor
    x_KD = F.embedding(ids, drafter.embed_tokens)
    cos, sin = _angles(drafter, cache, position, config.block_size)
    for i in range(config.num_hidden_layers):
        x_KD = _draft_layer(drafter, cache, i, x_KD, cos, sin)
    hidden_KD = rms_norm(x_KD, weights["norm.weight"], config.rms_norm_eps)
    # Slot 0 is the anchor, a token that is known; it drafts nothing.
    return hidden_KD, F.linear(hidden_KD[1:], drafter.lm_head).argmax(-1)


def _draft_layer(drafter: Drafter, cache: DraftCache, i: int, x_KD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    config, weights, name = drafter.config, drafter.weights, f"layers.{i}."
    eps = config.rms_norm_eps
    normed_KD = rms_norm(x_KD, weights[name + "input_layernorm.weight"], eps)
    q_KHE = F.linear(normed_KD, weights[name + "self_attn.q_proj.weight"]).unflatten(-1, (-1, config.head_dim))
    q_KHE = apply_rope(rms_norm(q_KHE, weights[name + "self_attn.q_norm.weight"], eps), cos, sin)
    k_GKE, v_GKE = _keys_values(drafter, i, normed_KD, cos, sin)
    k_GSE = torch.cat((cache.keys[i, :, : cache.length], k_GKE), dim=1)
    v_GSE = torch.cat((cache.values[i, :, : cache.length], v_GKE), dim=1)
    mask = block_mask(config, i, cache.length, x_KD.device)
    out_HKE = F.scaled_dot_product_attention(
        q_KHE.transpose(0, 1)[None], k_GSE[None], v_GSE[None], attn_mask=mask, enable_gqa=True
    )[0]
    x_KD = x_KD + F.linear(out_HKE.transpose(0, 1).flatten(1), weights[name + "self_attn.o_proj.weight"])
    normed_KD = rms_norm(x_KD, weights[name + "post_attention_layernorm.weight"], eps)
    gate, up, down = (weights[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return x_KD + F.linear(F.silu(F.linear(normed_KD, gate)) * F.linear(normed_KD, up), down)


def _keys_values(drafter: Drafter, i: int, x_TD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [G, T, E] of layer `i`: the same projections serve the context and the block."""
    name, E = f"layers.{i}.self_attn.", drafter.config.head_dim
    k_TGE = F.linear(x_TD, drafter.weights[name + "k_proj.weight"]).unflatten(-1, (-1, E))
    k_TGE = rms_norm(k_TGE, drafter.weights[name + "k_norm.weight"], drafter.config.rms_norm_eps)
    v_TGE = F.linear(x_TD, drafter.weights[name + "v_proj.weight"]).unflatten(-1, (-1, E))
    return apply_rope(k_TGE, cos, sin).transpose(0, 1), v_TGE.transpose(0, 1)


def _angles(drafter: Drafter, cache: DraftCache, start: int, count: int) -> tuple[Tensor, Tensor]:
    """cos and sin [count, 1, E] of `count` positions from `start`; the middle axis spreads over heads."""
    positions = torch.arange(start, start + count, device=cache.inv_freq.device)
    cos, sin = rope_cos_sin(positions, cache.inv_freq, rope_attention_scaling(drafter.config.rope))
    return cos[:, None], sin[:, None]


@dataclasses.dataclass(frozen=True)
class Decoded:
    """New tokens, what each verification accepted (bonus token counted), and the places of near ties.

    `near_ties` are indices into `tokens` where the target's two best logits differ by less than NEAR_TIE: from there on
    another order of summation may choose another text. The last entry of `accept_lengths` counts tokens that
    `max_new_tokens` cut off, so that the mean does not depend on where the text ends.
    """

    tokens: tuple[int, ...]
    accept_lengths: tuple[int, ...]
    near_ties: tuple[int, ...]


@torch.inference_mode()
def speculative_generate(target: Target, drafter: Drafter, prompt: Tensor, max_new_tokens: int) -> Decoded:
    """Continue int `prompt` [T] greedily by draft and verification; ends after the target config's `eos_token_id`."""
    K, taps = drafter.config.block_size, drafter.config.target_layer_ids
    capacity = prompt.numel() + max_new_tokens + K
    target_cache, draft_cache = target.new_cache(capacity), DraftCache(drafter, capacity)
    feed = prompt.to(target.device).long()
    output = target(feed[None], cache=target_cache, tap_layer_ids=taps)
    tokens, ties = _choose(output.logits[0, -1:])
    accepted_taps = output.taps[0]
    accept_lengths: list[int] = []
    while len(tokens) < max_new_tokens and target.config.eos_token_id not in tokens:
        position = target_cache.length
        _, drafts = draft_block(drafter, draft_cache, accepted_taps, tokens[-1], position)
        block = torch.cat((drafts.new_tensor([tokens[-1]]), drafts))
        output = target(block[None], cache=target_cache, tap_layer_ids=taps)
        wanted, block_ties = _choose(output.logits[0])
        matches = _matching_prefix(drafts.tolist(), wanted)
        # The cache keeps the anchor and the drafts that matched; the bonus token is the next anchor.
        target_cache.rollback(position + 1 + matches)
        accepted_taps = output.taps[0, : 1 + matches]
        ties += [len(tokens) + i for i in block_ties if i <= matches]
        tokens += wanted[: 1 + matches]
        accept_lengths.append(1 + matches)
    end = max_new_tokens
    if target.config.eos_token_id in tokens:
        end = min(end, tokens.index(target.config.eos_token_id) + 1)
    return Decoded(tuple(tokens[:end]), tuple(accept_lengths), tuple(i for i in ties if i < end))


def _choose(logits_SV: Tensor) -> tuple[list[int], list[int]]:
    """The greedy token of each row of logits, and the rows whose two best are nearly equal."""
    best = logits_SV.float().topk(2, dim=-1)
    near = (best.values[:, 0] - best.values[:, 1] < NEAR_TIE).tolist()
    # argmax, not topk's first: of equal logits plain greedy decoding takes argmax's.
    return logits_SV.argmax(-1).tolist(), [i for i, tie in enumerate(near) if tie]


def _matching_prefix(drafts: list[int], wanted: list[int]) -> int:
    """How many drafts, from the first on, are what the target wanted in their place."""
    count = 0
    while count < len(drafts) and drafts[count] == wanted[count]:
        count += 1
    return count
