"""Reading our dataset format: a folder with `dataset.json`, safetensors shards and the target's tensors.

A shard holds `input_ids` int32[T], `loss_mask` uint8[T], `hidden_states` bf16[T, L*D], `last_hidden` bf16[T, D] where
the dataset has soft labels, and `offsets` int64[n + 1], the token ranges of its n samples. Opening checks every header,
size, token id and loss mask and leaves the hidden states on disk; `verify` reads and hashes all of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers.dataset_writer import DatasetWriter
from buffers.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    TARGET_FILE,
    DatasetInfo,
    ShardInfo,
    check_tokens,
    mask_length_error,
    read_tensors,
    sha256,
    wrong_width_error,
)
from buffers.shard_file import ShardFile
from buffers.untrusted import is_inside, read_object, read_weight_map, shown

__all__ = [
    "FORMAT_VERSION",
    "Dataset",
    "DatasetInfo",
    "DatasetWriter",
    "Sample",
    "SampleSource",
    "ShardInfo",
    "load_target_tensors",
]

_TARGET_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Sample:
    """Tokens of one sample: input_ids int32[T], loss_mask uint8[T], hidden_states bf16[T, L*D], last_hidden bf16[T, D].

    The tensors may be views of a mapped file: do not write to them. `label`: what messages call the sample where its id would say
    little to a reader.
    """

    sample_id: int
    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor
    last_hidden: Tensor | None
    label: str = ""

    @property
    def name(self) -> str:
        """The sample in a message: "in sample <name>"."""
        return self.label or str(self.sample_id)


class SampleSource(Protocol):
    """What training reads: `Dataset`, or another trainer's files (buffers/foreign.py) or a mixture (buffers/mixture.py) in the
    same terms.

    `folders`: where the samples lie, one folder but for a mixture. `lengths`, `eligible_counts` (places for an anchor) and
    `supervised_counts` are int64[n] by sample id. `bad_files`: file -> why it is left out. `notes`: what a user should know
    of how the values are read.
    """

    folders: tuple[Path, ...]
    info: DatasetInfo
    lengths: NDArray[np.int64]
    eligible_counts: NDArray[np.int64]
    supervised_counts: NDArray[np.int64]
    notes: tuple[str, ...]
    bad_files: dict[str, str]

    @property
    def digest(self) -> str:
        """Tells one content and order of samples from another."""

    def __len__(self) -> int: ...

    def sample(
        self, i: int, start: int = 0, stop: int | None = None, into: Mapping[str, Tensor] | None = None
    ) -> Sample:
        """Tokens [start, stop) of sample i. into: memory for hidden_states and last_hidden, of which a source may make use;
        what has none there may be left unread."""


class Dataset:
    """A dataset folder, opened for reading. `lengths`, `eligible_counts` and `supervised_counts` are int64[n] by sample id.

    Everything but the hidden states' values is checked here; each fault is a ValueError with one line that names the
    file and, where there is one, the sample. Sample ids run over the shards in the manifest's order.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folders: tuple[Path, ...] = (self.path,)
        # A file that cannot be used is an error here.
        self.bad_files: dict[str, str] = {}
        self.notes: tuple[str, ...] = ()
        manifest = self.path / MANIFEST
        if not manifest.is_file():
            raise ValueError(
                f"expected a dataset with {MANIFEST} in {self.path}, found none. Check the path; a folder of shards "
                "without it was not finished: write it again."
            )
        try:
            self.info = DatasetInfo.from_json(manifest.read_bytes())
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        if not self.info.num_samples or not self.info.shards:
            raise ValueError(f"expected at least one sample in {self.path}, found none. Extract or convert some.")
        listed = sum(shard.num_samples for shard in self.info.shards)
        if listed != self.info.num_samples:
            raise ValueError(
                f"expected the shards of {manifest} to add up to {self.info.num_samples} samples, found {listed}. "
                "Write the dataset again."
            )
        self._first_ids = np.cumsum([0, *(shard.num_samples for shard in self.info.shards)])
        self._shards: list[ShardFile] = []
        self._offsets: list[NDArray[np.int64]] = []
        lengths, eligible_counts, supervised_counts = [], [], []
        for shard, first_id in zip(self.info.shards, self._first_ids[:-1].tolist(), strict=True):
            tensors = _open_shard(self.path, shard, self.info)
            offsets = _check_offsets(tensors["offsets"].numpy().copy(), shard)
            _check_shard_tokens(tensors, offsets, self.info.vocab_size, shard.file, first_id)
            read = {name: tensor for name, tensor in tensors.items() if name != "offsets"}
            self._shards.append(ShardFile(self.path / shard.file, shard.num_bytes, read))
            self._offsets.append(offsets)
            lengths.append(np.diff(offsets))
            mask = tensors["loss_mask"].numpy()
            eligible_counts.append(_eligible_counts(mask, offsets))
            supervised_counts.append(np.add.reduceat(mask, offsets[:-1], dtype=np.int64))
        self.lengths: NDArray[np.int64] = np.concatenate(lengths)
        self.eligible_counts: NDArray[np.int64] = np.concatenate(eligible_counts)
        self.supervised_counts: NDArray[np.int64] = np.concatenate(supervised_counts)

    @property
    def digest(self) -> str:
        """DatasetInfo.digest: sha256 over the shards' own."""
        return self.info.digest

    def __len__(self) -> int:
        return self.info.num_samples

    def sample(
        self, i: int, start: int = 0, stop: int | None = None, into: Mapping[str, Tensor] | None = None
    ) -> Sample:
        """Tokens [start, stop) of sample i, read now. into: as `ShardFile.read` takes it. Raises ValueError for a shard that was
        removed or cut since the dataset was opened, OSError for one that cannot be read."""
        stop = check_range(i, start, stop, self.lengths)
        shard = int(np.searchsorted(self._first_ids, i, side="right")) - 1
        first = int(self._offsets[shard][i - self._first_ids[shard]])
        found = self._shards[shard].read(first + start, first + stop, into)
        return Sample(i, found["input_ids"], found["loss_mask"], found["hidden_states"], found.get("last_hidden"))

    def verify(self) -> None:
        """Read every shard and compare its sha256 with the manifest. Raises ValueError naming the files that differ."""
        damaged = [shard.file for shard in self.info.shards if sha256(self.path / shard.file) != shard.sha256]
        if damaged:
            raise ValueError(
                f"expected the sha256 of {MANIFEST}, found another for {', '.join(damaged)}. Copy or write them again."
            )


def folder_names(dataset: SampleSource) -> str:
    """The dataset's folders in a message."""
    return ", ".join(map(str, dataset.folders))


def check_range(i: int, start: int, stop: int | None, lengths: NDArray[np.int64]) -> int:
    """`stop`, or the sample's end for None. Raises IndexError for no sample, ValueError for tokens that it has not."""
    if not 0 <= i < len(lengths):
        raise IndexError(f"expected a sample in 0..{len(lengths) - 1}, found {i}.")
    length = int(lengths[i])
    stop = length if stop is None else stop
    if not 0 <= start < stop <= length:
        raise ValueError(
            f"expected 0 <= start < stop <= {length} in sample {i}, found {start}..{stop}. Plan the batches with this dataset's "
            "lengths."
        )
    return stop


def load_target_tensors(path: str | Path) -> dict[str, Tensor]:
    """`embed_tokens.weight` [V, D], `lm_head.weight` [V, D] and `norm.weight` [D] of the target, as stored.

    `path` is a dataset folder or file with target.safetensors, or a Hugging Face checkpoint folder (one file or an
    index). A tied head is the embedding itself, the same tensor. Raises ValueError naming what is missing.
    """
    path = Path(path)
    own = path / TARGET_FILE if path.is_dir() else path
    if own.is_file():
        files = {own}
        names = {name: name for name in ("embed_tokens.weight", "lm_head.weight", "norm.weight")}
    else:
        names = {
            "embed_tokens.weight": "model.embed_tokens.weight",
            "lm_head.weight": "lm_head.weight",
            "norm.weight": "model.norm.weight",
        }
        index = path / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_weight_map(index)
            files = {path / weight_map[name] for name in names.values() if name in weight_map}
        else:
            files = {path / "model.safetensors"}
    found: dict[str, Tensor] = {}
    for file in sorted(files):
        if not file.is_file():
            raise ValueError(
                f"expected the target's tensors in {file}, found no such file. Give a folder with {TARGET_FILE} or a "
                "Hugging Face checkpoint."
            )
        stored = read_tensors(file, set(names.values()))
        found |= {name: stored[key] for name, key in names.items() if key in stored}
    config = path / "config.json"
    tied = not config.is_file() or read_object(config).get("tie_word_embeddings", True)
    if tied and "embed_tokens.weight" in found:
        found.setdefault("lm_head.weight", found["embed_tokens.weight"])
    missing = [key for name, key in names.items() if name not in found]
    if missing:
        raise ValueError(
            f"expected {', '.join(names.values())} in {path}, found no {', '.join(missing)}. Give the target's own "
            "checkpoint."
        )
    D = (*found["embed_tokens.weight"].shape, 0)[1]
    for name, tensor in found.items():
        axes = 1 if name == "norm.weight" else 2
        if tensor.ndim != axes or tensor.shape[-1] != D or tensor.dtype not in _TARGET_DTYPES:
            raise ValueError(
                f"expected {name} of {'[D]' if axes == 1 else '[V, D]'}, D {D}, in bf16, fp16 or fp32 in {path}, found "
                f"{_short(tensor.dtype)}{list(tensor.shape)}. Give the target's own checkpoint."
            )
    return found


def _open_shard(folder: Path, shard: ShardInfo, info: DatasetInfo) -> dict[str, Tensor]:
    """Map a shard whose file, size, names, dtypes and shapes are as the manifest says."""
    file = folder / shard.file
    if not is_inside(folder, shard.file):
        raise ValueError(
            f"expected shards inside {folder}, found {shown(shard.file)}. Move the file into the folder and name it there."
        )
    if not file.is_file():
        raise ValueError(f"expected shard {file}, found no such file. Copy it or write the dataset again.")
    size = file.stat().st_size
    if size != shard.num_bytes:
        raise ValueError(
            f"expected {shard.num_bytes} bytes in {file}, found {size}: truncated or half-written. "
            "Copy it or write the dataset again."
        )
    T, D = shard.num_tokens, info.hidden_size
    expected: dict[str, tuple[torch.dtype, list[int]]] = {
        "input_ids": (torch.int32, [T]),
        "loss_mask": (torch.uint8, [T]),
        "hidden_states": (torch.bfloat16, [T, info.num_taps * D]),
        "offsets": (torch.int64, [shard.num_samples + 1]),
    }
    if info.last_hidden_norm is not None:
        expected["last_hidden"] = (torch.bfloat16, [T, D])
    # Tensors are lazy views of the mapped file and outlive the handle.
    tensors = read_tensors(file, expected)
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise ValueError(
            f"expected {', '.join(expected)} in {file}, found no {', '.join(missing)}. Write the dataset again."
        )
    for name, (dtype, shape) in expected.items():
        found = tensors[name]
        if found.dtype != dtype:
            raise ValueError(
                f"expected {name} as {_short(dtype)} in {file}, found {_short(found.dtype)}. Convert the dataset."
            )
        if list(found.shape) == shape:
            continue
        if name == "loss_mask":
            raise ValueError(mask_length_error(str(file), T, list(found.shape)))
        if found.ndim == 2 and len(shape) == 2 and found.shape[0] == T:
            raise ValueError(wrong_width_error(f"{file}: {name}", shape, list(found.shape), info))
        raise ValueError(
            f"expected {name} of shape {shape} in {file}, found {list(found.shape)}. Write the dataset again."
        )
    return tensors


def _check_offsets(offsets: NDArray[np.int64], shard: ShardInfo) -> NDArray[np.int64]:
    # Compared, not subtracted: a difference may leave int64 and come back as a small one.
    falling = offsets[1:] <= offsets[:-1]
    if offsets[0] != 0 or offsets[-1] != shard.num_tokens or falling.any():
        raise ValueError(
            f"expected offsets in {shard.file} to rise from 0 to {shard.num_tokens} tokens, found {offsets[0]} to "
            f"{offsets[-1]}, {int(falling.sum())} of {shard.num_samples} samples not rising. "
            "Write the dataset again."
        )
    return offsets


def _check_shard_tokens(
    tensors: dict[str, Tensor], offsets: NDArray[np.int64], vocab_size: int, file: str, first_id: int
) -> None:
    ids, mask = tensors["input_ids"].numpy(), tensors["loss_mask"].numpy()
    if not len(ids):
        return
    if ids.min() >= 0 and ids.max() < vocab_size and mask.max() <= 1:
        return
    token = int(np.flatnonzero((ids < 0) | (ids >= vocab_size) | (mask > 1))[0])
    place = int(np.searchsorted(offsets, token, side="right")) - 1
    part = slice(offsets[place], offsets[place + 1])
    check_tokens(ids[part], mask[part], vocab_size, f"{file}, sample {first_id + place}")


def _eligible_counts(mask: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Anchor positions of each sample: pairs of supervised neighbours that do not cross the sample's end."""
    pairs_before = np.concatenate([[0], np.cumsum(mask[:-1] & mask[1:], dtype=np.int64)])
    return pairs_before[offsets[1:] - 1] - pairs_before[offsets[:-1]]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
