"""What a drafter's config.json says, key by key: numbers, kinds of layers, and what is refused because we do not compute it."""

import math
from collections.abc import Mapping

from buffers.untrusted import shown

FULL = "full_attention"
SLIDING = "sliding_attention"
# Published drafters have 5 to 8. Each has its tensors by name, so a number alone must not make any amount of them.
MOST_LAYERS = 1000


def integer(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    """The integer under a name, or the default where there is none. Raises ValueError for anything else."""
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError(f"{name}: expected an integer, found {shown(value)}. Correct the drafter's config.json.")
    return value


def number(config: Mapping[str, object], name: str, default: float) -> float:
    """The finite number under a name, or the default where there is none. Raises ValueError for anything else."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise ValueError(f"{name}: expected a number, found {shown(value)}. Correct the drafter's config.json.")
    return float(value)


def is_finite(value: float) -> bool:
    """Whether a float can hold the number, which in JSON may be whole and of hundreds of digits."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def flag(config: Mapping[str, object], name: str, default: bool) -> bool:
    """True or false under a name, or the default where there is nothing. Raises ValueError for anything else: "false" is no
    false."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, found {shown(value)}. Correct the drafter's config.json.")
    return value


def token(config: Mapping[str, object], name: str) -> int | None:
    """A token id, None where there is not exactly one."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def layers(
    config: Mapping[str, object], inner: Mapping[str, object], num_layers: int
) -> tuple[tuple[str, ...], int | None]:
    """Kinds and window. dflash_config.use_swa makes every layer slide, unless layer_types has sliding layers (vLLM)."""
    if not 1 <= num_layers <= MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers: expected 1 to {MOST_LAYERS}, found {num_layers}. Correct the drafter's config.json."
        )
    kinds = config.get("layer_types")
    if all_slide(config, inner):
        kinds = [SLIDING] * num_layers
    if kinds is None:
        first_sliding = integer(config, "max_window_layers", 0) if config.get("use_sliding_window") else num_layers
        kinds = [SLIDING if i >= first_sliding else FULL for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(
            f"layer_types: expected {num_layers} entries (num_hidden_layers), found {shown(kinds)}. Correct the config.json."
        )
    kinds = tuple(kinds)
    if SLIDING in kinds and inner.get("swa_window_size") is not None:
        return kinds, integer(inner, "swa_window_size")
    return kinds, _window(config) if SLIDING in kinds else None


def all_slide(config: Mapping[str, object], inner: Mapping[str, object]) -> bool:
    """Whether dflash_config.use_swa alone says that layers slide."""
    kinds = config.get("layer_types")
    return bool(inner.get("use_swa")) and not (isinstance(kinds, list) and SLIDING in kinds)


def _window(config: Mapping[str, object]) -> int | None:
    return None if config.get("sliding_window") is None else integer(config, "sliding_window")


# Keys that change what a server computes, with the value that means "not used".
_NOT_REPRODUCED: dict[str, tuple[object, ...]] = {
    "projector_type": (None, "dflash"),
    "conv_kernel_size": (None,),
    "conv_group_size": (None,),
    "selector_rank": (None,),
    "selector_top_k": (None,),
    "markov_rank": (None, 0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "input_embedding_scale": (None, 1.0),
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "attention_bias": (None, False),
    "logit_scale": (None, 1.0),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "use_aux_hidden_state": (None, True),
    "hidden_act": (None, "silu"),
}


def refuse_unknown_arithmetic(config: Mapping[str, object], merged: Mapping[str, object]) -> None:
    """Raises ValueError naming the key when a server would compute something else than the engine. merged: the top level
    with dflash_config's entries over it."""
    architectures = config.get("architectures") or ["DFlashDraftModel"]
    if architectures != ["DFlashDraftModel"]:
        raise ValueError(
            f"architectures: expected ['DFlashDraftModel'], found {shown(architectures)}. Only plain DFlash drafters are "
            "trained here."
        )
    for name, unused in _NOT_REPRODUCED.items():
        if merged.get(name) not in unused:
            raise ValueError(
                f"{name}: expected {unused[-1]!r}, found {shown(merged[name])}, which is not reproduced here. Use a "
                "plain DFlash drafter."
            )
    for name, same in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if merged.get(name) not in (None, config.get(same)):
            raise ValueError(
                f"{name}: expected {same} {shown(config.get(same))}, found {shown(merged[name])}. A drafter of another size than "
                "its target is not reproduced here."
            )
