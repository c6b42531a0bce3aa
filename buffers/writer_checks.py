"""What a dataset's writer is told of it, looked at before the first sample: what training would refuse is refused here."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from buffers.untrusted import shown


def check_description(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a DatasetWriter's target_name, target_config, hidden_size, target_layer_ids, vocab_size or
    mask_token_id that is of another type or cannot be: layers that are not ascending or that the target does not have."""
    kinds = {"target_name": str, "target_config": Mapping, "target_layer_ids": Sequence}
    words = {"target_name": "text", "target_config": "an object", "target_layer_ids": "whole numbers"}
    for name, value in values.items():
        if not isinstance(value, kinds.get(name, Integral)) or isinstance(value, bool):
            told = value if isinstance(value, str | int | float | None) else type(value).__name__
            raise ValueError(
                f"expected {name} to be {words.get(name, 'a whole number')}, found {shown(told)}.{_hint(name)}"
            )
    for name in ("hidden_size", "vocab_size"):
        if values[name] < 1:
            raise ValueError(
                f"expected {name} to be at least 1, found {values[name]}. Take it from the target's config."
            )
    _check_layers(values["target_layer_ids"], of_config(values["target_config"], "num_hidden_layers"))


def _hint(name: str) -> str:
    return " Give config.to_dict(), or what json.load reads of config.json." if name == "target_config" else ""


def _check_layers(ids: Sequence[Any], num_layers: Any) -> None:
    if not all(isinstance(i, Integral) for i in ids) or list(ids) != sorted(set(ids)) or (ids and ids[0] < 0):
        raise ValueError(
            f"expected target_layer_ids to be ascending layer numbers from 0 on, each once, found {shown(list(ids))}. Put "
            "hidden states and ids into that order."
        )
    if ids and isinstance(num_layers, int) and ids[-1] >= num_layers:
        raise ValueError(
            f"expected target_layer_ids in 0..{num_layers - 1} (num_hidden_layers {num_layers} of target_config), found "
            f"{shown(list(ids))}. Id i is the residual stream after layer i, counted from 0."
        )


def of_config(config: Mapping[str, Any], key: str) -> Any:
    """A value of the target's config.json, which may stand in its text_config; None without one."""
    inner = config.get("text_config")
    return inner[key] if isinstance(inner, Mapping) and key in inner else config.get(key)
