"""DeepSpec's target cache: manifest.json, samples.idx and raw shards, all ranks in one folder.

A record of samples.idx is `<QIIQQQQQ`: sample id, shard, tokens, and the offsets of input_ids int32[T], attention_mask
uint8[T], loss_mask uint8[T], hidden states bf16[T, L*D] and last hidden state bf16[T, D] (after the final norm). Every
offset is compared with the shard's size before it is used; shards are mapped.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers.manifest import refuse_cut
from buffers.raw_sample import RawSample
from buffers.untrusted import is_inside, one_line, parse_json, read_object, shown, shown_names

DEEPSPEC = "DeepSpec"
MANIFEST, INDEX = "manifest.json", "samples.idx"
_RECORD = np.dtype(
    [
        ("sample_id", "<u8"),
        ("shard_id", "<u4"),
        ("seq_len", "<u4"),
        ("input_ids", "<u8"),
        ("attention_mask", "<u8"),
        ("loss_mask", "<u8"),
        ("hidden_states", "<u8"),
        ("last_hidden", "<u8"),
    ]
)
_FIXED = {
    "version": 2,
    "index_record_size": _RECORD.itemsize,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
}


class DeepSpecReader:
    """Samples in the order of samples.idx. Raises ValueError for a manifest or index that is damaged or of another version."""

    def __init__(self, root: Path, stamp: dict[str, str]) -> None:
        """stamp: of every file of the folder by name."""
        self.root = root
        manifest = _read_manifest(root / MANIFEST)
        self.hidden_size: int = manifest["hidden_size"]
        self.target_layer_ids: tuple[int, ...] = tuple(manifest["target_layer_ids"])
        self.target_name: str = str(manifest.get("target_model_name_or_path", ""))
        self.shard_files: list[str] = [shard["file_name"] for shard in manifest["shards"]]
        self._records = _read_index(root / INDEX, manifest["num_samples"])
        self._bytes: list[Tensor | str] = [_map_shard(root, name) for name in self.shard_files]
        shard_ids = self._records["shard_id"].tolist()
        files = [self.shard_files[shard] if shard < len(self.shard_files) else f"shard {shard}" for shard in shard_ids]
        self.names = [f"{shown_names([file])}, sample {index}" for index, file in enumerate(files)]
        index_stamp = f"{stamp.get(INDEX, '')},{stamp.get(MANIFEST, '')}"
        self.stamps = [f"{stamp.get(file, 'none')},{index_stamp}" for file in files]

    def read(self, index: int) -> tuple[RawSample, str]:
        """The sample and its format's name. Raises ValueError without the file's name."""
        record = {name: int(self._records[name][index]) for name in _RECORD.names or ()}
        length, shard = record["seq_len"], record["shard_id"]
        if shard >= len(self._bytes):
            raise ValueError(f"expected one of {len(self._bytes)} shards, found shard {shard} in {INDEX}")
        content = self._bytes[shard]
        if isinstance(content, str):
            raise ValueError(content)
        refuse_cut(self.root / self.shard_files[shard], len(content))
        if not length:
            raise ValueError(f"expected at least one token, found seq_len 0 in {INDEX}")
        L, D = len(self.target_layer_ids), self.hidden_size
        parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "input_ids": (torch.int32, (length,)),
            "attention_mask": (torch.uint8, (length,)),
            "loss_mask": (torch.uint8, (length,)),
            "hidden_states": (torch.bfloat16, (length, L * D)),
            "last_hidden": (torch.bfloat16, (length, D)),
        }
        found = {}
        for name, (dtype, shape) in parts.items():
            start, num_bytes = record[name], dtype.itemsize * int(np.prod(shape))
            if start + num_bytes > len(content):
                raise ValueError(
                    f"expected {name} in bytes {start} to {start + num_bytes}, found a shard of {len(content)}: truncated, or "
                    f"{INDEX} is of another"
                )
            found[name] = _view(content[start : start + num_bytes], dtype, shape)
        if not found.pop("attention_mask").all():
            raise ValueError("expected an attention_mask of ones, found padding inside the sample")
        return RawSample(**found), DEEPSPEC


def is_deepspec(root: Path) -> bool:
    """Whether the folder's manifest.json is DeepSpec's, by its content."""
    try:
        values = parse_json((root / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and {"index_record_size", "shards", "target_layer_ids"} <= set(values)


def _view(content: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # Samples follow each other unpadded: their int32 tokens need not lie at a multiple of 4, where torch has no view of them.
    if content.storage_offset() % dtype.itemsize:
        content = content.clone()
    return content.view(dtype).view(shape)


def _read_manifest(file: Path) -> dict[str, Any]:
    values = read_object(file)
    try:
        for name, expected in _FIXED.items():
            if values[name] != expected:
                raise ValueError(
                    f"{file}: expected {name} {expected}, found {shown(values[name])}; this version is not read"
                )
        layers, sizes = values["target_layer_ids"], [values["hidden_size"], values["num_samples"]]
        names = [shard["file_name"] for shard in values["shards"]]
        whole = all(
            isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 for value in [*layers, *sizes]
        )
        if not (layers and whole and sizes[0] and all(isinstance(name, str) for name in names)):
            raise TypeError("of sizes and file names")
        if [shard["shard_id"] for shard in values["shards"]] != list(range(len(names))):
            raise TypeError("of shards numbered from 0")
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: expected DeepSpec's manifest, found a damaged one ({one_line(error)}); copy it again"
        ) from error
    return values


def _read_index(file: Path, num_samples: int) -> NDArray[np.void]:
    size = file.stat().st_size if file.is_file() else -1
    if size != num_samples * _RECORD.itemsize:
        raise ValueError(
            f"{file}: expected {num_samples} records of {_RECORD.itemsize} bytes as {MANIFEST} says, found "
            f"{'no file' if size < 0 else f'{size} bytes'}; copy it again"
        )
    return np.fromfile(file, dtype=_RECORD)


def _map_shard(root: Path, name: str) -> Tensor | str:
    """The shard's bytes, or why it cannot be used."""
    file = root / name
    if not is_inside(root, name):
        return f"expected shards inside the folder, found {shown(name)} in {MANIFEST}"
    if not file.is_file() or not file.stat().st_size:
        return (
            "expected the shard's file, found none" if not file.is_file() else "expected a shard, found an empty file"
        )
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
