"""One bucket's forward and backward: first that the replay is the eager step, then milliseconds, tokens and memory."""

from __future__ import annotations

from typing import Any

from bench.subjects import Subject
from bench.timing import host_ms, spread, times_ms
from engine.reports import make_console
from engine.work import step_flop
from graphs.guards import Counters, host_sync_is_an_error


def check_replay(subject: Subject) -> None:
    """Raises ValueError when the replay differs from the eager step in a bit. Leaves the inputs filled."""
    subject.fill()
    difference = subject.engine.verify(subject.bucket)
    if difference is not None:
        raise ValueError(
            f"bucket {subject.bucket.name}: the replay differs from the eager step in {difference.name} by "
            f"{difference.relative:.1e} of its largest value; no speed is shown"
        )
    subject.fill()


def measure_step(subject: Subject, repeats: int) -> dict[str, Any]:
    """The figures of one bucket's step, eager and replayed.

    Raises ValueError when the replay differs from the eager step, or allocates or compiles.
    """
    engine, bucket, name = subject.engine, subject.bucket, subject.step
    device, executor = engine.device, engine.executor
    make_console(stderr=True).print(f"measuring {bucket.name} ...")
    cuda = device.type == "cuda"
    held_gib = subject.memory.held_gib
    check_replay(subject)
    eager_peak_gib = None
    if not cuda:
        # On the CPU the step and its eager twin are one and the same call, and a slow one.
        eager = replay = times_ms(lambda: executor.call(name), device, repeats=min(repeats, 3), warm_ups=0)
        host = spread(eager)["median"], spread(eager)["median"]
    else:
        subject.memory.forget_peak()
        eager = times_ms(lambda: executor.call(name), device, repeats=max(3, repeats // 4))
        eager_peak_gib = subject.memory.peak_gib
        before = Counters.read(device)
        replay = times_ms(lambda: executor.run(name), device, repeats=repeats)
        with host_sync_is_an_error():
            for _ in range(3):
                executor.run(name)
        steady = Counters.read(device) - before
        if steady.device_allocations or steady.compilations:
            raise ValueError(
                f"bucket {bucket.name}: expected no allocation and no compilation while replaying, found {steady}"
            )
        host = (
            host_ms(lambda: executor.run(name), device, repeats=5),
            host_ms(lambda: executor.call(name), device, repeats=3),
        )
    flop = step_flop(engine.config, bucket, subject.seen)
    replay_ms, eager_ms = spread(replay)["median"], spread(eager)["median"]
    return {
        "bucket": bucket.name,
        "K": bucket.K,
        "how": subject.report.how,
        "attention": engine.ops.name,
        "precision": engine.precision,
        "recompute": engine.drafter.recompute,
        "equals_eager": True,
        "replay_ms": replay_ms,
        "replay_spread": spread(replay),
        "eager_ms": eager_ms,
        "eager_spread": spread(eager),
        "replay_host_ms": host[0],
        "eager_host_ms": host[1],
        "tokens_per_s": bucket.B * bucket.S / replay_ms * 1e3,
        "eager_tokens_per_s": bucket.B * bucket.S / eager_ms * 1e3,
        "useful_tokens_per_s": subject.useful_tokens / replay_ms * 1e3,
        "draft_tokens_per_s": bucket.B * bucket.Q / replay_ms * 1e3,
        "padding": 1 - subject.useful_tokens / (bucket.B * bucket.S),
        "tflop": flop / 1e12,
        "tflops": flop / replay_ms / 1e9,
        "held_gib": held_gib,
        "eager_peak_gib": eager_peak_gib,
        "pool_mib": subject.report.pool_mib,
        "exec_mib": subject.report.exec_mib,
        "nodes": subject.report.nodes,
        # Anything else would have raised before this.
        "host_syncs": 0,
        "device_allocations": 0,
        "compilations": 0,
        "warm_up_s": subject.report.warm_up_s,
        "capture_s": subject.report.capture_s,
    }
