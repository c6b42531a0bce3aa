"""What a dataset folder is made of: its manifest, its file names, and what reading and writing check alike."""

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from buffers.untrusted import one_line, parse_json, shown, shown_names

FORMAT_VERSION = 1
MANIFEST = "dataset.json"
TARGET_FILE = "target.safetensors"
# Beside the shards of a dataset that is being written.
UNFINISHED = "unfinished.json"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Asked once, while the module is imported: to ask is to set it, for all threads, and two that ask at a time may leave it at 0.
_UMASK = _umask()


@dataclass(frozen=True)
class ShardInfo:
    """What the manifest says about a shard file."""

    file: str
    num_samples: int
    num_tokens: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class DatasetInfo:
    """The manifest. `target_config` is the target's config.json; `last_hidden_norm` is None without last_hidden."""

    format_version: int
    target_name: str
    target_config: dict[str, Any]
    hidden_size: int
    target_layer_ids: tuple[int, ...]
    vocab_size: int
    mask_token_id: int
    last_hidden_norm: str | None
    num_samples: int
    shards: tuple[ShardInfo, ...]

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"expected dataset format version {FORMAT_VERSION}, found {self.format_version}. "
                "Convert the dataset with this version."
            )
        if not self.target_layer_ids or self.hidden_size <= 0:
            raise ValueError(
                f"expected target_layer_ids and a positive hidden_size, found {shown(list(self.target_layer_ids))} and "
                f"{self.hidden_size}. Name the layers that the hidden states come from."
            )
        if self.last_hidden_norm not in ("pre", "post", None):
            raise ValueError(
                f"expected last_hidden_norm to be pre, post or null, found {shown(self.last_hidden_norm)}. Say whether the "
                "final norm was applied."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"expected mask_token_id in 0..{self.vocab_size - 1}, found {self.mask_token_id}. Choose a token of "
                "the vocabulary."
            )

    @property
    def digest(self) -> str:
        """sha256 over the shards' own, in order: the content and order of the samples."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    @property
    def num_taps(self) -> int:
        """L, the target layers whose hidden states are concatenated."""
        return len(self.target_layer_ids)

    def to_json(self) -> str:
        """The manifest's text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "DatasetInfo":
        """Parse a manifest. Raises ValueError for text that is no manifest, naming missing and unknown keys and values of
        another type."""
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ValueError(f"expected {MANIFEST} to be JSON, found {error}. Write the dataset again.") from error
        _check_keys(values, {field.name for field in fields(cls)}, MANIFEST)
        _check_types(values, _MANIFEST_TYPES, MANIFEST)
        for layer in values["target_layer_ids"]:
            _check_types({"target_layer_ids": layer}, {"target_layer_ids": (int,)}, MANIFEST)
        values["shards"] = tuple(shard_of(shard, f"a shard of {MANIFEST}") for shard in values["shards"])
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
        return cls(**values)


def shard_of(values: Any, where: str) -> ShardInfo:
    """A shard from its JSON. Raises ValueError for other keys and types."""
    _check_keys(values, {field.name for field in fields(ShardInfo)}, where)
    _check_types(values, _SHARD_TYPES, where)
    return ShardInfo(**values)


def check_tokens(ids: NDArray[np.integer], mask: NDArray[np.integer], vocab_size: int, where: str) -> None:
    """Raise ValueError for the first token id outside the vocabulary or the first mask value that is not 0 or 1."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise ValueError(
            f"expected token ids in 0..{vocab_size - 1} in {where}, found {ids[outside[0]]} at position {outside[0]}. "
            "Check the tokenizer, or set vocab_size to the target's."
        )
    wrong = np.flatnonzero((mask != 0) & (mask != 1))
    if len(wrong):
        raise ValueError(
            f"expected loss_mask values 0 and 1 in {where}, found {mask[wrong[0]]} at position {wrong[0]}. "
            "Write 1 for supervised tokens."
        )


def mask_length_error(where: str, length: int, found: list[int]) -> str:
    """The message for a loss mask that has not one value a token."""
    return (
        f"expected loss_mask of {length} values, one a token, in {where}, found shape {found}. "
        "Build the mask from the same tokens."
    )


def wrong_width_error(where: str, expected: list[int], found: list[int], info: DatasetInfo) -> str:
    """The message for hidden states that are not [T, L*D]."""
    if len(found) != 2:
        todo = "Flatten them: a row a token, its taps side by side in the order of the ids."
    elif found[0] != expected[0]:
        todo = "Give a row for every token."
    else:
        todo = "Correct target_layer_ids, or extract with these layers."
    return (
        f"expected {where} {expected} ({info.num_taps} target_layer_ids {shown(list(info.target_layer_ids))}, hidden size "
        f"{info.hidden_size}), found {found}. {todo}"
    )


def open_safetensors(file: Path) -> Any:
    """Map a safetensors file. Raises ValueError when its header cannot be read or does not fit its size."""
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


def read_tensors(file: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a safetensors file by name, as views of its mapping: those of `names` that it has; None: all.

    Raises ValueError, naming the file, when it cannot be read or holds a type that torch does not have.
    """
    with open_safetensors(file) as handle:
        try:
            return {name: handle.get_tensor(name) for name in handle.keys() if names is None or name in names}  # noqa: SIM118
        except (SafetensorError, OSError, AttributeError, TypeError, RuntimeError, ValueError, OverflowError) as error:
            raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(
        f"expected a safetensors file in {file}, found one that cannot be read: truncated or half-written "
        f"({one_line(error)}). Copy it or write it again."
    )


def write_safetensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write contiguous tensors on the host. Raises OSError when it cannot be written, on a full disk for one."""
    try:
        save_file(tensors, str(file), metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"could not write {file}: {error}. Make room or choose another folder.") from error


def refuse_cut(file: Path, size: int) -> None:
    """Raises ValueError when a mapped file has lost bytes since it was opened: reading them would end the process. One that was
    removed stays mapped, and whole."""
    try:
        now = file.stat().st_size
    except OSError:
        return
    if now < size:
        raise ValueError(
            f"expected {size} bytes in {file} as when it was opened, found {now}: it was cut or is being written over. "
            "Copy it or write it again."
        )


def make_readable(file: Path) -> None:
    """Gives a file the mode that the user's umask allows: safetensors writes its files for their owner alone."""
    file.chmod(0o666 & ~_UMASK)


def publish(temporary: Path, file: Path) -> None:
    """Make a finished file appear under its name only once its bytes are on disk."""
    make_readable(temporary)
    flush(temporary)
    temporary.rename(file)
    flush(file.parent)


def sha256(file: Path) -> str:
    """The file's hash in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Returns when a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_MANIFEST_TYPES: dict[str, tuple[type, ...]] = {
    "format_version": (int,),
    "target_name": (str,),
    "target_config": (dict,),
    "hidden_size": (int,),
    "target_layer_ids": (list,),
    "vocab_size": (int,),
    "mask_token_id": (int,),
    "last_hidden_norm": (str, type(None)),
    "num_samples": (int,),
    "shards": (list,),
}
_SHARD_TYPES: dict[str, tuple[type, ...]] = {
    "file": (str,),
    "num_samples": (int,),
    "num_tokens": (int,),
    "num_bytes": (int,),
    "sha256": (str,),
}
_TYPE_NAMES = {
    int: "a whole number from 0 to 2**63 - 1",
    str: "text",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


def _check_types(values: dict[str, Any], types: dict[str, tuple[type, ...]], where: str) -> None:
    """Raise ValueError for the first value that has none of its types; every number of a manifest is at least 0."""
    for name, kinds in types.items():
        value = values[name]
        # bool is an int in Python, but not in a manifest.
        if (
            not isinstance(value, kinds)
            or isinstance(value, bool)
            or (isinstance(value, int) and not 0 <= value < 2**63)
        ):
            words = " or ".join(_TYPE_NAMES[kind] for kind in kinds)
            raise ValueError(
                f"expected {name} of {where} to be {words}, found {shown(value)}. Write the dataset with this version."
            )


def _check_keys(values: object, expected: set[str], where: str) -> None:
    found = set(values) if isinstance(values, dict) else set()
    if found != expected:
        missing, unknown = (shown_names(sorted(keys), 300) or "none" for keys in (expected - found, found - expected))
        raise ValueError(
            f"expected the keys {', '.join(sorted(expected))} in {where}, found {missing} missing and {unknown} "
            "unknown. Write the dataset with this version."
        )
