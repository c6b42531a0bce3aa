"""Reading every sample's tokens once, and remembering what was found.

Lengths and loss masks of other trainers' datasets are spread over as many files as there are samples. The first opening
reads them all (not the hidden states, but for gzipped files, which must be decompressed whole); the findings are kept
in `$XDG_CACHE_HOME/dflash-engine` (or ~/.cache/dflash-engine), one JSON file a dataset, and a file whose size and time of
change are those of last time is not read again. Removing the cache costs time, nothing else.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

from buffers.raw_sample import Measured, RawSample, measure

_VERSION = 1
_SAVE_EVERY_S = 30.0
_CHUNK = 256


class Reader(Protocol):
    """A foreign format's samples. `names` is for people, `stamps` changes with a sample's files; what the format does not
    say is empty or 0."""

    root: Path
    names: list[str]
    stamps: list[str]
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    target_name: str

    def read(self, index: int) -> tuple[RawSample, str]:
        """The sample and the name of its format. Raises ValueError without the file's name, and OSError."""


def scan(reader: Reader, progress: Callable[[int, int], None] | None = None) -> list[Measured]:
    """What opening must know of every sample. progress: called with samples done and all samples, as they are read."""
    known = _load(reader.root)
    found = [_known(known.get(name), stamp) for name, stamp in zip(reader.names, reader.stamps, strict=True)]
    missing = [index for index, measured in enumerate(found) if measured is None]
    saved = time.monotonic()
    # Threads: decompression and waiting for a disk leave the interpreter to the others.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for first in range(0, len(missing), _CHUNK):
            part = missing[first : first + _CHUNK]
            for index, measured in zip(part, pool.map(lambda i: _read(reader, i), part), strict=True):
                found[index] = measured
            if progress is not None:
                progress(len(found) - len(missing) + first + len(part), len(found))
            if time.monotonic() - saved > _SAVE_EVERY_S:
                _save(reader, found)
                saved = time.monotonic()
    if missing:
        _save(reader, found)
    return [measured for measured in found if measured is not None]


def _read(reader: Reader, index: int) -> Measured:
    try:
        return measure(*reader.read(index))
    except (ValueError, OSError, MemoryError) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    except Exception as error:  # whatever a hostile or damaged file leads torch, numpy or pyarrow to
        text = f"expected a sample, found one that cannot be read ({type(error).__name__}: {str(error)[:160]})"
    return Measured(reason=" ".join(text.split()))


def _cache_file(root: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-engine"
    return cache / f"{hashlib.sha256(str(root.resolve()).encode(errors='surrogateescape')).hexdigest()[:24]}.json"


def _load(root: Path) -> dict[str, Any]:
    """Records by name, {} when there are none to be had."""
    try:
        values = json.loads(_cache_file(root).read_bytes())
        return values["samples"] if values["version"] == _VERSION else {}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _known(record: Any, stamp: str) -> Measured | None:
    # What could not be read is tried again: a disk that was away says nothing about the file.
    try:
        if record["stamp"] != stamp or record["reason"]:
            return None
        return Measured(**{field.name: _typed(record[field.name], field.type) for field in fields(Measured)})
    except (KeyError, TypeError):
        return None


def _typed(value: Any, kind: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _save(reader: Reader, found: Sequence[Measured | None]) -> None:
    """Keeps the findings; a place that cannot be written is no fault, only slower next time."""
    try:
        file = _cache_file(reader.root)
        file.parent.mkdir(parents=True, exist_ok=True)
        records = {
            name: {"stamp": stamp} | asdict(measured)
            for name, stamp, measured in zip(reader.names, reader.stamps, found, strict=True)
            if measured is not None
        }
        # Runs that open the same data at the same time each write their own, and the last one stays.
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"version": _VERSION, "path": str(reader.root), "samples": records}))
        temporary.replace(file)
    except (OSError, RuntimeError, UnicodeError):
        return
