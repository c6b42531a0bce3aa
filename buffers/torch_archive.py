"""Files of torch.save, plain or gzipped, read without trusting them.

Only `torch.load(weights_only=True)` unpickles, and only after the archive's directory was compared with the file's size and
the pickle's opcodes were read (pickle_check.py), so that no header makes us take more memory than the file has bytes. A plain
file is mapped: its tensors are views of it. A gzipped one is decompressed into memory, at most GZIP_RATIO times its size.
"""

import gzip
import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buffers.pickle_check import check_pickle
from buffers.untrusted import one_line, shown_names

GZIP_MAGIC, ZIP_MAGIC = b"\x1f\x8b", b"PK\x03\x04"
# bf16 hidden states shrink to about three quarters; much more is no data of ours.
GZIP_RATIO = 256
_PICKLE_BYTES = 1 << 24
# What gzip raises for a stream that was damaged: zlib's own error is none of the others.
_GZIP_ERRORS = (OSError, EOFError, ValueError, zlib.error)


def load_archive(file: Path) -> dict[str, Any]:
    """The dictionary that torch.save wrote. Raises ValueError, without the file's name, when it is damaged, wants more than
    tensors and plain values, is no dictionary, or has tensors larger than the file."""
    with file.open("rb") as stream:
        magic = stream.read(4)
    content = _decompress(file) if magic[:2] == GZIP_MAGIC else None
    source = file if content is None else io.BytesIO(content)
    size = file.stat().st_size if content is None else len(content)
    _check_directory(source, magic if content is None else content[:4], size)
    try:
        if content is None:
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        else:
            values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the damage led it to
        raise ValueError(f"expected a whole file of torch.save, found a damaged one ({one_line(error)})") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected a dictionary of tensors, found {type(values).__name__}")
    for name, value in values.items():
        # A tensor with a stride of 0 takes no room in the file, and any amount once it is copied.
        if isinstance(value, Tensor) and value.numel() * value.element_size() > size:
            raise ValueError(
                f"expected {shown_names([name])} to fit the file's {size} bytes, found shape {list(value.shape)}"
            )
    return values


def gzip_holds_archive(file: Path) -> bool:
    """Whether what a gzipped file holds begins as a file of torch.save does."""
    try:
        with gzip.open(file) as stream:
            return stream.read(4) == ZIP_MAGIC
    except _GZIP_ERRORS:
        return False


def _decompress(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as stream:
        stream.seek(max(0, size - 4))
        told = struct.unpack("<I", stream.read(4).rjust(4, b"\0"))[0]
    # The trailer's length is modulo 2^32; a sample of 4 GiB is refused along with what claims to be one.
    limit = min(told, size * GZIP_RATIO)
    try:
        with gzip.open(file) as unpacked:
            content = unpacked.read(limit + 1)
    except _GZIP_ERRORS as error:
        raise ValueError(f"expected a whole gzip file, found a damaged one ({one_line(error)})") from error
    if len(content) > limit or told > limit:
        raise ValueError(f"expected gzip data of at most {limit} bytes, found more ({told} by its trailer)")
    return content


def _check_directory(source: Path | io.BytesIO, magic: bytes, size: int) -> None:
    if magic[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise ValueError(
            "expected a zip file of torch.save, found a bare pickle. Save it again with today's torch.save"
        )
    if magic != ZIP_MAGIC:
        raise ValueError("expected a file of torch.save, found " + ("an empty file" if not size else "other content"))
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.infolist()
            _check_entries(entries, size)
            (name,) = [entry.filename for entry in entries if entry.filename.endswith("/data.pkl")]
            content = archive.read(name)
    except _Refused:
        raise
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"expected a whole file of torch.save, found a truncated or damaged one ({one_line(error)})"
        ) from error
    data = name.removesuffix("data.pkl") + "data/"
    check_pickle(content, {e.filename.removeprefix(data): e.file_size for e in entries if e.filename.startswith(data)})


class _Refused(ValueError):
    pass


def _check_entries(entries: list[zipfile.ZipInfo], size: int) -> None:
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        raise _Refused("expected a zip file of torch.save, which stores its parts as they are, found compressed parts")
    pickles = [entry.file_size for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0] > _PICKLE_BYTES or sum(entry.file_size for entry in entries) > size:
        raise _Refused(f"expected a zip file of torch.save of {size} bytes, found parts that are not its own")
