"""What a graph was captured from, as named fields: two that agree in all of them are the same graph."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

# Counts within one process; in a new one every buffer is new, and so is every graph.
BUFFERS = "buffers"


@dataclass(frozen=True)
class Change:
    """One field that differs; None where a side does not have it."""

    field: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        return f"{self.field}: {_told(self.old)} -> {_told(self.new)}"


@dataclass(frozen=True)
class Fingerprint:
    """Fields by name, ascending, each value as text."""

    fields: tuple[tuple[str, str], ...]

    @staticmethod
    def of(fields: Mapping[str, object]) -> Fingerprint:
        """From names and values; whatever str() tells apart is another fingerprint."""
        return Fingerprint(tuple(sorted((name, str(value)) for name, value in fields.items())))

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the SHA-256 of all fields."""
        return hashlib.sha256(json.dumps(self.fields).encode()).hexdigest()[:16]

    def changes(self, old: Fingerprint, *, ignore: Collection[str] = ()) -> list[Change]:
        """What is otherwise than in `old`, by name; empty: the same."""
        before, now = dict(old.fields), dict(self.fields)
        names = sorted(name for name in before.keys() | now.keys() if name not in ignore)
        return [Change(name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)]

    def with_field(self, name: str, value: object) -> Fingerprint:
        """The same with one field set."""
        return Fingerprint.of(dict(self.fields) | {name: value})

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return dict(self.fields)


def hash_of_files(paths: Iterable[Path]) -> str:
    """Sixteen hexadecimal digits over the names and bytes of files; their order does not matter."""
    total = hashlib.sha256()
    for path in sorted(set(paths)):
        total.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def addresses(tables: Iterable[tuple[str, Mapping[str, Tensor]]]) -> Fingerprint:
    """Where named tensors lie and how: what a graph holds on to. Another one than at capture: that graph must not replay."""
    return Fingerprint.of(
        {
            f"{table}.{name}": f"{tensor.data_ptr():#x} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            for table, tensors in tables
            for name, tensor in tensors.items()
        }
    )


def _told(value: str | None) -> str:
    return "nothing" if value is None else value
