"""Is flex attention better compiled once a bucket, or once for all of them?

    python -m bench.flex_shapes [--out FILE]

W2's attention over the lengths of `bench start`, forward and backward, each way in processes of its own: empty caches, then
full ones. Seconds of the first call of each length, compilations, and the milliseconds that replayed graphs take: a kernel
for every length knows fewer things for certain. Outputs and gradients are compared with the Triton attention's first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.attention import Shape, shapes
from bench.start import LENGTHS
from bench.timing import graph_ms, provenance, write_result
from engine.kernels import ATTENTIONS
from engine.reports import make_console, print_table
from graphs.guards import Counters, kernels_compiled

# torch.compile's `dynamic`; None: the second length is compiled for all that may follow.
WAYS = {"a length": False, "all lengths": True, "all but the first": None}
# max|flex - Triton's| / max|Triton's| of bf16 numbers that were summed in another order.
TOLERANCE = 2e-2
_ROOT = Path(__file__).parent.parent


def once(
    way: str, lengths: Sequence[int], device: torch.device, shape: Shape, *, backend: str = "inductor"
) -> dict[str, Any]:
    """Figures of one process that compiles in one of the WAYS. Raises ValueError where flex is not what
    the other attention computes."""
    began = time.perf_counter()
    from engine.ops import attention_flex

    attention_flex._compiled_flex = torch.compile(
        attention_flex._flex, dynamic=WAYS[way], fullgraph=True, backend=backend
    )
    figures: dict[str, Any] = {"import_s": time.perf_counter() - began, "first_call_s": [], "ms": [], "apart": []}
    before = Counters.read(device)
    made = kernels_compiled()
    works = []
    for length in lengths:
        case = replace(shape, S=length)
        began = time.perf_counter()
        work = _work("flex", case, device)
        found = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        figures["first_call_s"].append(time.perf_counter() - began)
        works.append((case, work, found))
    figures["compilations"] = (Counters.read(device) - before).compilations
    figures["kernels_compiled"] = kernels_compiled() - made
    for case, work, found in works:
        expected = _work("triton" if device.type == "cuda" else "reference", case, device)()
        apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
        if not apart <= TOLERANCE:
            raise ValueError(
                f"S = {case.S}: expected flex within {TOLERANCE:g} of the other attention, found {apart:.1e}"
            )
        figures["apart"].append(apart)
        if device.type == "cuda":
            figures["ms"].append(graph_ms(work, device, repeats=20))
    return figures


def _work(name: str, case: Shape, device: torch.device) -> Callable[[], list[Tensor]]:
    inputs, do = case.inputs(device)
    backward = device.type == "cuda"  # the only one where flex attention has one
    leaves, mask = [tensor.requires_grad_(backward) for tensor in inputs], case.mask(device)

    def work() -> list[Tensor]:
        o = ATTENTIONS[name](mask, case.S, window=None, causal=False)(*leaves)
        return [o.detach(), *(torch.autograd.grad(o, leaves, do) if backward else ())]

    return work


def run(out: Path | None) -> dict[str, Any]:
    """Every way, each cold and warm; prints and returns the rows. A way that fails has the last line of what it said."""
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="dflash-flex-") as folder:
            caches = {name: f"{folder}/{name.lower()}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
            for start in ("cold", "warm"):
                command = [sys.executable, "-m", "bench.flex_shapes", "--once", way]
                done = subprocess.run(
                    command, cwd=_ROOT, env={**os.environ, **caches}, capture_output=True, text=True, check=False
                )
                row: dict[str, Any] = {"compiled_for": way, "start": start}
                if done.returncode:
                    rows.append(row | {"failed": (done.stderr.strip() or "nothing").splitlines()[-1]})
                    break
                rows.append(row | json.loads(done.stdout.splitlines()[-1]))
    figures = {"where": provenance(), "lengths": list(LENGTHS), "ways": rows}
    print_table(
        make_console(),
        "W2's flex attention compiled for",
        ("compiled for", "start", "import s", "first calls s", "compilations", "ms a length", "failed"),
        (
            (
                row["compiled_for"],
                row["start"],
                f"{row.get('import_s', 0):.1f}",
                f"{sum(row.get('first_call_s', [])):.1f}",
                str(row.get("compilations", "-")),
                ", ".join(f"{ms:.2f}" for ms in row.get("ms", [])),
                row.get("failed", ""),
            )
            for row in rows
        ),
    )
    write_result(figures, out)
    return figures


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.flex_shapes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "error: expected a CUDA device, found none: flex attention has no backward pass elsewhere", file=sys.stderr
        )
        return 2
    if arguments.once is None:
        run(arguments.out)
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        print(json.dumps(once(arguments.once, LENGTHS, device, shapes()["W2"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
