"""A safetensors file written piece by piece: checked, hashed and written in one pass over the memory, in a thread beside others.

A piece at a time goes through numpy, hashlib and the system, which all let go of the interpreter's lock for its length; the
library's own writer copies every tensor into a bytes object first and holds the lock meanwhile. Layout: the format's
specification, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE_BYTES = 1 << 22  # stays in a processor's cache from the first of the three to the last
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64"}


@dataclass(frozen=True)
class WrittenFile:
    """Its size and SHA-256, in hexadecimal digits."""

    num_bytes: int
    sha256: str


class NonFinite(ValueError):
    """names: the tensors that hold NaN or infinity."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"NaN or infinity in {', '.join(names)}")
        self.names = names


def write_tensors(file: Path, tensors: Mapping[str, Tensor], between: Callable[[], None] = lambda: None) -> WrittenFile:
    """Writes contiguous fp32, fp64 and int64 tensors on the host, the widest first, so that each lies aligned. between: called
    between two pieces; what it raises ends the writing. Raises NonFinite for floats that are not finite, all of them named, and
    OSError."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered.items():
        assert tensor.is_contiguous() and tensor.device.type == "cpu", f"{name} is not contiguous on the host"
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest, wrong = hashlib.sha256(), list[str]()
    try:
        with file.open("wb", buffering=0) as out:
            _put(out.write, digest.update, memoryview(len(head).to_bytes(8, "little") + head))
            for name, tensor in ordered.items():
                for piece in _pieces(tensor):
                    between()
                    if tensor.is_floating_point() and not _finite(piece):
                        wrong.append(name)
                        break
                    if not wrong:
                        _put(out.write, digest.update, piece.data.cast("B"))
    except OSError as error:
        raise OSError(f"could not write {file}: {error}. Make room or choose another folder.") from error
    if wrong:
        raise NonFinite(wrong)
    return WrittenFile(8 + len(head) + end, digest.hexdigest())


def _pieces(tensor: Tensor) -> Iterator[NDArray[np.generic]]:
    flat = tensor.detach().reshape(-1).numpy()
    count = PIECE_BYTES // flat.itemsize
    return (flat[first : first + count] for first in range(0, len(flat), count))


def _finite(values: NDArray[np.generic]) -> bool:
    """Minimum and maximum both propagate NaN; no temporaries, and one core, where torch would take all."""
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def _put(write: Callable[[memoryview], int | None], hashed: Callable[[memoryview], None], data: memoryview) -> None:
    hashed(data)
    while data:
        data = data[write(data) :]
