"""Attention alone: Triton's against compiled flex_attention, forward and backward, on the shapes of W1, W2 and W3.

    python -m bench.attention [--workload W2 ...] [--repeats 20] [--out FILE] [--sweep]

First both are compared with fp64 on a few heads and blocks of the same shape, and with each other on the whole; a speed is
shown only after that. Times are of replayed graphs, so that no launch is counted; flex's mask is built beforehand. TFLOP/s
count the pairs that the mask lets through: 4 * H * E forward and 10 * H * E backward for each.

--sweep times tile sizes instead, one kernel after the other, to choose the table of engine/ops/attention_tiles.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.timing import median_ms, provenance, write_result
from bench.workloads import WORKLOADS
from buffers.anchors import sample_anchors
from engine.mask import DraftMask
from engine.ops.attention import _card, attention, attention_backward, attention_forward
from engine.ops.attention_ref import attention_ref
from engine.ops.attention_tiles import Tile, Tiles, tiles_for

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Attention = Callable[..., Tensor]

NAMES = ("o", "dq", "dk_context", "dv_context", "dk_draft", "dv_draft")
G, E = 8, 128
DTYPE = torch.bfloat16
# Half a unit in the last place of bf16, relative.
ROUNDING = 2.0**-9
# Two bf16 results may differ by as much as each differs from the truth, and dk and dv sum thousands of rows.
LARGEST_DIFFERENCE = 2e-2
# What is measured of each kernel in a sweep: (rows, keys, warps, stages).
SWEEP: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "forward": (
        (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (64, 64, 4, 2),
        (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 8, 4), (64, 32, 4, 4),
    ),
    "dkv": (
        (64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 3), (32, 128, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3),
        (32, 64, 4, 3), (32, 64, 4, 2), (64, 64, 8, 3), (128, 64, 8, 2),
    ),
    "dq": (
        (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 4), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 32, 4, 3), (64, 32, 4, 4), (128, 128, 8, 1),
    ),
}  # fmt: skip
SWEEP_SPLITS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Shape:
    """One call: one row of S context tokens with N blocks of K, H heads over G kv heads."""

    name: str
    S: int
    N: int
    K: int
    H: int
    G: int = G

    def mask(self, device: torch.device) -> DraftMask:
        """Anchors uniform, seed 0, every token supervised."""
        anchors, keep = sample_anchors(np.arange(self.S - 1), self.N, seed=0, epoch=0, sample_id=0)
        numbers = torch.from_numpy(anchors)[None].to(device), torch.from_numpy(keep)[None].to(device)
        return DraftMask(*numbers, torch.zeros_like(numbers[0]), self.K)

    def inputs(self, device: torch.device) -> tuple[Inputs, Tensor]:
        """Random (q, k_context, v_context, k_draft, v_draft) and do, bf16."""
        generator = torch.Generator(device).manual_seed(0)

        def rows(length: int, heads: int) -> Tensor:
            return torch.randn(1, length, heads, E, device=device, generator=generator).to(DTYPE)

        Q = self.N * self.K
        context = rows(self.S, self.G), rows(self.S, self.G)
        return (rows(Q, self.H), *context, rows(Q, self.G), rows(Q, self.G)), rows(Q, self.H)

    def flop(self) -> int:
        """Of the forward: 4 * H * E for each (query, key) pair that the mask lets through."""
        mask = self.mask(torch.device("cpu"))
        pairs = int((mask.anchor_positions.long() * (mask.block_keep_mask > 0)).sum()) * self.K + self.N * self.K**2
        return 4 * self.H * E * pairs


def shapes() -> dict[str, Shape]:
    """W1, W2, W3, and W2 with a context of 8192."""
    named = {w.name: Shape(w.name, w.S, w.N, w.K, w.num_attention_heads) for w in WORKLOADS.values()}
    return named | {"W2@8192": replace(named["W2"], name="W2@8192", S=8192)}


def ours(mask: DraftMask) -> Attention:
    """Triton's attention under this mask."""

    def call(q: Tensor, k_context: Tensor, v_context: Tensor, k_draft: Tensor, v_draft: Tensor) -> Tensor:
        return attention(q, k_context, v_context, k_draft, v_draft, mask)

    return call


def plain(mask: DraftMask) -> Attention:
    """The reference under this mask."""

    def call(q: Tensor, k_context: Tensor, v_context: Tensor, k_draft: Tensor, v_draft: Tensor) -> Tensor:
        return attention_ref(q, k_context, v_context, k_draft, v_draft, mask)

    return call


def flex(mask: DraftMask, S: int) -> Attention | None:
    """Compiled flex_attention under this mask, its tiles built; None where the module is missing."""
    try:
        from engine.ops.attention_flex import attention_flex, block_mask
    except ImportError:
        return None
    tiles = block_mask(mask, S, window=None, causal=False)

    def call(q: Tensor, k_context: Tensor, v_context: Tensor, k_draft: Tensor, v_draft: Tensor) -> Tensor:
        return attention_flex(q, k_context, v_context, k_draft, v_draft, tiles)

    return call


def results(call: Attention, inputs: Inputs, do: Tensor, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    """o and five gradients of a call, computed in dtype."""
    wanted = [x.detach().to(dtype).requires_grad_() for x in inputs]
    o = call(*wanted)
    return [o.detach(), *torch.autograd.grad(o, wanted, do.to(dtype))]


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Relative error in the norm, of each result."""
    return {
        name: ((a.double() - b.double()).norm() / b.double().norm()).item()
        for name, a, b in zip(NAMES, found, expected, strict=True)
    }


def check(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Errors against fp64 on one kv head and 64 blocks, and the difference from flex on the whole.

    Raises ArithmeticError where Triton's error exceeds twice that of flex (or of plain torch, without flex) and rounding.
    """
    few = replace(shape, N=64, H=shape.H // shape.G, G=1)
    inputs, do = few.inputs(device)
    mask = few.mask(device)

    exact = results(plain(mask), inputs, do, torch.float64)
    found = errors(results(ours(mask), inputs, do), exact)
    other = flex(mask, few.S)
    theirs = errors(results(other or plain(mask), inputs, do), exact)
    for name in NAMES:
        if not found[name] <= 2 * theirs[name] + ROUNDING:
            raise ArithmeticError(
                f"{shape.name}: error of {name} is {found[name]:.2e}, of the other {theirs[name]:.2e}"
            )
    figures: dict[str, Any] = {"error": found, "error_of_" + ("flex" if other else "torch"): theirs}

    inputs, do = shape.inputs(device)
    mask = shape.mask(device)
    if other := flex(mask, shape.S):
        apart = errors(results(ours(mask), inputs, do), results(other, inputs, do))
        if not max(apart.values()) <= LARGEST_DIFFERENCE:
            raise ArithmeticError(f"{shape.name}: Triton and flex differ by {apart}")
        figures["difference_from_flex"] = apart
    return figures


def graph_ms(work: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of the replay of a graph of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return median_ms(graph.replay, torch.device("cuda"), repeats=repeats)


def times(call: Attention, inputs: Inputs, do: Tensor, repeats: int) -> tuple[float, float]:
    """(forward, backward) in milliseconds; the backward is what forward and backward take beyond the forward."""
    wanted = [x.detach().requires_grad_() for x in inputs]

    def both() -> object:
        return torch.autograd.grad(call(*wanted), wanted, do)

    forward = graph_ms(lambda: call(*wanted), repeats)
    return forward, graph_ms(both, repeats) - forward


def measure(shape: Shape, device: torch.device, repeats: int) -> dict[str, Any]:
    """Errors, then times, of Triton and of flex."""
    figures = {"workload": shape.name, **check(shape, device)}
    inputs, do = shape.inputs(device)
    mask = shape.mask(device)
    calls: dict[str, Attention | None] = {"triton": ours(mask), "flex": flex(mask, shape.S)}
    for name, call in calls.items():
        if call is None:
            continue
        forward, backward = times(call, inputs, do, repeats)
        figures[name] = {
            "forward_ms": forward,
            "backward_ms": backward,
            "forward_tflops": shape.flop() / forward / 1e9,
            "backward_tflops": 2.5 * shape.flop() / backward / 1e9,
        }
        total = forward + backward
        print(
            f"{shape.name:8} {name:7} forward {forward:8.3f} ms {figures[name]['forward_tflops']:4.0f} TFLOP/s   "
            f"backward {backward:8.3f} ms {figures[name]['backward_tflops']:4.0f} TFLOP/s   both {total:8.3f} ms",
            flush=True,
        )
        figures[name]["both_ms"] = total
    if "flex" in figures:
        figures["speedup"] = figures["flex"]["both_ms"] / figures["triton"]["both_ms"]
        print(f"{shape.name:8} speedup {figures['speedup']:.2f}, largest error {max(figures['error'].values()):.1e}")
    return figures


def with_tile(base: Tiles, kernel: str, tile: tuple[int, int, int, int]) -> Tiles:
    """The tiles with those of one kernel replaced."""
    return replace(base, **{kernel: Tile(*tile)})


def _compile(shape: Shape, tiles: Tiles) -> None:
    """Compiles the kernels of these tiles into Triton's cache on disk. They know no sizes, so a small call will do."""
    device = torch.device("cuda")
    small = replace(shape, S=128, N=128 // shape.K)
    inputs, do = small.inputs(device)
    mask = small.mask(device)
    try:
        o, lse = attention_forward(*inputs, mask, tiles=tiles)
        for splits in (1, 2):
            attention_backward(do, *inputs, o, lse, mask, tiles=tiles, splits=splits)
    except Exception:
        return  # Said again, and shown, where it is timed.


def sweep(chosen: Iterable[Shape], device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Every tile of SWEEP: forward, then the whole backward with one kernel's tile changed, the best so far kept."""
    chosen = list(chosen)
    base = tiles_for(E, 2, _card(device)[0], max(shape.K * shape.H // G for shape in chosen))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=context) as pool:
        jobs = [
            pool.submit(_compile, shape, with_tile(base, kernel, tile))
            for shape in {(s.K, s.H): s for s in chosen}.values()
            for kernel, tiles in SWEEP.items()
            for tile in tiles
        ]
        for job in jobs:
            job.result()
    rows: list[dict[str, Any]] = []
    for shape in chosen:
        inputs, do = shape.inputs(device)
        mask = shape.mask(device)
        best = base
        o, lse = attention_forward(*inputs, mask, tiles=base)

        def timed(
            kernel: str,
            tiles: Tiles,
            splits: int | None,
            *,
            shape: Shape = shape,
            inputs: Inputs = inputs,
            do: Tensor = do,
            mask: DraftMask = mask,
            o: Tensor = o,
            lse: Tensor = lse,
        ) -> float:
            tile = getattr(tiles, kernel)
            try:
                if kernel == "forward":
                    ms = graph_ms(lambda: attention_forward(*inputs, mask, tiles=tiles), repeats)
                else:
                    ms = graph_ms(
                        lambda: attention_backward(do, *inputs, o, lse, mask, tiles=tiles, splits=splits), repeats
                    )
            except Exception as error:
                print(f"{shape.name:8} {kernel:8} {tile} {type(error).__name__}: {str(error)[:120]}", flush=True)
                return float("inf")
            rows.append({"workload": shape.name, "kernel": kernel, "tile": repr(tile), "splits": splits, "ms": ms})
            print(f"{shape.name:8} {kernel:8} {tile} splits {splits or 'own'} {ms:8.4f} ms", flush=True)
            return ms

        for kernel, candidates in SWEEP.items():
            ms = {tile: timed(kernel, with_tile(best, kernel, tile), None) for tile in candidates}
            best = with_tile(best, kernel, min(ms, key=ms.__getitem__))
        for splits in SWEEP_SPLITS:
            timed("dkv", best, splits)
        print(f"{shape.name:8} best {best}", flush=True)
        rows.append({"workload": shape.name, "best": repr(best)})
    return rows


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__.split("\n")[0])
    named = shapes()
    parser.add_argument("--workload", action="append", choices=list(named), help="may be repeated; all without it")
    parser.add_argument("--repeats", type=int, default=20, help="timed replays; the median counts")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--sweep", action="store_true", help="time tile sizes instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none.")
    # Each shape compiles flex_attention anew; the default allows eight of them.
    torch._dynamo.config.recompile_limit = 64
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = [named[name] for name in options.workload or named]
    figures: dict[str, Any] = {**provenance(), "command": "python -m bench.attention " + " ".join(sys.argv[1:])}
    print(
        f"{figures['gpu']}, torch {figures['torch']}, triton {figures['triton']}, commit {figures['commit']}",
        flush=True,
    )
    if options.sweep:
        figures["sweep"] = sweep(chosen, device, options.repeats)
    else:
        figures["attention"] = [measure(shape, device, options.repeats) for shape in chosen]
    write_result(figures, options.out)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
