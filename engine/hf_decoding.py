"""A causal language model of transformers as the target of speculative decoding.

The residual stream is read by hooks on the decoder layers, the key/value cache is cropped after a rejection. What cannot
be cropped - the recurrent state of Mamba and of linear attention above all - is refused by name before any weight is
read; such targets can be trained for, but not decoded with here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.assemble import refuse_unreproduced

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
    """The interface of engine.decode.DecodingTarget over a transformers model, which must be in eval mode."""

    def __init__(self, model: Any) -> None:
        """Raises ValueError for a model whose cache, head or layers decoding cannot work with."""
        self.model = model
        config = model.config
        refuse_uncroppable(config)
        if getattr(model, "_is_stateful", False):
            raise ValueError(_refusal(config, f"{type(model).__name__} keeps a recurrent state"))
        refuse_unreproduced(config.get_text_config().to_dict())
        head = model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None or not head.weight.is_floating_point():
            raise ValueError(
                f"target {type(model).__name__}: expected an output head that is one matrix of floating-point numbers, found "
                f"{'none' if head is None else head}. A drafter shares the target's head; decode with a target that has one."
            )
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.head_weight: Tensor = head.weight
        self._layers = decoder_layers(model)
        self._longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        accepted = inspect.signature(model.forward).parameters
        self._has_logits_to_keep = "logits_to_keep" in accepted
        # transformers renames the argument from 5.24 on.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends = config.get_text_config().eos_token_id if ends is None else ends
        self.eos_token_ids = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Hidden size, vocabulary (the head's rows), layers."""
        return self.embedding.shape[1], self.head_weight.shape[0], len(self._layers)

    def new_cache(self, capacity: int) -> HFCache:
        """An empty cache. Raises ValueError when the model has no `capacity` positions."""
        if self._longest is not None and capacity > self._longest:
            raise ValueError(
                f"target: expected prompt, new tokens and one block in {self._longest} positions (max_position_embeddings), "
                f"found {capacity}. Shorten the prompt or lower --max-new-tokens."
            )
        from transformers import DynamicCache

        return HFCache(DynamicCache())

    def extend(
        self, tokens_S: Tensor, cache: HFCache, tap_layer_ids: Sequence[int] = (), *, last_only: bool = False
    ) -> HFStep:
        """The tokens int64[S] behind what the cache holds. Raises ValueError for a tapped layer that does not exist."""
        options: dict[str, Any] = {self._cache_name: cache.cache, "use_cache": True}
        if last_only and self._has_logits_to_keep:
            options["logits_to_keep"] = 1
        with self._tapped(tap_layer_ids) as taps:
            output = self.model(input_ids=tokens_S[None], **options)
        logits = output.logits[:, -1:] if last_only else output.logits
        joined = torch.cat([taps[i] for i in tap_layer_ids], dim=-1) if taps else logits[..., :0]
        return HFStep(logits, joined)

    @contextmanager
    def _tapped(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        unknown = [i for i in layer_ids if not 0 <= i < len(self._layers)]
        if unknown:
            raise ValueError(
                f"target_layer_ids: expected numbers in 0..{len(self._layers) - 1}, found {unknown}. The target has no such "
                "layers."
            )
        taps: dict[int, Tensor] = {}

        def tap(i: int) -> Any:
            def keep(module: nn.Module, args: Any, output: Any) -> None:
                taps[i] = output if isinstance(output, Tensor) else output[0]

            return keep

        handles = [self._layers[i].register_forward_hook(tap(i)) for i in layer_ids]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's layers in order. Raises ValueError for a model that has them elsewhere than transformers' decoders."""
    layers = getattr(model.get_decoder(), "layers", None)
    expected = model.config.get_text_config().num_hidden_layers
    if not isinstance(layers, nn.ModuleList) or len(layers) != expected:
        raise ValueError(
            f"target {type(model).__name__}: expected its {expected} decoder layers as `layers` of its decoder, found "
            f"{type(layers).__name__}. Decode with a target that is built like Llama or Qwen3."
        )
    return layers


def refuse_uncroppable(config: Any) -> None:
    """Raises ValueError naming what in a transformers config makes a cache that cannot be rolled back."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - set(_CROPPABLE))
    if kinds:
        raise ValueError(_refusal(config, f"layers of kind {', '.join(kinds)}"))
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    others = sorted(kind.__name__ for kind in layers - {DynamicLayer, DynamicSlidingWindowLayer})
    if others:
        raise ValueError(_refusal(config, f"a cache of {', '.join(others)}"))
    if getattr(text, "attention_chunk_size", None) is not None and not hasattr(text, "layer_types"):
        raise ValueError(_refusal(config, "chunked attention"))


def _refusal(config: Any, reason: str) -> str:
    return (
        f"target {config.model_type}: expected full or sliding attention, whose cache can be cropped when drafts are rejected; "
        f"found {reason}. Train for this target and measure with `eval DRAFTER DATA`; decode with a server that supports it."
    )


def load_decoding_target(name: str, device: torch.device, dtype: torch.dtype) -> HFDecodingTarget:
    """The model in a folder or of a hub id, without gradients. Raises ValueError when it cannot be had or is refused."""
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(name, "config.json", error) from error
    refuse_uncroppable(config)
    refuse_unreproduced(config.get_text_config().to_dict())
    # Its bars would stand between our lines.
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _unreadable(name, "weights", error) from error
    return HFDecodingTarget(model.to(device).requires_grad_(False).eval())


def import_transformers() -> Any:
    """The package. Raises ValueError naming the extra when it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "expected the package transformers for a Hugging Face target, found none; pip install 'dflash-engine[hf]'"
        ) from error
    return transformers


def _unreadable(name: str, what: str, error: Exception) -> ValueError:
    return ValueError(
        f"target {name}: expected a folder or hub id of a causal language model that transformers loads, found no readable "
        f"{what}: {error}"
    )
