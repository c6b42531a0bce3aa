"""Parts of a file, read with pread instead of mapped.

A page of a mapped file that was cut is a SIGBUS, which ends the process without a word; a read of it comes up short and can be
said. It is no slower: the bytes go straight to where they are wanted, without a page fault for every few pages of the file.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from buffers.naming import naming

# Linux reads a little less than 2 GiB in one call.
_MOST_BYTES = 1 << 30


class ShardFile:
    """Rows of a safetensors file whose header was checked. `num_bytes`: its size then. It is opened for each read, so that a
    dataset may have any number of shards."""

    def __init__(self, file: Path, num_bytes: int, tensors: Mapping[str, Tensor]) -> None:
        """tensors: those to read, as the header tells their types and shapes, all with the same number of rows."""
        self.file, self.num_bytes = file, num_bytes
        offsets = tensor_offsets(file)
        self._places = {name: _Place(offsets[name], t.dtype, tuple(t.shape[1:])) for name, t in tensors.items()}

    def read(self, first: int, stop: int, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Rows [first, stop) of every tensor. into: memory for the hidden states by name; those that have none there are left
        unread, and memory that is not of their type and size is not used. Raises as `read_parts` does."""
        found = {}
        for name, place in self._places.items():
            given = None
            if into is not None and name in ("hidden_states", "last_hidden"):
                if name not in into:
                    continue
                given = into[name]
            shape = (stop - first, *place.shape)
            fits = given is not None and given.dtype == place.dtype and given.shape == shape and given.is_contiguous()
            found[name] = given if given is not None and fits else torch.empty(shape, dtype=place.dtype)
        parts = ((self._places[name].at(first), tensor) for name, tensor in found.items())
        read_parts(self.file, self.num_bytes, parts)
        return found


@dataclass(frozen=True)
class _Place:
    """Where a tensor [T, ...] begins in the file, its type and the shape of a row."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def at(self, row: int) -> int:
        """Where a row begins."""
        return self.offset + row * self.dtype.itemsize * torch.Size(self.shape).numel()


def tensor_offsets(file: Path) -> dict[str, int]:
    """Where each tensor of a safetensors file begins, in bytes from the file's first. The header was checked before."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {name: 8 + length + int(header[name]["data_offsets"][0]) for name in header if name != "__metadata__"}


def read_parts(file: Path, num_bytes: int, parts: Iterable[tuple[int, Tensor]]) -> None:
    """Fills contiguous tensors on the host, each from its offset in a file that had `num_bytes`. Raises ValueError when the file
    is gone or was cut since then, OSError with its name when it cannot be read."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ValueError(
            f"expected {file} as when it was opened, found no such file: it was removed or renamed. Put it back or write it "
            "again."
        ) from error
    try:
        with naming(file):
            size = os.fstat(descriptor).st_size
            if size < num_bytes:
                raise _cut(file, size, num_bytes)
            for offset, tensor in parts:
                content = tensor.view(-1).view(torch.uint8).numpy().data
                done = 0
                while done < len(content):
                    count = os.preadv(descriptor, [content[done : done + _MOST_BYTES]], offset + done)
                    if not count:
                        raise _cut(file, offset + done, num_bytes)
                    done += count
    finally:
        os.close(descriptor)


def _cut(file: Path, now: int, num_bytes: int) -> ValueError:
    return ValueError(
        f"expected {num_bytes} bytes in {file} as when it was opened, found {now}: it was cut or is being written over. "
        "Copy it or write it again."
    )
