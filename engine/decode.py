"""Speculative decoding with a DFlash drafter, batch of one.

Each round drafts a block in one pass, lets the target check it in one pass, keeps the drafts that stand
(engine/acceptance.py) and the target's own next token, and rolls the target's cache back to what was kept. The text is
the target's: its greedy text, or a text from its distribution. As z-lab does at inference, the drafter's context grows by
the keys and values of newly accepted tokens; none is computed twice.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.acceptance import Sampler, choose, logit_rounding, matching_prefix
from engine.drafter_config import DrafterConfig
from engine.rope import apply_rope, rope_attention_scaling, rope_cos_sin, rope_inv_freq


class Cache(Protocol):
    """A target's keys and values: `length` positions, and the way back to fewer."""

    @property
    def length(self) -> int: ...

    def rollback(self, length: int) -> None: ...


class Step(Protocol):
    """What a target says to S tokens: `logits` [1, S, V] and `taps` [1, S, L*D], the residual stream after chosen layers."""

    @property
    def logits(self) -> Tensor: ...

    @property
    def taps(self) -> Tensor: ...


C = TypeVar("C", bound=Cache)


class DecodingTarget(Protocol[C]):
    """What decoding needs of a target: engine.target.Target has it, and engine.hf_decoding.HFDecodingTarget for all others.

    `sizes` are hidden size, vocabulary and number of layers; `embedding` and `head_weight` [V, D] also serve the drafter.
    """

    @property
    def sizes(self) -> tuple[int, int, int]: ...

    @property
    def embedding(self) -> Tensor: ...

    @property
    def head_weight(self) -> Tensor: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def new_cache(self, capacity: int) -> C: ...

    def extend(self, tokens_S: Tensor, cache: C, tap_layer_ids: Sequence[int] = (), *, last_only: bool = False) -> Step:
        """The tokens int64[S] behind what the cache holds. last_only: logits of the last token alone, [1, 1, V]."""
        ...


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter ready to draft: z-lab's tensors by name, and the target's frozen embedding and head [V, D]."""

    config: DrafterConfig
    weights: Mapping[str, Tensor]
    embed_tokens: Tensor
    lm_head: Tensor


def drafter_for(config: DrafterConfig, weights: Mapping[str, Tensor], target: DecodingTarget[Any]) -> Drafter:
    """The drafter on the target's device and in its dtype. Raises ValueError when the two do not belong together."""
    sizes = (config.hidden_size, config.vocab_size, config.num_target_layers)
    if sizes != target.sizes:
        raise ValueError(
            f"drafter: expected a target of hidden size, vocabulary and layers {sizes}, found {target.sizes}. "
            "Decode with the target that the drafter was trained for."
        )
    like = target.embedding
    placed = {name: tensor.detach().to(like.device, like.dtype) for name, tensor in weights.items()}
    return Drafter(config, placed, like, target.head_weight)


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

    Returns the hidden states after the final norm [K, D] and the logits [K-1, V] of the slots behind the anchor, which is
    known. Raises ValueError when the context does not end right before the anchor.
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
    return hidden_KD, F.linear(hidden_KD[1:], drafter.lm_head)


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
    """New tokens, what each verification accepted (the target's own token counted), and the places of near ties.

    `near_ties` are indices into `tokens` where the target's two best logits are equal but for rounding: from there on
    another order of summation may choose another text. The last entry of `accept_lengths` counts tokens that
    `max_new_tokens` cut off, so that the mean does not depend on where the text is cut; what follows an end of text is
    not counted. `decode_s`: seconds from the first new token to the last one, without the prompt's.
    """

    tokens: tuple[int, ...]
    accept_lengths: tuple[int, ...]
    near_ties: tuple[int, ...]
    decode_s: float = dataclasses.field(default=0.0, compare=False)


@torch.inference_mode()
def speculative_generate(
    target: DecodingTarget[C], drafter: Drafter, prompt: Tensor, max_new_tokens: int, sampler: Sampler | None = None
) -> Decoded:
    """Continue int `prompt` [T] by draft and verification, greedily without a sampler; ends after an end-of-text token."""
    K, taps = drafter.config.block_size, drafter.config.target_layer_ids
    # The last verification may run past the end by a block.
    capacity = prompt.numel() + max_new_tokens + K
    target_cache, draft_cache = target.new_cache(capacity), DraftCache(drafter, capacity)
    output = target.extend(prompt.to(drafter.embed_tokens.device).long(), target_cache, taps, last_only=True)
    rounding = _rounding(target)
    tokens, ties = _next_token(output.logits[0], rounding, sampler)
    accepted_taps = output.taps[0]
    accept_lengths: list[int] = []
    began_s = time.perf_counter()
    end = _end_of_text(tokens, 0, target)
    while len(tokens) < max_new_tokens and end is None:
        position = target_cache.length
        _, draft_logits = draft_block(drafter, draft_cache, accepted_taps, tokens[-1], position)
        q = None if sampler is None else sampler.probabilities(draft_logits)
        drafts = draft_logits.argmax(-1) if sampler is None or q is None else sampler.draw(q)
        output = target.extend(torch.cat((drafts.new_tensor([tokens[-1]]), drafts)), target_cache, taps)
        if sampler is None or q is None:
            wanted, block_ties = choose(output.logits[0], rounding)
            kept = wanted[: 1 + matching_prefix(drafts.tolist(), wanted)]
        else:
            kept, block_ties = sampler.accept(drafts, q, sampler.probabilities(output.logits[0])), []
        # The cache keeps the anchor and the drafts that stand; the target's own token is the next anchor.
        target_cache.rollback(position + len(kept))
        accepted_taps = output.taps[0, : len(kept)]
        ties += [len(tokens) + i for i in block_ties if i < len(kept)]
        tokens += kept
        end = _end_of_text(tokens, len(tokens) - len(kept), target)
        accept_lengths.append(len(kept) - (0 if end is None else len(tokens) - end))
    return _decoded(tokens, accept_lengths, ties, min(max_new_tokens, end or max_new_tokens), began_s)


@torch.inference_mode()
def plain_generate(
    target: DecodingTarget[C], prompt: Tensor, max_new_tokens: int, sampler: Sampler | None = None
) -> Decoded:
    """The target's own continuation of int `prompt` [T], one token a forward pass; `accept_lengths` is empty."""
    cache, rounding = target.new_cache(prompt.numel() + max_new_tokens), _rounding(target)
    feed = prompt.to(target.embedding.device).long()
    tokens: list[int] = []
    ties: list[int] = []
    began_s = time.perf_counter()
    while len(tokens) < max_new_tokens and _end_of_text(tokens, len(tokens) - 1, target) is None:
        found, tie = _next_token(target.extend(feed, cache, last_only=True).logits[0], rounding, sampler)
        ties += [len(tokens)] if tie else []
        tokens += found
        feed = feed.new_tensor(found)
        if len(tokens) == 1:
            began_s = time.perf_counter()
    return _decoded(tokens, (), ties, len(tokens), began_s)


def _rounding(target: DecodingTarget[Any]) -> float:
    return logit_rounding(target.embedding.dtype, target.sizes[2])


def _next_token(logits_1V: Tensor, rounding: float, sampler: Sampler | None) -> tuple[list[int], list[int]]:
    """One token and, for a near tie, its row."""
    if sampler is None:
        return choose(logits_1V, rounding)
    return sampler.draw(sampler.probabilities(logits_1V)).tolist(), []


def _end_of_text(tokens: Sequence[int], start: int, target: DecodingTarget[Any]) -> int | None:
    """Where the text ends by an end-of-text token at `start` or later: the index behind it."""
    ends = target.eos_token_ids
    return next((i + 1 for i in range(max(start, 0), len(tokens)) if tokens[i] in ends), None)


def _decoded(
    tokens: Sequence[int], accept_lengths: Sequence[int], ties: Sequence[int], end: int, began_s: float
) -> Decoded:
    # Every round has read its tokens from the device: nothing is under way when the clock is read.
    seconds = time.perf_counter() - began_s
    return Decoded(tuple(tokens[:end]), tuple(accept_lengths), tuple(i for i in ties if i < end), seconds)
