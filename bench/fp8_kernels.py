"""The matmuls of fp8 on W2's shapes and the kernels around them, each compared with its definition before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.timing import median_ms
from engine.ops import fp8_norm, fp8_rows, fp8_swiglu
from engine.ops.fp8_rows import Fp8Rows
from engine.ops.fp8_rows_ref import quantise_rows_ref, turned_ref
from engine.ops.rms_norm import norm_forward

D, INTER, ROWS = 4096, 12288, 8192
# Relative, in the 2-norm. Of a product: bf16's rounding, and the 14 bits that the fp8 unit sums with. Of quantised rows: a
# rounding before it moves some numbers to the next e4m3 one. Where nothing is rounded before, the bytes are the definition's.
MOST_OF_PRODUCTS, MOST_OF_ROWS = 6e-3, 3e-2
# name -> M, N, K
MATMULS = {
    "gate_up": (ROWS, 2 * INTER, D),
    "gate_up dx": (ROWS, D, 2 * INTER),
    "gate_up dw": (2 * INTER, D, ROWS),
    "down": (ROWS, D, INTER),
    "down dx": (ROWS, INTER, D),
    "down dw": (D, INTER, ROWS),
    "qkv": (ROWS, 6144, D),
    "qkv dx": (ROWS, D, 6144),
    "qkv dw": (6144, D, ROWS),
    "o": (ROWS, D, D),
    "context kv": (2048, 2048, D),
    "fc": (2048, D, 5 * D),
    "fc dw": (D, 5 * D, 2048),
    "head chunk": (2048, 151936, D),
}


def timed(
    name: str,
    step: Callable[[], object],
    *,
    flop: float = 0.0,
    byte: float = 0.0,
    capture: bool = True,
    off: Callable[[], float] | None = None,
    most: float = 0.0,
) -> dict[str, Any]:
    """Runs, prints and returns one line; a failure is a line too. Captured, so that launching costs nothing. off: how far the
    step's result is from its definition; more than `most` is a failure and is not timed."""
    try:
        apart = off() if off is not None else None
        if apart is not None and not apart <= most:
            raise ValueError(f"off by {apart:.1e}, at most {most:.1e} was allowed; no speed is shown")
        ms = graph_ms(step) if capture else median_ms(step, torch.device("cuda"), repeats=10)
    except (RuntimeError, ValueError) as error:
        print(f"  {name:44} failed: {str(error).splitlines()[0][:150]}", flush=True)
        return {"name": name, "error": str(error)[:300]}
    rate = f"{flop / ms / 1e9:7.0f} TFLOP/s" if flop else f"{byte / ms / 1e6:7.0f} GB/s" if byte else ""
    print(f"  {name:44} {ms:8.3f} ms {rate}", flush=True)
    return {
        "name": name,
        "ms": ms,
        "tflops": flop / ms / 1e9 if flop else None,
        "gbs": byte / ms / 1e6 if byte else None,
        "off_by": apart,
    }


def graph_ms(step: Callable[[], object], calls: int = 5) -> float:
    """Median milliseconds of a call among `calls` in a row, replayed."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            step()
    return median_ms(graph.replay, torch.device("cuda"), repeats=5, warm_ups=1) / calls


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """bf16 on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def relative(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, in the 2-norm."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def product_off(found: Tensor, a: Tensor, b: Tensor, scale: Tensor | float = 1.0) -> float:
    """How far [M, N] is from a [M, K] times b [N, K] transposed, times scale; in its first 512 rows and columns."""
    some = slice(0, 512)
    return relative(found[some, some].double(), (a[some].double() @ b[some].double().t()) * scale)


def rows_off(found: Fp8Rows, x: Tensor) -> float:
    """How far quantised rows are from the definition's of x."""
    values, scale = quantise_rows_ref(x)
    return relative(found.values.float() * found.scale, values.float() * scale)


def bytes_off(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """The share of e4m3 numbers, and of scales, that are not the definition's."""
    same = [(a.float() != b.float()).float().mean() for a, b in zip(found, expected, strict=True)]
    return float(max(same))


def matmuls() -> list[dict[str, Any]]:
    """bf16 beside fp8 with one scale and with a scale a row, and the two ways of summing."""
    rows = []
    for name, (M, N, K) in MATMULS.items():
        a, b = random(M, K), random(N, K, scale=0.02)
        a8, b8 = fp8_rows.quantise_rows(a), fp8_rows.quantise_rows(b)
        one = torch.ones((), device="cuda")
        out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        flop = 2.0 * M * N * K
        plain = partial(torch.mm, a, b.t(), out=out)
        off = lambda a=a, b=b, plain=plain: product_off(plain(), a, b)  # noqa: E731
        rows.append(timed(f"{name} {M}x{N}x{K} bf16", plain, flop=flop, off=off, most=MOST_OF_PRODUCTS))
        for kind, scales in (("one", (one, one)), ("rows", (a8.scale, b8.scale.view(1, -1)))):
            scale = 1.0 if kind == "one" else a8.scale[:512] * b8.scale[:512].t()
            for fast in (True, False):
                run = partial(
                    torch._scaled_mm,
                    a8.values,
                    b8.values.t(),
                    scales[0],
                    scales[1],
                    out_dtype=torch.bfloat16,
                    use_fast_accum=fast,
                )
                how = f"{name} fp8 {kind} {'fast' if fast else 'exact'}"
                apart = partial(_scaled_off, run, a8, b8, scale)
                rows.append(timed(how, run, flop=flop, off=apart, most=MOST_OF_PRODUCTS))
    return rows


def _scaled_off(run: Callable[[], Tensor], a8: Fp8Rows, b8: Fp8Rows, scale: Tensor | float) -> float:
    return product_off(run(), a8.values, b8.values, scale)


def kernels() -> list[dict[str, Any]]:
    """What stands around the matmuls; bytes read and written once."""
    rows = []
    for name, R, C in (("x", ROWS, D), ("gate_up", 2 * INTER, D), ("down", D, INTER), ("dhidden", ROWS, 2 * INTER)):
        x = random(R, C)
        x8 = fp8_rows.quantise_rows(x)
        back = fp8_rows.turned(x8)
        for what, step, byte, off in (
            (
                "quantise",
                partial(fp8_rows.quantise_rows, x),
                3.0,
                bytes_off((x8.values, x8.scale), quantise_rows_ref(x)),
            ),
            (
                "turn",
                partial(fp8_rows.turned, x8),
                2.0,
                bytes_off((back.values, back.scale), turned_ref(x8.values, x8.scale)),
            ),
        ):
            rows.append(timed(f"{what} {name} {R}x{C}", step, byte=byte * R * C, off=partial(float, off)))
    stream, delta, weight = random(ROWS, D), random(ROWS, D), random(D)
    norm = partial(fp8_norm.norm_rows, stream, delta, weight, 1e-6)
    normed = norm_forward(stream, delta, weight, 1e-6)[1]
    rows.append(timed("norm", norm, byte=7.0 * ROWS * D, off=lambda: rows_off(norm()[1], normed), most=MOST_OF_ROWS))
    hidden, dact = random(ROWS, 2 * INTER), random(ROWS, INTER)
    act, dhidden = swiglu_ref(hidden, dact)
    swiglu = partial(fp8_swiglu.swiglu_rows, hidden)
    rows.append(
        timed("swiglu", swiglu, byte=5.0 * ROWS * INTER, off=lambda: rows_off(swiglu(), act), most=MOST_OF_ROWS)
    )
    for whole, block, warps in (
        (True, 0, 16),
        (True, 0, 32),
        (False, 1024, 4),
        (False, 2048, 4),
        (False, 2048, 8),
        (False, 4096, 8),
    ):
        step = partial(fp8_swiglu.swiglu_backward_rows, hidden, dact, whole=whole, block=block, warps=warps)
        how = f"whole {warps} warps" if whole else f"twice {block} {warps} warps"
        apart = partial(rows_off, step(), dhidden)
        rows.append(timed(f"swiglu backward {how}", step, byte=8.0 * ROWS * INTER, off=apart, most=MOST_OF_ROWS))
    grad, product = random(2 * INTER, D), random(2 * INTER, D)
    rows.append(timed("add to the gradient arena, gate_up", partial(grad.add_, product), byte=6.0 * grad.numel()))
    copied = torch.empty_like(hidden)
    rows.append(timed("copy", partial(copied.copy_, hidden), byte=4.0 * hidden.numel()))
    return rows


def swiglu_ref(hidden: Tensor, dact: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of hidden [R, gate | up], and [dgate | dup] of its gradient; fp32, in torch."""
    leaf = hidden.float().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    act = F.silu(gate) * up
    (dhidden,) = torch.autograd.grad(act, leaf, dact.float())
    return act.detach(), dhidden
