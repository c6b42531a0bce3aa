"""A causal language model of transformers as the target of speculative decoding.

The residual stream is read by hooks on the decoder layers, the key/value cache is cropped after a rejection. What cannot
be cropped - the recurrent state of Mamba and of linear attention above all - is refused by name before any weight is
read; such targets can be trained for, but not decoded with here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.hf_target import HfTarget, import_transformers, load_hf_target

_CROPPABLE = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class HFStep:
    """`logits` [1, S, V] or of the last token alone [1, 1, V]; `taps` [1, S, L*D]: residual stream after each tapped layer."""

    logits: Tensor
    taps: Tensor


class HFCache:
    """transformers' DynamicCache with every position kept.

    Sliding layers keep all of theirs too, and the mask alone bounds what they see: a cache that drops what has left the window
    could not get it back when drafts are rejected.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @property
    def length(self) -> int:
        """Positions held."""
        return int(self.cache.get_seq_length())

    def rollback(self, length: int) -> None:
        """Forget every position from `length` on. Raises ValueError for a length that the cache does not hold."""
        held = self.length
        if not 0 <= length <= held:
            raise ValueError(f"cache rollback: expected a length in 0..{held}, found {length}. Roll back, not forward.")
        if length < held:
            self.cache.crop(length - held)  # negative: this many fewer, in every version of transformers


class HFDecodingTarget:
    """The interface of engine.decode.DecodingTarget over a transformers model."""

    def __init__(self, target: HfTarget) -> None:
        """Raises ValueError for a model whose cache cannot be rolled back."""
        self._target = target
        model = target.model
        refuse_uncroppable(model.config)
        text = model.config.get_text_config()
        self._longest = getattr(text, "max_position_embeddings", None)
        accepted = inspect.signature(model.forward).parameters
        self._has_logits_to_keep = "logits_to_keep" in accepted
        # transformers renames the argument from 5.24 on.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends = text.eos_token_id if ends is None else ends
        self.eos_token_ids = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        return self._target.embed

    @property
    def head_weight(self) -> Tensor:
        """[V, D]."""
        return self._target.head

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Hidden size, vocabulary, layers."""
        return self._target.hidden_size, self._target.vocab_size, len(self._target.layers)

    def new_cache(self, capacity: int) -> HFCache:
        """An empty cache. Raises ValueError when the model has no `capacity` positions."""
        if self._longest is not None and capacity > self._longest:
            raise ValueError(
                f"target: expected prompt, new tokens and one block in {self._longest} positions (max_position_embeddings), "
                f"found {capacity}. Shorten the prompt or lower --max-new-tokens."
            )
        return HFCache(import_transformers().DynamicCache())

    def extend(
        self, tokens_S: Tensor, cache: HFCache, tap_layer_ids: Sequence[int] = (), *, last_only: bool = False
    ) -> HFStep:
        """The tokens int64[S] behind what the cache holds. Raises ValueError for a tapped layer that does not exist."""
        options: dict[str, Any] = {self._cache_name: cache.cache, "use_cache": True}
        if last_only and self._has_logits_to_keep:
            options["logits_to_keep"] = 1
        with self._target.tapped(tap_layer_ids) as taps:
            output = self._target.model(input_ids=tokens_S[None], **options)
        logits = output.logits[:, -1:] if last_only else output.logits
        joined = torch.cat([taps[i] for i in tap_layer_ids], dim=-1) if taps else logits[..., :0]
        return HFStep(logits, joined)


def refuse_uncroppable(config: Any) -> None:
    """Raises ValueError naming what in a transformers config makes a cache that cannot be rolled back."""
    transformers = import_transformers()
    plain = {transformers.cache_utils.DynamicLayer, transformers.cache_utils.DynamicSlidingWindowLayer}
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - set(_CROPPABLE))
    if kinds:
        raise ValueError(_refusal(config, f"layers of kind {', '.join(kinds)}"))
    layers = {type(layer) for layer in transformers.DynamicCache(config=config).layers}
    others = sorted(kind.__name__ for kind in layers - plain)
    if others:
        raise ValueError(_refusal(config, f"a cache of {', '.join(others)}"))
    if getattr(text, "attention_chunk_size", None) is not None and not hasattr(text, "layer_types"):
        raise ValueError(_refusal(config, "chunked attention"))
    # Of RWKV and xLSTM the config says nothing; transformers' own mark on the class does.
    classes = getattr(transformers.AutoModelForCausalLM, "_model_mapping", {})
    known: Any = classes.get(type(config), None)
    if getattr(known, "_is_stateful", False):
        raise ValueError(_refusal(config, f"a recurrent state in {known.__name__}"))


def _refusal(config: Any, reason: str) -> str:
    return (
        f"target {config.model_type}: expected full or sliding attention, whose cache can be cropped when drafts are rejected; "
        f"found {reason}. Train for this target and measure with `eval DRAFTER DATA`; decode with a server that supports it."
    )


def load_decoding_target(name: str, device: torch.device, dtype: torch.dtype) -> HFDecodingTarget:
    """The model in a folder or of a hub id. Raises ValueError as engine.hf_target.load_hf_target does, and before any weight is
    read for a cache that cannot be rolled back."""
    try:
        config = import_transformers().AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"target {name}: expected a folder or hub id of a causal language model that transformers loads, found no readable "
            f"config.json: {error}"
        ) from error
    refuse_uncroppable(config)
    return HFDecodingTarget(load_hf_target(name, device, dtype))
