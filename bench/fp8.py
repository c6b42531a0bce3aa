"""`python -m bench.fp8`: what fp8 costs and wins on W2, piece by piece: matmuls, quantising kernels, the MLP, the whole step.

One JSON line at the end. --demo trains the embedded target's drafter in bf16 and fp8 instead and compares what it is accepted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.timing import matmul_tflops, median_ms, provenance
from bench.workloads import WORKLOADS, RandomInputs
from engine import demo
from engine.assemble import resolve_device
from engine.engine import Engine
from engine.export import load_drafter
from engine.kernels import fused_ops
from engine.ops import fp8_norm, fp8_rows, fp8_swiglu
from engine.ops.linear import linear
from engine.ops.linear_fp8 import linear_fp8
from engine.ops.norm_mlp import norm_mlp
from engine.ops.norm_mlp_fp8 import norm_mlp_fp8
from engine.ops.weight import Weight
from engine.settings import ObjectiveSettings
from engine.target import load_target
from engine.train import train

D, INTER, ROWS = 4096, 12288, 8192
# Of one operation's results, fp8 against bf16, relative in the 2-norm: quantising makes 0.04 to 0.07.
MOST_APART = 0.15
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
    name: str, step: Callable[[], object], *, flop: float = 0.0, byte: float = 0.0, capture: bool = True
) -> dict[str, Any]:
    """Runs, prints and returns one line; a failure is a line too. Captured, so that launching costs nothing."""
    try:
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


def matmuls() -> list[dict[str, Any]]:
    """bf16 beside fp8 with one scale and with a scale a row, and the two ways of summing."""
    rows = []
    for name, (M, N, K) in MATMULS.items():
        a, b = random(M, K), random(N, K, scale=0.02)
        a8, b8 = fp8_rows.quantise_rows(a), fp8_rows.quantise_rows(b)
        one = torch.ones((), device="cuda")
        out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        flop = 2.0 * M * N * K
        rows.append(timed(f"{name} {M}x{N}x{K} bf16", partial(torch.mm, a, b.t(), out=out), flop=flop))
        for kind, scales in (("one", (one, one)), ("rows", (a8.scale, b8.scale.view(1, -1)))):
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
                row = timed(f"{name} fp8 {kind} {'fast' if fast else 'exact'}", run, flop=flop)
                if kind == "rows" and "error" not in row and K >= 4096:
                    some = slice(0, 512)
                    exact = (
                        (a8.values[some].double() @ b8.values[some].double().t()) * a8.scale[some] * b8.scale[some].t()
                    )
                    found = run()[some, some].double()
                    row["error"] = relative(found, exact)
                    row["shrinks"] = 1 - float((found * exact).sum() / (exact * exact).sum())
                    print(f"{'':47} sums' error {row['error']:.1e}, shrinks {row['shrinks']:.1e}", flush=True)
                rows.append(row)
    return rows


def kernels() -> list[dict[str, Any]]:
    """What stands around the matmuls; bytes read and written once."""
    rows = []
    for name, R, C in (("x", ROWS, D), ("gate_up", 2 * INTER, D), ("down", D, INTER), ("dhidden", ROWS, 2 * INTER)):
        x = random(R, C)
        rows.append(timed(f"quantise {name} {R}x{C}", partial(fp8_rows.quantise_rows, x), byte=3.0 * R * C))
        x8 = fp8_rows.quantise_rows(x)
        rows.append(timed(f"turn {name} {R}x{C}", partial(fp8_rows.turned, x8), byte=2.0 * R * C))
    stream, delta, weight = random(ROWS, D), random(ROWS, D), random(D)
    rows.append(timed("norm", partial(fp8_norm.norm_rows, stream, delta, weight, 1e-6), byte=7.0 * ROWS * D))
    hidden, dact = random(ROWS, 2 * INTER), random(ROWS, INTER)
    rows.append(timed("swiglu", partial(fp8_swiglu.swiglu_rows, hidden), byte=5.0 * ROWS * INTER))
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
        rows.append(timed(f"swiglu backward {how}", step, byte=8.0 * ROWS * INTER))
    grad, product = random(2 * INTER, D), random(2 * INTER, D)
    rows.append(timed("add to the gradient arena, gate_up", partial(grad.add_, product), byte=6.0 * grad.numel()))
    copied = torch.empty_like(hidden)
    rows.append(timed("copy", partial(copied.copy_, hidden), byte=4.0 * hidden.numel()))
    return rows


def outcome(op: Callable[..., Tensor], x: Tensor, values: list[Tensor], dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients."""
    x = x.detach().clone().requires_grad_()
    weights = [Weight(value.requires_grad_(), torch.zeros_like(value)) for value in values]
    y = op(x, *weights)
    y.backward(dy)
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {f"dw{i}": w.grad for i, w in enumerate(weights)}


def behind_a_norm(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """norm_mlp as a map of the stream and the two weights; the norm's weight is ones."""

    def call(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        ones = torch.ones(x.shape[1], device=x.device, dtype=x.dtype).requires_grad_()
        return op(x, None, Weight(ones, torch.zeros_like(ones)), 1e-6, gate_up, down)[1]

    return call


def forward_backward(op: Callable[..., Tensor], x: Tensor, weights: list[Weight], dy: Tensor) -> None:
    """Once, without a look at the results."""
    op(x, *weights).backward(dy)


def operations() -> dict[str, Any]:
    """The MLP and a projection forward and backward, bf16 beside fp8, and how far apart they are."""
    row_size = torch.exp(torch.randn(ROWS, 1, device="cuda"))
    dy = (random(ROWS, D) * row_size * 1e-5).bfloat16()
    cases: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor], float]] = {
        "mlp": (
            behind_a_norm(norm_mlp),
            behind_a_norm(norm_mlp_fp8),
            [random(2 * INTER, D, scale=0.02), random(D, INTER, scale=0.02)],
            18.0 * ROWS * D * INTER,
        ),
        "o": (linear, linear_fp8, [random(D, D, scale=0.02)], 6.0 * ROWS * D * D),
    }
    figures: dict[str, Any] = {}
    x = random(ROWS, D)
    for name, (plain, fp8, values, flop) in cases.items():
        apart = {
            k: relative(v, other)
            for (k, v), other in zip(
                outcome(fp8, x, values, dy).items(), outcome(plain, x, values, dy).values(), strict=True
            )
        }
        if not max(apart.values()) <= MOST_APART:
            raise ValueError(
                f"{name}: fp8 is {apart} away from bf16, at most {MOST_APART} was allowed; no speed is shown"
            )
        leaf = x.clone().requires_grad_()
        weights = [Weight(value.requires_grad_(), torch.zeros_like(value)) for value in values]
        times = [
            timed(
                f"{name} {kind}, forward and backward",
                partial(forward_backward, op, leaf, weights, dy),
                flop=flop,
                capture=False,
            )
            for kind, op in (("bf16", plain), ("fp8", fp8))
        ]
        figures[name] = {"apart": apart, "times": times}
        print("    fp8 against bf16: " + ", ".join(f"{k} {v:.3f}" for k, v in apart.items()), flush=True)
    return figures


def whole_step(name: str = "W2") -> dict[str, Any]:
    """A workload's captured step in bf16, with the MLP alone in fp8, and with all that precision = "fp8" means."""
    workload, device = WORKLOADS[name], torch.device("cuda", torch.cuda.current_device())
    config, bucket = workload.config(), workload.bucket
    figures: dict[str, Any] = {}
    expected: dict[str, Tensor] = {}
    for kind in ("bf16", "fp8 mlp", "fp8"):
        torch.cuda.empty_cache()
        inputs = RandomInputs(config, [bucket], device, torch.bfloat16)
        engine = Engine(
            config,
            workload.target(device, torch.bfloat16),
            [bucket],
            inputs,
            device=device,
            objective=ObjectiveSettings(),
            optimizer=None,
            precision=kind.split()[0],
        )
        if kind == "fp8 mlp":
            plain = fused_ops("triton")
            engine.drafter.ops = replace(engine.ops, draft_linear=plain.linear, norm_linear=plain.norm_linear)
        engine.params.draw_(0)
        engine.build()
        inputs.fill(bucket)
        held = torch.cuda.memory_reserved() / 2**30
        differs = engine.verify(bucket)
        if differs is not None:
            raise ValueError(
                f"{name} {kind}: the replay differs from the eager step in {differs.name}; no speed is shown"
            )
        # As the first micro-batch of a step: the others add to its gradients.
        ms = median_ms(partial(engine.executor.run, f"train {bucket.name}"), device, repeats=20)
        engine.zero_()
        engine.micro_step(bucket)
        loss = engine.metrics.snapshot().read().means()["loss"]
        found = {k: v.to("cpu", copy=True) for k, v in engine.gradients().items() if v.dim() == 2}
        line: dict[str, Any] = {"ms": ms, "gib": held, "loss": loss}
        if expected:
            apart = [relative(found[k].cuda(), expected[k].cuda()) for k in found]
            line["gradients_apart"] = {"median": statistics.median(apart), "most": max(apart)}
        expected = expected or found
        print(f"  {name} {kind:10} {line}", flush=True)
        figures[kind] = line
        engine.close()
        del engine, inputs
    return figures


def run_demo_twice(out: Path, seeds: int, steps: int) -> dict[str, Any]:
    """The demo's drafter in bf16 and in fp8, the same data and seeds: held-out figures and accepted tokens."""
    device = resolve_device("cuda")
    target = load_target(demo.EMBEDDED_TARGET, device, torch.float32)
    demo.write_datasets(target, out, seed=0)
    texts = demo.held_out_texts(target)
    rows = []
    for seed in range(seeds):
        for precision in ("bf16", "fp8"):
            settings = demo.demo_settings(out, steps=steps, seed=seed, device="cuda")
            run = replace(settings.run, precision=precision, output=str(out / f"{precision}-{seed}"))  # type: ignore[arg-type]
            figures: Mapping[str, Any] = train(replace(settings, run=run))
            config, weights = load_drafter(Path(run.output) / "best")
            decoded = demo.decode_held_out(config, weights, target, texts)
            row = {
                "precision": precision,
                "seed": seed,
                "eval_loss": figures["eval_loss"],
                "eval_accept_len": figures["eval_accept_len"],
                "tokens_per_verification": decoded["tokens_per_verification"],
                "differing_tokens": decoded["differing_tokens"],
            }
            print(f"  {row}", flush=True)
            rows.append(row)
    return {"runs": rows}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=("matmuls", "kernels", "operations", "step"))
    parser.add_argument("--workload", default="W2", choices=sorted(WORKLOADS))
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {"where": provenance()}
    if options.demo:
        with tempfile.TemporaryDirectory() as folder:
            figures["demo"] = run_demo_twice(Path(folder), options.seeds, options.steps)
    else:
        torch.manual_seed(0)
        figures["matmul_tflops"] = matmul_tflops(torch.device("cuda"))
        print(f"bf16 8192^3: {figures['matmul_tflops']:.0f} TFLOP/s", flush=True)
        parts = {
            "step": lambda: whole_step(options.workload),
            "operations": operations,
            "matmuls": matmuls,
            "kernels": kernels,
        }
        for name, part in parts.items():
            if options.only and name not in options.only:
                continue
            start = time.perf_counter()
            print(name, flush=True)
            figures[name] = part()
            print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
            torch.cuda.empty_cache()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
