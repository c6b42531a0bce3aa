"""What other trainers' files do not say of the target, gathered from the settings, the target's config.json and the files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from buffers.foreign_archives import MODELOPT, SPECFORGE
from buffers.foreign_deepspec import DEEPSPEC
from buffers.foreign_scan import Reader
from buffers.foreign_speculators import SPECULATORS
from buffers.untrusted import parse_json, shown

# Whether last_hidden is before or after the final norm, where the trainer that writes the format fixes it.
NORM_OF_FORMAT = {SPECFORGE: "post", SPECULATORS: "pre", DEEPSPEC: "post", MODELOPT: None}


class FactsError(ValueError):
    """What the settings say of the data is missing, impossible, or not what the files say."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Settings of [data], by the same names. `target`: folder of the target's checkpoint, whose config.json gives the sizes.

    `target_layer_ids` counts from 0: id i is the residual stream after layer i. -1 as `mask_token_id`: not given.
    `last_hidden_norm`: auto takes what the format fixes; none leaves the last hidden states unread. `on_bad_file`: refuse
    names the files that cannot be used, skip leaves them out.
    """

    target: str = ""
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int = -1
    last_hidden_norm: Literal["auto", "pre", "post", "none"] = "auto"
    on_bad_file: Literal["refuse", "skip"] = "refuse"


@dataclass(frozen=True)
class Target:
    """All that a dataset says of its target."""

    name: str
    config: dict[str, Any]
    hidden_size: int
    vocab_size: int
    layer_ids: tuple[int, ...]
    mask_token_id: int
    last_hidden_norm: str | None


def missing_facts(format: str, facts: Facts, reader: Reader, has_last_hidden: bool) -> list[str]:
    """The settings without which this folder cannot be trained on, each with what it is."""
    missing = []
    if not facts.target:
        missing.append("data.target (folder of the target's checkpoint: its sizes, embedding, head and norm)")
    if not (facts.target_layer_ids or reader.target_layer_ids):
        missing.append("data.target_layer_ids (the layers that the hidden states come from, counted from 0)")
    if facts.mask_token_id < 0:
        missing.append("data.mask_token_id (a token of the vocabulary that never occurs in the data)")
    if has_last_hidden and facts.last_hidden_norm == "auto" and NORM_OF_FORMAT[format] is None:
        missing.append("data.last_hidden_norm (pre or post: before or after the final norm; none to leave it unread)")
    return missing


def resolve_target(root: Path, format: str, facts: Facts, reader: Reader, has_last_hidden: bool) -> Target:
    """Everything known of the target. Raises FactsError, in one line for all facts that are missing, and for facts that
    contradict the files or the target's config.json."""
    missing = missing_facts(format, facts, reader, has_last_hidden)
    if missing:
        raise FactsError(
            f"{root}: {format}'s files do not say everything; expected {len(missing)} more settings: {'; '.join(missing)}"
        )
    config = _read_config(Path(facts.target) / "config.json")
    text = config.get("text_config") or config
    hidden_size, vocab_size, num_layers = (
        _size(text, name, facts.target) for name in ("hidden_size", "vocab_size", "num_hidden_layers")
    )
    layer_ids = facts.target_layer_ids or reader.target_layer_ids
    for name, said, found in (
        ("data.target_layer_ids", layer_ids, reader.target_layer_ids or layer_ids),
        ("the hidden size of data.target", hidden_size, reader.hidden_size or hidden_size),
    ):
        if said != found:
            raise FactsError(
                f"{root}: expected {name} to be {_text(found)} as the dataset says, found {_text(said)}; leave the "
                "setting out or correct it"
            )
    if len(set(layer_ids)) != len(layer_ids) or min(layer_ids) < 0 or max(layer_ids) >= num_layers:
        raise FactsError(
            f"expected data.target_layer_ids to be different layers of 0..{num_layers - 1} ({facts.target} has {num_layers}), "
            f"found {list(layer_ids)}. speculators counts from 1: subtract 1 there"
        )
    if facts.mask_token_id >= vocab_size:
        raise FactsError(
            f"expected data.mask_token_id in 0..{vocab_size - 1} ({facts.target} has a vocabulary of {vocab_size}), found "
            f"{facts.mask_token_id}"
        )
    norm = NORM_OF_FORMAT[format] if facts.last_hidden_norm == "auto" else facts.last_hidden_norm
    if not has_last_hidden or norm == "none":
        norm = None
    name = reader.target_name or str(config.get("_name_or_path") or "") or Path(facts.target).resolve().name
    return Target(name, config, hidden_size, vocab_size, layer_ids, facts.mask_token_id, norm)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = parse_json(file.read_bytes())
    except OSError as error:
        raise FactsError(
            f"data.target: expected the target's checkpoint with {file}, found none ({error.strerror})"
        ) from error
    except ValueError as error:
        raise FactsError(f"data.target: expected JSON in {file}, found {error}. Copy the file again") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config") or config, dict):
        raise FactsError(f"data.target: expected an object in {file}, found {shown(config)}. Copy the file again")
    return config


def _size(config: dict[str, Any], name: str, target: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise FactsError(
            f"data.target: expected {name} in {target}/config.json, found {shown(value)}. Give the target's own folder"
        )
    return value


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
