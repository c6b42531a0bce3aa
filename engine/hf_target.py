"""Any causal language model of Hugging Face as a target: its parts, its residual stream, and what we would get wrong.

The residual stream after a layer is taken by a hook on the layer: of the last layer, `output_hidden_states` gives the
normed one only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buffers.untrusted import read_object
from engine.assemble import norm_eps, refuse_unreproduced, text_config
from engine.ops.rms_norm_ref import normalise

PROBE_TOKENS = 16
# What the drafter takes its sizes from; a config.json may leave them to its architecture's defaults.
_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


@dataclass(frozen=True)
class HfTarget:
    """A model's parts. `norm_weight` fp32[D] is the factor of the final RMSNorm, 1 + w where the model writes it so."""

    name: str
    model: Any
    decoder: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    norm_weight: Tensor
    embed: Tensor
    head: Tensor
    config: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.embed.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embed.shape[1]

    def stored_tensors(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Embedding [V,D], head [V,D] (None when tied) and final norm [D] for `DatasetWriter.write_target`."""
        head = None if self.head is self.embed or self.head.data_ptr() == self.embed.data_ptr() else _narrow(self.head)
        return _narrow(self.embed), head, _narrow(self.norm_weight)

    @torch.inference_mode()
    def residuals(
        self, input_ids_BS: Tensor, attention_mask_BS: Tensor | None, layer_ids: Sequence[int]
    ) -> list[Tensor]:
        """The residual stream [B,S,D] after each of `layer_ids`, in their order."""
        with self.tapped(layer_ids) as taps:
            self.decoder(input_ids=input_ids_BS, attention_mask=attention_mask_BS, use_cache=False)
        return [taps[layer] for layer in layer_ids]

    @contextmanager
    def tapped(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Holds what the layers put out in the forward pass made meanwhile. Raises ValueError for layers that there are not."""
        unknown = [layer for layer in layer_ids if not 0 <= layer < len(self.layers)]
        if unknown:
            raise ValueError(
                f"target_layer_ids: expected numbers in 0..{len(self.layers) - 1}, found {unknown}. The target has no such "
                "layers."
            )
        taps: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                taps[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [self.layers[layer].register_forward_hook(keep(layer)) for layer in set(layer_ids)]
        try:
            yield taps
        finally:
            for hook in hooks:
                hook.remove()


def import_transformers() -> Any:
    """The package. Raises ValueError naming the extra when it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "expected the package transformers for a Hugging Face target, found none; pip install 'dflash-engine[hf]'"
        ) from error
    return transformers


def load_hf_target(name: str, device: torch.device, dtype: torch.dtype) -> HfTarget:
    """Load the model of a folder or of the hub. Raises ValueError when that cannot be, and as `hf_target` does."""
    transformers = import_transformers()
    folder = Path(name)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(
            f"expected the target's config.json in {folder}, found none. Give a model's folder or its hub id."
        )
    # Its bars would stand between our lines, and in logs.
    transformers.utils.logging.disable_progress_bar()
    try:
        raw = read_object(Path(transformers.utils.cached_file(name, "config.json")))
        refuse_unreproduced(text_config(raw))
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    except (OSError, KeyError) as error:
        raise ValueError(
            f"target {name}: expected a folder or hub id of a causal language model that transformers loads, found none: {error}"
        ) from error
    return hf_target(model.to(device).eval().requires_grad_(False), name, raw)


def hf_target(model: Any, name: str, raw_config: dict[str, Any]) -> HfTarget:
    """Take a loaded model apart and try on a few tokens whether embedding, final norm and head are what a drafter uses.

    Raises ValueError naming what is missing or different.
    """
    kind = type(model).__name__
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    norms = [child for part, child in decoder.named_children() if "norm" in part and hasattr(child, "weight")]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(layers, nn.ModuleList) or len(norms) != 1 or embedding is None or head is None:
        raise ValueError(
            f"target {name}: expected a decoder with layers, one final norm, embedding and head, found "
            f"{', '.join(part for part, _ in decoder.named_children())} in {kind}, which is not supported."
        )
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"target {name}: expected a head without bias, found one in {kind}, which is not reproduced.")
    if head.weight.shape != embedding.weight.shape:
        raise ValueError(
            f"target {name}: expected embedding and head of one shape, found {list(embedding.weight.shape)} and "
            f"{list(head.weight.shape)} in {kind}, which is not supported."
        )
    config = _with_sizes(raw_config, model.config)
    refuse_unreproduced(text_config(config))
    target = HfTarget(name, model, decoder, layers, norms[0], norms[0].weight, embedding.weight, head.weight, config)
    return _probed(target)


@torch.inference_mode()
def _probed(target: HfTarget) -> HfTarget:
    """The target with its norm's real factor, once a forward pass has shown that all of it is as the drafter assumes."""
    device, kind = target.embed.device, type(target.model).__name__
    tolerance = 0.03 if target.embed.dtype == torch.bfloat16 else 1e-3
    spread = torch.arange(PROBE_TOKENS, device=device) * 7919 % target.vocab_size
    seen: list[Tensor] = []
    first = target.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    last = target.layers[-1].register_forward_hook(
        lambda module, args, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        logits = target.model(input_ids=spread[None], use_cache=False).logits[0]
    finally:
        first.remove()
        last.remove()

    embedded = target.embed[spread].float()
    found = seen[0].float()
    if found.shape[-1] != target.hidden_size or _error(found.reshape(-1, target.hidden_size), embedded) > tolerance:
        ratio = (found.norm() / embedded.norm()).item()
        raise ValueError(
            f"target {target.name}: expected the first layer to see the embedding's rows, found something {ratio:.4g} times "
            f"as large in {kind}. A scaled or otherwise changed embedding is not reproduced."
        )
    residual = seen[1].float()[0]
    eps = norm_eps(text_config(target.config))
    # Small enough for eps to matter: a model whose eps the config names otherwise is found out.
    small = F.normalize(residual, dim=-1) * (max(eps, 1e-12) * target.hidden_size) ** 0.5
    factors = [target.norm_weight.float(), 1 + target.norm_weight.float()]
    errors = [
        max(
            _error(target.norm(x.to(target.embed.dtype)).float(), normalise(x, eps) * factor) for x in (residual, small)
        )
        for factor in factors
    ]
    factor = factors[errors.index(min(errors))]
    if min(errors) > tolerance:
        raise ValueError(
            f"target {target.name}: expected a final RMSNorm with factor w or 1 + w and eps {eps:g}, found "
            f"{type(target.norm).__name__}, which differs from both by {min(errors):.2g} of its largest value. It is not "
            "reproduced."
        )
    expected = F.linear(target.norm(seen[1]), target.head)[0].float()
    if _error(logits.float(), expected) > tolerance:
        raise ValueError(
            f"target {target.name}: expected logits of the final norm and the head alone, found others in {kind} (they differ "
            f"by {_error(logits.float(), expected):.2g} of the largest): scaled or capped. That is not reproduced."
        )
    return HfTarget(**{**vars(target), "norm_weight": factor})


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _narrow(tensor: Tensor) -> Tensor:
    """In bf16 if that keeps every value."""
    narrow = tensor.detach().bfloat16()
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor.detach()


def _with_sizes(raw: dict[str, Any], loaded: Any) -> dict[str, Any]:
    """The target's config.json, with the sizes that it leaves to its architecture's defaults."""
    inner = loaded.get_text_config()
    missing = {key: getattr(inner, key, None) for key in _SIZES if text_config(raw).get(key) is None}
    missing = {key: value for key, value in missing.items() if isinstance(value, int | float)}
    if raw.get("text_config"):
        return {**raw, "text_config": {**raw["text_config"], **missing}}
    return {**raw, **missing}
