"""The drafter's config.json: z-lab's keys as one frozen dataclass.

The same file is read by vLLM, SGLang and llama.cpp. What changes a server's arithmetic and is not reproduced by
the engine (DFlash2, DSpark, Domino, sinks, soft-capping ...) is refused by name when the file is read.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from buffers.untrusted import read_object, shown
from engine.drafter_json import FULL as FULL
from engine.drafter_json import SLIDING as SLIDING
from engine.drafter_json import all_slide, flag, integer, is_finite, layers, number, refuse_unknown_arithmetic, token
from engine.rope import RopeConfig, rope_from_config, rope_to_config
from engine.speculators_layout import from_speculators, is_speculators


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Sizes and rules of a DFlash drafter; the number of layers is the length of `layer_types`.

    `causal_layers` says for each layer whether a draft slot sees only the slots up to its own in its block; None means
    the servers' default: sliding layers causal, full layers not.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    causal_layers: tuple[bool, ...] | None = None
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.causal_layers is None:
            object.__setattr__(self, "causal_layers", _default_causal(self.layer_types))
        _check(self)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_taps(self) -> int:
        """L: target layers whose hidden states are concatenated."""
        return len(self.target_layer_ids)

    def layer_causal(self, i: int) -> bool:
        """Whether layer `i` is causal inside a block."""
        assert self.causal_layers is not None
        return self.causal_layers[i]

    def layer_window(self, i: int) -> int | None:
        """W of layer `i`: slot k of the block at anchor a sees context keys >= a + k - (W - 1). None: a full layer."""
        return self.sliding_window if self.layer_types[i] == SLIDING else None

    def export_is_causal(self) -> bool | None:
        """The top-level `is_causal` to write: the layers' common value, or None (leave the key out) for the default.

        A server applies the flag to every layer, so any other mix cannot be written: ValueError.
        """
        assert self.causal_layers is not None
        if len(set(self.causal_layers)) == 1:
            return self.causal_layers[0]
        if self.causal_layers == _default_causal(self.layer_types):
            return None
        raise ValueError(
            "causal_layers: expected one value for all layers or the default mix (sliding causal, full not), found "
            f"{list(self.causal_layers)} for {list(self.layer_types)}. config.json has one is_causal for the whole "
            "drafter."
        )

    @classmethod
    def from_json(cls, config: Mapping[str, object]) -> "DrafterConfig":
        """Read the object of a config.json. `dflash_config` wins over the top level (SGLang). Raises ValueError."""
        if not isinstance(config, Mapping):
            raise ValueError(
                f"config.json: expected an object, found {shown(config)}. Correct the drafter's config.json."
            )
        inner = config.get("dflash_config") or {}
        if not isinstance(inner, Mapping):
            raise ValueError(
                f"dflash_config: expected an object, found {shown(inner)}. Correct the drafter's config.json."
            )
        merged = {**config, **inner}
        refuse_unknown_arithmetic(config, merged)
        num_layers = integer(config, "num_hidden_layers")
        layer_types, window = layers(config, inner, num_layers)
        is_causal: bool | None = None
        if config.get("is_causal") is not None:
            is_causal = flag(config, "is_causal", False)
        elif inner.get("causal") is not None:
            is_causal = flag(inner, "causal", False)
        if is_causal is None and all_slide(config, inner):
            # Who writes use_swa alone trained without causality inside the block (MiMo, Model-Optimizer); so reads vLLM.
            is_causal = False
        heads = integer(config, "num_attention_heads")
        hidden_size = integer(config, "hidden_size")
        taps = merged.get("target_layer_ids")
        if not isinstance(taps, Sequence) or not taps or not all(type(i) is int for i in taps):
            raise ValueError(
                f"target_layer_ids: expected a list of layer numbers in dflash_config, found {shown(taps)}. Correct the "
                "config.json."
            )
        return cls(
            block_size=integer(merged, "block_size"),
            mask_token_id=integer(merged, "mask_token_id"),
            target_layer_ids=tuple(taps),
            num_target_layers=integer(merged, "num_target_layers"),
            hidden_size=hidden_size,
            intermediate_size=integer(config, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=integer(config, "num_key_value_heads", heads),
            head_dim=integer(config, "head_dim", hidden_size // max(heads, 1)),
            vocab_size=integer(config, "vocab_size"),
            layer_types=layer_types,
            sliding_window=window,
            causal_layers=None if is_causal is None else (is_causal,) * num_layers,
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
            rope=rope_from_config(config),
            max_position_embeddings=integer(config, "max_position_embeddings", 32768),
            bos_token_id=token(config, "bos_token_id"),
            eos_token_id=token(config, "eos_token_id"),
            tie_word_embeddings=flag(config, "tie_word_embeddings", False),
            initializer_range=number(config, "initializer_range", 0.02),
            dtype=_dtype(config),
        )

    def to_json(self) -> dict[str, object]:
        """The object of a config.json that servers load; raises ValueError as `export_is_causal` does."""
        is_causal = self.export_is_causal()
        return {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)},
            **({} if is_causal is None else {"is_causal": is_causal}),
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "layer_types": list(self.layer_types),
            "max_window_layers": self.num_hidden_layers,
            "sliding_window": self.sliding_window,
            "use_sliding_window": SLIDING in self.layer_types,
            "max_position_embeddings": self.max_position_embeddings,
            **rope_to_config(self.rope),
            "vocab_size": self.vocab_size,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": True,
            # transformers 4.56 renamed torch_dtype; both are read somewhere.
            "dtype": self.dtype,
            "torch_dtype": self.dtype,
        }


def load_drafter_config(directory: str | Path, num_target_layers: int | None = None) -> DrafterConfig:
    """Read `directory`/config.json, in z-lab's or speculators' layout. Raises ValueError when it is missing or refused.

    `num_target_layers` stands in where the file does not say: speculators' own do not.
    """
    config = read_drafter_json(directory)
    try:
        if is_speculators(config):
            config = from_speculators(config, num_target_layers)
        return DrafterConfig.from_json(config)
    except ValueError as error:
        raise ValueError(f"{_file(directory)}: {error}") from error


def read_drafter_json(directory: str | Path) -> dict[str, object]:
    """The object in `directory`/config.json. Raises ValueError when there is none."""
    path = _file(directory)
    if not path.is_file():
        raise ValueError(
            f"drafter config: expected the file {path}, found none. Pass a folder with config.json and "
            "model.safetensors; a run has them in best/ and drafter/."
        )
    config: dict[str, object] = read_object(path)
    return config


def _file(directory: str | Path) -> Path:
    return Path(directory) / "config.json"


def _dtype(config: Mapping[str, object]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or not re.fullmatch(r"[\w.]{1,32}", name):
        raise ValueError(f"dtype: expected the name of one, found {shown(name)}. Correct the drafter's config.json.")
    return name


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The published choice of layers: t_i = round(1 + i (T - 4) / (L - 1)); one tap takes the middle layer (SGLang)."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    if num_taps < 1 or span < num_taps - 1:
        raise ValueError(
            f"target layers: expected 1 to {max(span + 1, 1)} taps for a target of {num_target_layers} layers, "
            f"found {num_taps}. "
            "Tap fewer layers (--num-taps) or name them (--layers)."
        )
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


def _default_causal(layer_types: Sequence[str]) -> tuple[bool, ...]:
    return tuple(kind == SLIDING for kind in layer_types)


def _check(config: DrafterConfig) -> None:
    for name in (
        "num_target_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ):
        if not 1 <= getattr(config, name) < 2**31:
            raise ValueError(
                f"{name}: expected a positive integer below 2**31, found {getattr(config, name)}. Correct the drafter's settings."
            )
    if not 2 <= config.block_size < 2**31:
        raise ValueError(
            f"block_size: expected at least 2 (the anchor and one draft) and below 2**31, found {config.block_size}. Choose 4 "
            "to 32."
        )
    for name in ("rms_norm_eps", "initializer_range"):
        value = getattr(config, name)
        if not (is_finite(value) and 0 <= value <= 1):
            raise ValueError(f"{name}: expected a number from 0 to 1, found {value}. Correct the drafter's settings.")
    if config.head_dim % 2:
        raise ValueError(
            f"head_dim: expected an even number, found {config.head_dim}. Rotary positions turn pairs of components."
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads: expected a multiple of num_key_value_heads {config.num_key_value_heads}, "
            f"found {config.num_attention_heads}. Correct one of them."
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ValueError(
            f"mask_token_id: expected 0 to {config.vocab_size - 1} (vocab_size {config.vocab_size}), found "
            f"{config.mask_token_id}. Name a token of the vocabulary."
        )
    if not config.target_layer_ids or list(config.target_layer_ids) != sorted(set(config.target_layer_ids)):
        raise ValueError(
            f"target_layer_ids: expected ascending layer numbers, each once, found {shown(list(config.target_layer_ids))}. "
            "Correct the list."
        )
    if not 0 <= config.target_layer_ids[0] <= config.target_layer_ids[-1] < config.num_target_layers:
        raise ValueError(
            f"target_layer_ids: expected numbers in 0..{config.num_target_layers - 1} (num_target_layers "
            f"{config.num_target_layers}), "
            f"found {shown(list(config.target_layer_ids))}. Correct the list."
        )
    unknown = [kind for kind in config.layer_types if kind not in (FULL, SLIDING)]
    if unknown or not config.layer_types:
        raise ValueError(
            f"layer_types: expected {FULL} or {SLIDING} for at least one layer, found {shown(list(config.layer_types))}. "
            "Correct the list."
        )
    if SLIDING in config.layer_types and (config.sliding_window is None or not 1 <= config.sliding_window < 2**31):
        raise ValueError(
            f"sliding_window: expected a positive window below 2**31 for the sliding layers, found {config.sliding_window}. Set "
            "it in the config."
        )
    if SLIDING in config.layer_types and config.sliding_window and config.sliding_window < config.block_size:
        raise ValueError(
            f"sliding_window: expected at least block_size {config.block_size}, found {config.sliding_window}: servers "
            "apply the window inside the block too, training to the context alone. Enlarge the window."
        )
    if config.causal_layers is not None and len(config.causal_layers) != len(config.layer_types):
        raise ValueError(
            f"causal_layers: expected {len(config.layer_types)} entries, found {len(config.causal_layers)}. Give "
            "one for each layer."
        )
