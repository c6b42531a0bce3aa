"""graphs.json: what a generation of graphs was captured from, how it was verified, and what it costs and wins.

The graphs die with their process; this file is what is known of them afterwards. It is written whole or not at all, and
believed only when every part of it is as it was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from buffers.untrusted import parse_json, shown
from graphs.fingerprint import Fingerprint

FILE = "graphs.json"
VERSION = 2
_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
_MOST = 2**53


class RecordError(ValueError):
    """graphs.json is there and cannot be trusted; says why and what to do."""


@dataclass(frozen=True)
class GraphFigures:
    """One captured step. nodes: its kernels, None where they could not be counted; pool_mib: what its capture added to the
    memory that torch holds; exec_mib: what the device had less of for the executable graph."""

    name: str
    nodes: int | None
    pool_mib: float
    exec_mib: float
    warm_up_s: float
    capture_s: float


@dataclass(frozen=True)
class BucketRecord:
    """All graphs of one bucket. how: replayed or called; why: the reason that it is called where others are replayed. verified:
    how its replay was compared with the eager step, "" if it was not; held_out: the same of its evaluation. Milliseconds
    are of a first micro-batch's forward and backward, None where they were not measured. estimate_mib: what was expected of the
    pool for this bucket."""

    bucket: str
    fingerprint: Fingerprint
    how: str
    graphs: tuple[GraphFigures, ...]
    verified: str = ""
    verify_s: float = 0.0
    eager_ms: float | None = None
    replay_ms: float | None = None
    eager_host_ms: float | None = None
    replay_host_ms: float | None = None
    estimate_mib: float | None = None
    why: str = ""
    held_out: str = ""

    @property
    def host_ms_saved(self) -> float | None:
        """Host time that a replay saves."""
        if self.eager_host_ms is None or self.replay_host_ms is None:
            return None
        return self.eager_host_ms - self.replay_host_ms


@dataclass(frozen=True)
class Record:
    """A generation: its number in its process, its buckets, the steps that are no bucket's, seconds by phase, kernels compiled
    anew and memory held at the end. exec_estimate_mib: what was expected of one executable graph."""

    generation: int
    buckets: tuple[BucketRecord, ...]
    others: tuple[GraphFigures, ...] = ()
    phases_s: tuple[tuple[str, float], ...] = ()
    kernels_compiled: int | None = None
    reserved_mib: float | None = None
    exec_estimate_mib: float | None = None

    def bucket(self, name: str) -> BucketRecord | None:
        """The bucket of that name."""
        return next((bucket for bucket in self.buckets if bucket.bucket == name), None)

    def verified_before(
        self, name: str, held_out: bool, fingerprint: Fingerprint, *, ignore: tuple[str, ...] = ()
    ) -> str:
        """How this bucket, or its evaluation, was verified under this very fingerprint; "" if it was not."""
        known = self.bucket(name)
        if known is None or fingerprint.changes(known.fingerprint, ignore=ignore):
            return ""
        return known.held_out if held_out else known.verified


def write_record(folder: Path, record: Record) -> Path:
    """graphs.json in `folder`, which is made; whole or not at all, whenever the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    content = _to_json(record)
    text = json.dumps(
        {"format": "dflash-engine graphs", "version": VERSION, "sha256": _hash(content), **content}, indent=1
    )
    path, temporary = folder / FILE, folder / f".{FILE}.{os.getpid()}"
    try:
        with temporary.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_record(folder: Path) -> Record | None:
    """The record in `folder`, None without one. Raises RecordError for one that is truncated, damaged or of another
    version."""
    path = folder / FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _untrusted(path, error.strerror or str(error)) from error
    try:
        found = parse_json(text)
    except ValueError as error:
        raise _untrusted(path, f"a truncated or damaged one ({error})") from error
    if not isinstance(found, dict) or "version" not in found:
        raise _untrusted(path, "something else")
    if found["version"] is True or found["version"] != VERSION:
        raise _untrusted(path, f"version {shown(found['version'])}, not {VERSION}")
    content = {name: value for name, value in found.items() if name not in ("format", "version", "sha256")}
    if found.get("sha256") != _hash(content):
        raise _untrusted(path, "one that was changed after it was written")
    try:
        return _from_json(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _untrusted(path, f"one without all of its parts ({shown(error)})") from error


def _to_json(record: Record) -> dict[str, Any]:
    buckets = [
        asdict(replace(bucket, fingerprint=Fingerprint(())))
        | {
            "fingerprint": bucket.fingerprint.to_dict(),
            "digest": bucket.fingerprint.digest,
            "host_ms_saved": bucket.host_ms_saved,
            "graphs": [asdict(graph) for graph in bucket.graphs],
        }
        for bucket in record.buckets
    ]
    return {
        "generation": record.generation,
        "buckets": buckets,
        "others": [asdict(graph) for graph in record.others],
        "phases_s": dict(record.phases_s),
        "kernels_compiled": record.kernels_compiled,
        "reserved_mib": record.reserved_mib,
        "exec_estimate_mib": record.exec_estimate_mib,
    }


def _from_json(content: dict[str, Any]) -> Record:
    def bucket(found: dict[str, Any]) -> BucketRecord:
        known = _plain(BucketRecord, found)
        known["fingerprint"] = Fingerprint.of(_words(found["fingerprint"]))
        known["graphs"] = tuple(GraphFigures(**_plain(GraphFigures, graph)) for graph in found["graphs"])
        return BucketRecord(**known)

    return Record(
        buckets=tuple(bucket(found) for found in content["buckets"]),
        others=tuple(GraphFigures(**_plain(GraphFigures, graph)) for graph in content["others"]),
        phases_s=tuple((name, _of_kind(name, seconds, "float")) for name, seconds in content["phases_s"].items()),
        **_plain(Record, content),
    )


def _plain(kind: type[Any], found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that hold a word or a number, each of its type. Raises KeyError and TypeError."""
    plain = {field.name: str(field.type) for field in fields(kind) if str(field.type).split(" | ")[0] in _KINDS}
    return {name: _of_kind(name, found[name], types) for name, types in plain.items()}


def _of_kind(name: str, value: Any, types: str) -> Any:
    if value is None and types.endswith(" | None"):
        return None
    if not isinstance(value, _KINDS[types.split(" | ")[0]]) or isinstance(value, bool):
        raise TypeError(f"{name} of {shown(value, 40)}")
    # NaN is in no range.
    if isinstance(value, int | float) and not -_MOST <= value <= _MOST:
        raise TypeError(f"{name} of {shown(value, 40)}")
    return value


def _words(found: dict[str, Any]) -> dict[str, str]:
    return {name: _of_kind(name, value, "str") for name, value in found.items()}


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _untrusted(path: Path, found: str) -> RecordError:
    return RecordError(f"{path}: expected what was written of captured graphs, found {found}; build them again")
