"""The tensors in a drafter's folder: one safetensors file, or shards with Hugging Face's index."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from buffers import manifest
from buffers.untrusted import read_weight_map, shown_names

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's model.safetensors, or of the shards that its index names. Raises ValueError."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file() or not index.is_file():
        return manifest.read_tensors(folder / WEIGHTS_FILE)
    files = read_weight_map(index)
    found: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        found |= manifest.read_tensors(folder / file)
    absent = [f"{name} in {file}" for name, file in files.items() if name not in found]
    if absent:
        raise ValueError(
            f"{folder}: expected every tensor that {INDEX_FILE} names, found no {shown_names(absent[:3])}; copy it again"
        )
    return found
