"""What a run says: metrics.jsonl, lines for people, and the table of its buckets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from buffers.batching import Batch
from buffers.shapes import Bucket
from graphs.timing import StepTime


class MetricsLog:
    """metrics.jsonl of a run: one JSON object a line, flushed as it is written."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        """Lines of steps after resume_step belong to work that will be done again: they are dropped."""
        kept = []
        if resume_step and path.is_file():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the line that was being written when the run died
                if record.get("step", 0) <= resume_step:
                    kept.append(line)
        self._file = path.open("w")
        self._file.writelines(line + "\n" for line in kept)
        self._file.flush()

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


@dataclass
class BucketCount:
    """Batches and tokens that a bucket has served."""

    batches: int = 0
    useful_tokens: int = 0
    slot_tokens: int = 0

    def add(self, batch: Batch) -> None:
        """Counts one batch."""
        self.batches += 1
        self.useful_tokens += sum(row.stop - row.start for row in batch.rows)
        self.slot_tokens += batch.bucket.B * batch.bucket.S


def bucket_rows(
    buckets: Iterable[Bucket], counts: Mapping[Bucket, BucketCount], times: Mapping[str, StepTime], how: str
) -> list[dict[str, Any]]:
    """One row a bucket: useful tokens/s is over the device time of its steps, padding over its context positions."""
    rows = []
    for bucket in buckets:
        count, time = counts.get(bucket, BucketCount()), times.get(f"train {bucket.name}", StepTime())
        device_s, steps = time.device_ms / 1e3, max(1, time.count)
        rows.append(
            {
                "bucket": bucket.name,
                "batches": count.batches,
                "useful_tokens_per_s": count.useful_tokens / device_s if device_s else 0.0,
                "padding": 1 - count.useful_tokens / count.slot_tokens if count.slot_tokens else 0.0,
                "device_ms": time.device_ms / steps,
                "host_ms": time.host_ms / steps,
                "how": how,
            }
        )
    return rows


def print_bucket_table(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """The rows of bucket_rows for people."""
    table = Table(title="buckets (rows x tokens x blocks)")
    for column in ("bucket", "batches", "useful tokens/s", "padding", "device ms", "host ms", "step"):
        table.add_column(column, justify="left" if column in ("bucket", "step") else "right")
    for r in rows:
        table.add_row(
            r["bucket"],
            str(r["batches"]),
            f"{r['useful_tokens_per_s']:,.0f}",
            f"{r['padding']:.1%}",
            f"{r['device_ms']:.2f}",
            f"{r['host_ms']:.3f}",
            r["how"],
        )
    console.print(table)
