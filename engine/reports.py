"""What a run says: metrics.jsonl, lines for people, and the table of its buckets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from buffers.arena import arena_table
from buffers.batching import Batch
from buffers.naming import naming
from buffers.shapes import Bucket
from buffers.untrusted import printable
from graphs.timing import StepTime

# A terminal folds what is too wide for it; rich would cut numbers off instead.
_WIDTH = 200


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Where lines and tables for people go: as wide as they need, whatever the terminal's width; with quiet, nowhere."""
    return PatientConsole(stderr=stderr, highlight=False, width=_WIDTH, quiet=quiet)


class PatientConsole(Console):
    """Where nobody reads stderr any more, what is printed there raises BrokenPipeError; rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich. On stdout the process ends in silence, as is the custom."""
        if self.stderr:
            raise
        super().on_broken_pipe()


def print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table whose first column is text and whose others are numbers or words, set to the right; sentences (`because`) are set
    to the left."""
    # rich would fold a title at the table's width.
    console.print(title, markup=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and column != "because" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def print_fields(console: Console, figures: Mapping[str, Any]) -> None:
    """A name and its value a line, the values in one column; numbers to four places (--json has them whole)."""
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        # An id is a name: no comma goes into it.
        text = str(value) if name.endswith("_id") and value is not None else spoken(value)
        console.print(f"{name:{width}}  {text}", markup=False, soft_wrap=True)


def spoken(value: Any) -> str:
    """A figure as a person reads it: `yes`, `21,174`, `0.6603`, `1, 2, 3`, and `-` for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < math.inf else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {spoken(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(spoken, value)) or "none"
    return printable(str(value))


class MetricsLog:
    """metrics.jsonl of a run: one JSON object a line, flushed as it is written."""

    def __init__(
        self,
        path: Path,
        *,
        resume_step: int,
        also: Callable[[Mapping[str, Any]], None] = lambda record: None,
        restored: Callable[[], None] = lambda: None,
    ) -> None:
        """Lines of steps after resume_step belong to work that will be done again: they are dropped. also: gets every record
        that is written, after the line. restored: called when the file was deleted or moved away, and is there again."""
        self._path, self._also, self._restored = path, also, restored
        self.kept: list[dict[str, Any]] = []
        if resume_step and path.is_file():
            for line in path.read_bytes().splitlines():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue  # the line that was being written when the run died
                step = record.get("step", 0) if isinstance(record, dict) else None
                if isinstance(step, int) and step <= resume_step:
                    self.kept.append(record)
        self._begin("".join(json.dumps(record) + "\n" for record in self.kept))

    def last(self, key: str) -> dict[str, Any]:
        """The last kept record that has `key`, {} without one."""
        return next((record for record in reversed(self.kept) if key in record), {})

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record. A number that is not finite becomes null: JSON has no word for it."""
        record = without_nan(record)
        if not self._path.exists():
            self._restore()
        with naming(self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        self._also(record)

    def close(self) -> None:
        """Ends the file. Raises OSError where what a failed write has left cannot be written either."""
        with naming(self._path):
            self._file.close()

    def _begin(self, text: str) -> None:
        # The old lines stay until the new file is whole.
        temporary = self._path.with_name(f".{self._path.name}.writing")
        with naming(self._path):
            temporary.write_text(text)
        temporary.replace(self._path)
        self._file = self._path.open("a+")

    def _restore(self) -> None:
        # An open file keeps its content when its name is gone.
        with self._file as lost:
            lost.seek(0)
            text = lost.read()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._begin(text)
        self._restored()


def without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with null for numbers that are not finite."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def write_buffers(path: Path, arenas: Iterable[tuple[str, Mapping[str, Tensor]]]) -> None:
    """The table of all long-lived buffers as text: arena, name, shape, dtype, MiB, address. Views of one arena overlap."""
    rows = [(r.arena, r.name, r.shape, r.dtype, f"{r.mib:.3f}", r.address) for r in arena_table(arenas)]
    rows.insert(0, ("arena", "name", "shape", "dtype", "MiB", "address"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    path.write_text("\n".join(lines) + "\n")


@dataclass
class BucketCount:
    """Batches and tokens that a bucket has served."""

    batches: int = 0
    useful_tokens: int = 0
    slot_tokens: int = 0

    def add(self, batch: Batch) -> None:
        """Counts one batch."""
        self.batches += 1
        self.useful_tokens += batch.useful_tokens
        self.slot_tokens += batch.bucket.B * batch.bucket.S


def bucket_rows(
    buckets: Iterable[Bucket],
    counts: Mapping[Bucket, BucketCount],
    times: Mapping[str, StepTime],
    how_of: Callable[[str], str],
    *,
    generation: int = 1,
) -> list[dict[str, Any]]:
    """One row a bucket: useful tokens/s is over the device time of its steps, padding over its context positions. how_of: what
    is done with a step of that name."""
    rows = []
    for bucket in buckets:
        count = counts.get(bucket, BucketCount())
        first, more = (times.get(f"{kind} {bucket.name}", StepTime()) for kind in ("train", "add"))
        time = first + more
        device_s, steps = time.device_ms / 1e3, max(1, time.count)
        rows.append(
            {
                "bucket": bucket.name,
                "batches": count.batches,
                "useful_tokens_per_s": count.useful_tokens / device_s if device_s else 0.0,
                "padding": 1 - count.useful_tokens / count.slot_tokens if count.slot_tokens else 0.0,
                "device_ms": time.device_ms / steps,
                "host_ms": time.host_ms / steps,
                "how": how_of(f"train {bucket.name}"),
                "generation": generation,
            }
        )
    return rows


def print_bucket_table(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """The rows of bucket_rows for people; the generation is told where there was more than one."""
    rows = list(rows)
    many = len({r["generation"] for r in rows}) > 1
    print_table(
        console,
        "buckets (rows x tokens x blocks)",
        (
            "bucket",
            *(["generation"] if many else []),
            "step",
            "batches",
            "useful tokens/device s",
            "padding",
            "device ms",
            "host ms",
        ),
        (
            (
                r["bucket"],
                *([str(r["generation"])] if many else []),
                r["how"],
                str(r["batches"]),
                f"{r['useful_tokens_per_s']:,.0f}",
                f"{r['padding']:.1%}",
                f"{r['device_ms']:.2f}",
                f"{r['host_ms']:.3f}",
            )
            for r in rows
        ),
    )
