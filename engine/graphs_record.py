"""From a built and verified engine to the record that graphs.json holds, and the table that people read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from buffers.shapes import Bucket
from engine.memory_estimate import GRAPH_EXEC
from engine.reports import print_table
from engine.verification import CALLED, Verified
from graphs.executor import BuildReport
from graphs.fingerprint import BUFFERS, Fingerprint
from graphs.pool_model import MIB
from graphs.record import BucketRecord, GraphFigures, Record

# A replay that is less than this much faster is as fast: clocks of a warm chip wander by as much.
SAME_SPEED = 1.02
KINDS = ("train", "add", "eval")


def record_of(
    reports: Iterable[BuildReport],
    fingerprints: Mapping[Bucket, Fingerprint],
    verified: Mapping[Bucket, Verified],
    *,
    generation: int = 1,
    phases_s: Mapping[str, float] | None = None,
    kernels_compiled: int | None = None,
    reserved_mib: float | None = None,
    estimates_mib: Mapping[Bucket, float] | None = None,
    earlier: Record | None = None,
) -> Record:
    """The record of a generation, buckets in the order of `fingerprints`. earlier: where a bucket's milliseconds come from when
    it has the same fingerprint there."""
    reports = list(reports)
    figures = {r.name: GraphFigures(r.name, r.nodes, r.pool_mib, r.exec_mib, r.warm_up_s, r.capture_s) for r in reports}
    by_name = {r.name: r for r in reports}
    buckets = []
    for bucket, fingerprint in fingerprints.items():
        names = [f"{kind} {bucket.name}" for kind in KINDS]
        first, outcome = next(by_name[name] for name in names if name in by_name), verified[bucket]
        graphs = tuple(figures.pop(name) for name in names if name in figures)
        held_out, evaluation = outcome.held_out, by_name.get(names[-1])
        if evaluation is not None and evaluation.why:
            held_out = f"called: {evaluation.why}"
        if outcome.held_out_refused or (evaluation is not None and evaluation.why):
            graphs = tuple(graph for graph in graphs if graph.name != names[-1])
        record = BucketRecord(
            bucket=bucket.name,
            fingerprint=fingerprint,
            how="called" if outcome.refused else first.how,
            why=outcome.how if outcome.refused else first.why,
            graphs=() if outcome.refused else graphs,
            verified="" if outcome.refused else outcome.how,
            verify_s=outcome.seconds,
            estimate_mib=(estimates_mib or {}).get(bucket),
            held_out=held_out,
        )
        buckets.append(_with_times(record, earlier))
    return Record(
        generation=generation,
        buckets=tuple(buckets),
        others=tuple(figures.values()),
        phases_s=tuple((phases_s or {}).items()),
        kernels_compiled=kernels_compiled,
        reserved_mib=reserved_mib,
        exec_estimate_mib=GRAPH_EXEC / MIB,
    )


def _with_times(record: BucketRecord, earlier: Record | None) -> BucketRecord:
    known = earlier.bucket(record.bucket) if earlier is not None else None
    if known is None or record.fingerprint.changes(known.fingerprint, ignore=(BUFFERS,)):
        return record
    return replace(
        record,
        eager_ms=known.eager_ms,
        replay_ms=known.replay_ms,
        eager_host_ms=known.eager_host_ms,
        replay_host_ms=known.replay_host_ms,
    )


def worth_it(bucket: BucketRecord) -> str:
    """What replaying this bucket gains, in words."""
    if bucket.how != "replayed":
        return bucket.how
    if not bucket.replay_ms:
        return "not measured"
    if bucket.eager_ms is None:
        return "no eager step fits beside the pool"
    gain, saved = bucket.eager_ms / bucket.replay_ms, bucket.host_ms_saved or 0.0
    if gain >= SAME_SPEED:
        return f"{gain:.2f} times as fast"
    return f"no gain on the device; frees {saved:.1f} ms of the host" if saved > 0 else "no gain"


def held_out_words(how: str | None) -> str:
    """How a bucket's evaluation was compared, to follow what is said of the bucket; "" where there is nothing to say."""
    return f"; held-out: {how}" if how and how != CALLED else ""


def bucket_figures(bucket: BucketRecord) -> dict[str, Any]:
    """One row of the report, for JSON and the table."""
    nodes = [graph.nodes for graph in bucket.graphs if graph.nodes is not None]
    return {
        "bucket": bucket.bucket,
        "how": bucket.how,
        "why": bucket.why,
        "fingerprint": bucket.fingerprint.digest,
        "graphs": [graph.name for graph in bucket.graphs],
        "nodes": sum(nodes) if nodes else None,
        "pool_mib": sum(graph.pool_mib for graph in bucket.graphs),
        "exec_mib": sum(graph.exec_mib for graph in bucket.graphs),
        "estimate_mib": bucket.estimate_mib,
        "warm_up_s": sum(graph.warm_up_s for graph in bucket.graphs),
        "capture_s": sum(graph.capture_s for graph in bucket.graphs),
        "verified": bucket.verified,
        "held_out": bucket.held_out,
        "verify_s": bucket.verify_s,
        "eager_ms": bucket.eager_ms,
        "replay_ms": bucket.replay_ms,
        "host_ms_saved": bucket.host_ms_saved,
        "worth": worth_it(bucket),
    }


def print_record(record: Record, console: Console) -> None:
    """The buckets of a generation as a table, then its phases."""
    columns = (
        ("kernels", "nodes", "d"),
        ("pool MiB", "pool_mib", ",.0f"),
        ("expected", "estimate_mib", ",.0f"),
        ("exec MiB", "exec_mib", ",.1f"),
        ("compile s", "warm_up_s", ".1f"),
        ("capture s", "capture_s", ".2f"),
        ("eager ms", "eager_ms", ".2f"),
        ("replay ms", "replay_ms", ".2f"),
        ("host ms saved", "host_ms_saved", ".2f"),
    )

    def cells(row: Mapping[str, Any]) -> Sequence[str]:
        numbers = ["-" if row[key] is None else format(row[key], form) for _, key, form in columns]
        compared = (row["verified"] or "not compared") + held_out_words(row["held_out"])
        return [row["bucket"], row["how"], *numbers, compared, row["worth"]]

    print_table(
        console,
        f"generation {record.generation}: graphs by bucket (rows x tokens x blocks); pool: what each added, the largest first",
        ("bucket", "step", *(name for name, _, _ in columns), "replay and eager", "worth it"),
        (cells(bucket_figures(bucket)) for bucket in reversed(record.buckets)),
    )
    for bucket in record.buckets:
        if bucket.why:
            console.print(f"{bucket.bucket} is {bucket.how}: {bucket.why}", markup=False, soft_wrap=True)
    if record.phases_s:
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in record.phases_s)
        console.print(f"seconds: {told}", markup=False, soft_wrap=True)
    if record.kernels_compiled is not None:
        console.print(f"kernels compiled anew: {record.kernels_compiled}", markup=False, soft_wrap=True)
