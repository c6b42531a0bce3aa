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

from bench.fp8_kernels import INTER, ROWS, D, kernels, matmuls, random, relative, timed
from bench.timing import matmul_tflops, median_ms, provenance
from bench.workloads import WORKLOADS, RandomInputs
from engine import demo
from engine.assemble import resolve_device
from engine.engine import Engine
from engine.export import load_drafter
from engine.kernels import fused_ops
from engine.ops.linear import linear
from engine.ops.linear_fp8 import linear_fp8
from engine.ops.norm_mlp import norm_mlp
from engine.ops.norm_mlp_fp8 import norm_mlp_fp8
from engine.ops.weight import Weight
from engine.settings import ObjectiveSettings
from engine.target import load_target
from engine.train import train

# Of one operation's results, fp8 against bf16, relative in the 2-norm: quantising makes 0.04 to 0.07.
MOST_APART = 0.15


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
