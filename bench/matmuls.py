"""A graph of a step's bare matmuls, on random data: what the step would take if all else were free."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.chip import ChipLog, sustained
from bench.subjects import Subject
from bench.timing import spread, times_ms
from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig

TURNS = 4
Shapes = list[tuple[int, int, int, int]]


def step_matmuls(config: DrafterConfig, bucket: Bucket, *, whole: bool = True) -> Shapes:
    """(count, M, N, K) of every matmul of forward and backward over a batch; attention is not among them.

    A trained weight [O, I] over R rows takes [R, O, I] forward, [R, I, O] for the input gradient, [O, I, R] for its own; fc
    needs no input gradient, the frozen head over slots 1..K-1 no weight gradient. whole: every layer counts whole; otherwise
    as the engine computes it, with one row for all mask slots of layer 0's q, k, v and no slot 0 in the last layer's MLP.
    """
    D, E, layers = config.hidden_size, config.head_dim, config.num_hidden_layers
    HE, GE, inter = config.num_attention_heads * E, config.num_key_value_heads * E, config.intermediate_size
    blocks, draft, context = bucket.B * bucket.N, bucket.B * bucket.Q, bucket.B * bucket.S
    predicting = draft - blocks
    first, last = (draft, draft) if whole else (blocks + 1, predicting)
    shapes = []
    for R, edge, out, into in (
        (draft, first, HE + 2 * GE, D),
        (context, context, 2 * GE, D),
        (draft, draft, D, HE),
        (draft, last, 2 * inter, D),
        (draft, last, D, inter),
    ):
        for count, at in ((layers, R),) if edge == R else ((layers - 1, R), (1, edge)):
            shapes += [(count, at, out, into), (count, at, into, out), (count, out, into, at)]
    taps = config.num_taps * D
    shapes += [(1, context, D, taps), (1, D, taps, context)]
    return [*shapes, (1, predicting, config.vocab_size, D), (1, predicting, D, config.vocab_size)]


def matmul_flop(shapes: Shapes) -> float:
    """Floating-point operations, 2 a multiply-add."""
    return sum(2.0 * count * M * N * K for count, M, N, K in shapes)


def bare_matmul_graph(
    config: DrafterConfig, bucket: Bucket, device: torch.device, chunk_rows: int
) -> Callable[[], None]:
    """Captures the matmuls of step_matmuls, the head's in chunks as the step runs them; returns the replay."""
    work = []
    for count, M, N, K in step_matmuls(config, bucket):
        wide = max(M, N, K) == config.vocab_size
        chunks = -(-M // chunk_rows) if wide else 1
        rows = min(M, chunk_rows) if wide else M
        a = torch.randn(rows, K, device=device, dtype=torch.bfloat16)
        b = torch.randn(K, N, device=device, dtype=torch.bfloat16)
        work.append((count * chunks, a, b, torch.empty(rows, N, device=device, dtype=torch.bfloat16)))

    def run() -> None:
        for count, a, b, out in work:
            for _ in range(count):
                torch.mm(a, b, out=out)

    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def beside_bare_matmuls(subject: Subject, head_chunk: int, repeats: int, log: ChipLog) -> dict[str, Any]:
    """The replay and a graph of its bare matmuls in turns: the chip's clock falls as it grows warm, for both alike. Then each for
    some seconds, with clock and power."""
    engine, device = subject.engine, subject.engine.device
    replay = partial(engine.executor.run, subject.step)
    matmuls = bare_matmul_graph(engine.config, subject.bucket, device, head_chunk)
    ours, bare = [], []
    for _ in range(TURNS):
        ours += times_ms(replay, device, repeats=-(-repeats // TURNS), warm_ups=1)
        bare += times_ms(matmuls, device, repeats=-(-repeats // TURNS), warm_ups=1)
    ours_ms, bare_ms = spread(ours)["median"], spread(bare)["median"]
    whole, own = (matmul_flop(step_matmuls(engine.config, subject.bucket, whole=w)) for w in (True, False))
    return {
        "bare_matmuls_ms": bare_ms,
        "bare_matmuls_tflop": whole / 1e12,
        "own_matmuls_tflop": own / 1e12,
        "beside_bare_matmuls_ms": ours_ms,
        "over_bare_matmuls": ours_ms / bare_ms,
        "sustained": sustained(replay, device, log),
        "bare_matmuls_sustained": sustained(matmuls, device, log),
    }
