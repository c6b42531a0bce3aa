"""`dflash-engine graphs status`: are the graphs that graphs.json tells of those that the settings would capture now?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buffers.shapes import Bucket
from engine.assemble import drafter_config, make_plan, resolve_device, resolve_precision
from engine.data_source import open_training_data
from engine.fingerprints import bucket_fingerprints
from engine.graphs_record import held_out_words
from engine.reports import make_console
from engine.settings import Settings
from graphs.fingerprint import BUFFERS, Fingerprint
from graphs.record import FILE, Record, RecordError, read_record

FRESH, STALE, NOT_BUILT = "fresh", "stale", "not built"


def show_status(settings: Settings) -> dict[str, Any]:
    """Prints a line a bucket and returns the figures; "fresh" says whether every planned bucket is. Allocates nothing on a
    device."""
    device = resolve_device(settings.run.device)
    precision = resolve_precision(settings.run.precision, device)
    data = open_training_data(settings.data.folders, settings)
    config = drafter_config(settings, data.info)
    buckets = make_plan(settings, data, config, device).buckets
    wanted = bucket_fingerprints(settings, config, data.info, buckets, device, precision)
    folder, problem, record = Path(settings.run.output), None, None
    try:
        record = read_record(folder)
    except RecordError as error:
        problem = str(error)
    rows = states(wanted, record)
    console = make_console()
    told = f"generation {record.generation}" if record else problem or f"{folder / FILE}: no graphs were built"
    console.print(told, markup=False, soft_wrap=True)
    for row in rows:
        changed = "; ".join(f"{c['field']}: {_told(c['old'])} -> {_told(c['new'])}" for c in row["changes"])
        line = f"{row['bucket']}: {row['state']}" + (f" ({changed})" if changed else "")
        if row["state"] == FRESH:
            line += f", {row['how']}" + (f", {row['verified']}" if row["how"] == "replayed" and row["verified"] else "")
            line += held_out_words(row["held_out"])
        console.print(line, markup=False, soft_wrap=True)
    planned = {bucket.name for bucket in buckets}
    unplanned = [b.bucket for b in record.buckets if b.bucket not in planned] if record else []
    if unplanned:
        console.print(f"built before, planned no more: {', '.join(unplanned)}", markup=False, soft_wrap=True)
    return {
        "record": str(folder / FILE),
        "problem": problem,
        "generation": record.generation if record else None,
        "fresh": all(row["state"] == FRESH for row in rows),
        "buckets": rows,
        "unplanned": unplanned,
    }


def states(wanted: Mapping[Bucket, Fingerprint], record: Record | None) -> list[dict[str, Any]]:
    """A row a bucket: fresh, stale with what changed, or not built."""
    rows = []
    for bucket, fingerprint in wanted.items():
        known = record.bucket(bucket.name) if record else None
        changes = fingerprint.changes(known.fingerprint, ignore=(BUFFERS,)) if known else []
        rows.append(
            {
                "bucket": bucket.name,
                "state": NOT_BUILT if known is None else STALE if changes else FRESH,
                "changes": [{"field": c.field, "old": c.old, "new": c.new} for c in changes],
                "fingerprint": fingerprint.digest,
                "how": known.how if known else None,
                "verified": known.verified if known else None,
                "held_out": known.held_out if known else None,
            }
        )
    return rows


def _told(value: str | None) -> str:
    return "nothing" if value is None else value
