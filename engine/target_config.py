"""The target's config.json: a Qwen3 model's sizes, and the refusal by name of what is not reproduced here."""

import dataclasses
from collections.abc import Mapping, Sequence

from engine.rope import RopeConfig, rope_from_config, rope_to_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Sizes of a Qwen3 model, with Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "target: expected num_attention_heads to be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}, "
                f"found {self.num_attention_heads}. Correct the config.json."
            )

    @classmethod
    def from_json(cls, config: Mapping[str, object]) -> "TargetConfig":
        """Read the object of a Qwen3 config.json. Raises ValueError naming what is missing or not reproduced here."""
        _refuse_unknown_arithmetic(config)
        rope = rope_from_config(config)
        if rope.kind != "default":
            raise ValueError(
                f"target rope kind: expected default, found {rope.kind!r}. Extract hidden states with another program."
            )
        heads = _integer(config, "num_attention_heads")
        hidden_size = _integer(config, "hidden_size")
        return cls(
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_hidden_layers=_integer(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_integer(config, "num_key_value_heads", heads),
            head_dim=_integer(config, "head_dim", hidden_size // heads),
            rms_norm_eps=float(str(config.get("rms_norm_eps", 1e-6))),
            rope=rope,
            max_position_embeddings=_integer(config, "max_position_embeddings", 32768),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=_token(config, "bos_token_id"),
            eos_token_id=_token(config, "eos_token_id"),
        )

    def to_json(self) -> dict[str, object]:
        """The object of the config.json that `from_json` and transformers read."""
        sizes = dataclasses.asdict(self)
        del sizes["rope"]
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **sizes,
            **rope_to_config(self.rope),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "dtype": "bfloat16",
        }


def _integer(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"target {name}: expected an integer, found {value!r}. Correct the target's config.json.")
    return value


def _token(config: Mapping[str, object], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) else None


def _refuse_unknown_arithmetic(config: Mapping[str, object]) -> None:
    architectures = config.get("architectures")
    if architectures != ["Qwen3ForCausalLM"]:
        raise ValueError(
            f"target architectures: expected ['Qwen3ForCausalLM'], found {architectures}. "
            "Extract hidden states of other models with another program."
        )
    wanted: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("attention_bias", (None, False)),
        ("use_sliding_window", (None, False)),
        ("hidden_act", (None, "silu")),
        ("quantization_config", (None,)),
    )
    for name, unused in wanted:
        if config.get(name) not in unused:
            raise ValueError(
                f"target {name}: expected {unused[-1]!r}, found {config[name]!r}, which is not reproduced here."
            )
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence) and set(kinds) - {"full_attention"}:
        raise ValueError(
            f"target layer_types: expected full_attention only, found {list(kinds)}, which is not reproduced here."
        )
