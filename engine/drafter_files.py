"""The tensors in a drafter's folder: one safetensors file, or shards with Hugging Face's index."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's model.safetensors, or of the shards that its index names. Raises ValueError."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file() or not index.is_file():
        return _read_file(folder / WEIGHTS_FILE)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # The name alone: an index does not lead out of its folder.
        files = {name: Path(file).name for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index}: expected a weight_map of file names, found none; copy the file again") from error
    found: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        found |= _read_file(folder / file)
    absent = [f"{name} in {file}" for name, file in files.items() if name not in found]
    if absent:
        raise ValueError(
            f"{folder}: expected every tensor that {INDEX_FILE} names, found no {', '.join(absent[:3])}; copy it again"
        )
    return found


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, "pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - safe_open is no dict
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file.parent}: expected a readable {file.name}, found: {error}") from error
