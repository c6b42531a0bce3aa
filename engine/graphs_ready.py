"""From an assembled engine to graphs that may be used: compiled, captured, verified, and a record of it for graphs.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from buffers.batching import Batch
from buffers.shapes import Bucket
from engine.engine import Engine
from engine.engine_buffers import engine_buffers
from engine.graphs_record import record_of
from engine.laps import Laps
from engine.settings import Settings
from engine.verification import Feed, to_compare, verify_buckets
from graphs.fingerprint import BUFFERS, Fingerprint, addresses
from graphs.guards import kernels_compiled
from graphs.record import Record, RecordError, read_record
from graphs.steps import BuildReport

Say = Callable[[str], None]


def make_ready(
    engine: Engine,
    batches: Iterable[Batch],
    load: Callable[[Batch], None],
    *,
    settings: Settings,
    fingerprints: Mapping[Bucket, Fingerprint],
    laps: Laps,
    say: Say,
    estimates_mib: Mapping[Bucket, float] | None = None,
    reports: Sequence[BuildReport] | None = None,
    held_out: Feed | None = None,
) -> Record:
    """Builds the engine's graphs - unless `reports` say that they are - and compares every bucket with its eager step as
    run.verify says, on the first of `batches` of that bucket, and its evaluation on the first of `held_out`. Returns the
    record for run.output, not written yet (graphs.record.write_record); milliseconds come from the one that lies there under
    the same fingerprints. Raises CaptureError."""
    fingerprints = {bucket: found.with_field(BUFFERS, engine.generation) for bucket, found in fingerprints.items()}
    compiled = kernels_compiled()
    earlier = known_record(Path(settings.run.output), say)
    policy = settings.run.verify
    if reports is None:
        firsts = to_compare(engine, batches, policy=policy, fingerprints=fingerprints, known=earlier)
        reports = engine.build({bucket: partial(load, batch) for bucket, batch in firsts.items()})
        batches = chain(firsts.values(), batches)
    for report in reports:
        if report.why:
            say(f"{report.name} is called, not replayed: {report.why}")
    laps.end("capture", of_it=sum(report.warm_up_s for report in reports), other="compile")
    verified = verify_buckets(
        engine,
        batches,
        load,
        policy=policy,
        fingerprints=fingerprints,
        known=earlier,
        say=say,
        held_out=held_out,
    )
    laps.end("verify")
    return record_of(
        reports,
        fingerprints,
        verified,
        generation=engine.generation,
        phases_s=laps.seconds,
        kernels_compiled=kernels_compiled() - compiled,
        reserved_mib=torch.cuda.memory_reserved(engine.device) / 2**20 if engine.device.type == "cuda" else None,
        estimates_mib=estimates_mib,
        earlier=earlier,
    )


def known_record(folder: Path, say: Say) -> Record | None:
    """What graphs.json in `folder` says; None, and that is said, where it cannot be trusted."""
    try:
        return read_record(folder)
    except RecordError as error:
        say(str(error))
        return None


def lasting_addresses(engine: Engine) -> Fingerprint:
    """Where everything lies that outlives a generation and that its graphs hold on to."""
    return addresses((table, tensors) for table, tensors in engine_buffers(engine) if not table.startswith("tables"))


def refuse_moved(engine: Engine, captured: Fingerprint) -> None:
    """Raises ValueError naming the buffers that have moved since `captured` was taken: a replay would read and write memory
    that is no longer theirs."""
    moved = lasting_addresses(engine).changes(captured)
    if moved:
        raise ValueError(
            f"expected every buffer where the graphs were captured, found others: {'; '.join(map(str, moved[:3]))}; write into "
            "them in place"
        )
