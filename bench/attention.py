"""Attention alone: one call's shape and inputs, the ways of computing it, and a sweep of tile sizes.

    python -m bench.attention [--workload W2 ...] [--repeats 20] [--out FILE]

times tile sizes, one kernel after the other, to choose the table of engine/ops/attention_tiles.py. Times are of replayed graphs;
tiles whose output or gradients are not the definition's are not timed.
How Triton's attention compares with flex_attention and with the definition is `dflash-engine bench ops`.
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
import torch.nn.functional as F
from torch import Tensor

from bench.tile_check import TileCheck, tile_check
from bench.timing import graph_ms, provenance, write_result
from bench.workloads import TINY, WORKLOADS
from buffers.anchors import sample_anchors
from engine.kernels import ATTENTIONS
from engine.mask import DraftMask, visible
from engine.ops.attention import attention_backward, attention_forward
from engine.ops.attention_tiles import Tile, Tiles, tiles_for
from engine.ops.card import shared_memory_and_processors

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Attention = Callable[..., Tensor]

G, E = 8, 128
DTYPE = torch.bfloat16
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
    named = {w.name: Shape(w.name, w.S, w.N, w.K, w.num_attention_heads) for w in WORKLOADS.values() if w.name != TINY}
    return named | {"W2@8192": replace(named["W2"], name="W2@8192", S=8192)}


def attention_calls(device: torch.device) -> dict[str, Callable[[DraftMask, int], Attention]]:
    """Name -> attention under a mask over S context keys, what it needs of the mask made beforehand."""
    if device.type == "cpu":
        return {"reference": _of("reference"), "torch": _dense}
    return {"ours": _of("triton"), "reference": _of("reference"), "flex": _of("flex")}


def _of(name: str) -> Callable[[DraftMask, int], Attention]:
    return lambda mask, S: ATTENTIONS[name](mask, S, window=None, causal=False)


def _dense(mask: DraftMask, S: int) -> Attention:
    """torch's scaled_dot_product_attention under the whole mask."""
    seen_BHQK = visible(mask, S, window=None, causal=False)[:, None]

    def call(q: Tensor, k_context: Tensor, v_context: Tensor, k_draft: Tensor, v_draft: Tensor) -> Tensor:
        k, v = (torch.cat(pair, dim=1).transpose(1, 2) for pair in ((k_context, k_draft), (v_context, v_draft)))
        q = q.transpose(1, 2)
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_BHQK, enable_gqa=gqa).transpose(1, 2)

    return call


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
    """Every tile of SWEEP: forward, then the whole backward with one kernel's tile changed, the best so far kept. First each is
    compared with the definition, on some blocks of a shorter context."""
    chosen = list(chosen)
    base = tiles_for(E, 2, shared_memory_and_processors(device)[0], max(shape.K * shape.H // G for shape in chosen))
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
        few = replace(shape, S=300, N=max(8, 512 // shape.K))
        check = tile_check(*few.inputs(device), few.mask(device))
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
            check: TileCheck = check,
        ) -> float:
            tile = getattr(tiles, kernel)
            try:
                check.refuse(tiles, splits)
                if kernel == "forward":
                    ms = graph_ms(lambda: attention_forward(*inputs, mask, tiles=tiles), device, repeats=repeats)
                else:
                    ms = graph_ms(
                        lambda: attention_backward(do, *inputs, o, lse, mask, tiles=tiles, splits=splits),
                        device,
                        repeats=repeats,
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
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none.")
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = [named[name] for name in options.workload or named]
    where = provenance()
    print(f"{where['gpu']}, torch {where['torch']}, triton {where['triton']}, commit {where['commit']}", flush=True)
    figures = {"where": where, "sweep": sweep(chosen, device, options.repeats)}
    write_result(figures, options.out)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
