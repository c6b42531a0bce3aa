"""`python -m engine.doctor_probe`: captures a step in three sizes on the first GPU, as a run does its buckets, and prints its
figures as a line of JSON. A process of its own, because allocator and module loading are settled when a process first touches
the device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

_REPLAYS = 30
_ROWS = (6144, 4096, 1536)  # the largest first, and none a multiple of another: blocks have to be cut up
_WIDTH, _LAYERS = 2048, 4


def main() -> None:
    """start_s: from here to the first result; build_s: of warm-up and capture; memory_mib: device memory that is not free,
    outside_mib: that part of it that is not torch's; replay_ms: of all sizes once; equal: whether every replay gave the eager
    step's bits."""
    start = time.perf_counter()
    import torch
    from torch import Tensor

    from graphs.executor import GraphExecutor

    device = torch.device("cuda", 0)
    weight = torch.randn(_WIDTH, _WIDTH, device=device, dtype=torch.bfloat16) / _WIDTH**0.5
    weight.requires_grad_()
    torch.cuda.synchronize(device)
    out = torch.empty_like(weight)

    def step_over(x: Tensor) -> Callable[[], None]:
        def step() -> None:
            y = x
            for _ in range(_LAYERS):
                y = torch.nn.functional.silu(y @ weight) + y
            (gradient,) = torch.autograd.grad(y.float().square().mean(), weight)
            out.copy_(gradient)

        return step

    executor = GraphExecutor(device)
    names = [f"probe {rows}" for rows in _ROWS]
    for name, rows in zip(names, _ROWS, strict=True):
        executor.add(name, step_over(torch.randn(rows, _WIDTH, device=device, dtype=torch.bfloat16)))
    executor.call(names[0])
    torch.cuda.synchronize(device)
    start_s = time.perf_counter() - start
    executor.build()
    torch.cuda.synchronize(device)
    build_s = time.perf_counter() - start - start_s
    equal = True
    for name in names:
        executor.call(name)
        eager = out.clone()
        out.fill_(float("nan"))
        executor.run(name)
        equal = equal and torch.equal(out, eager)
    del eager
    torch.cuda.empty_cache()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_REPLAYS):
        for name in names:
            executor.run(name)
    end.record()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    figures = {
        "start_s": start_s,
        "build_s": build_s,
        "memory_mib": (total - free) / 2**20,
        "outside_mib": (total - free - torch.cuda.memory_reserved(device)) / 2**20,
        "replay_ms": begin.elapsed_time(end) / _REPLAYS,
        "equal": equal,
    }
    executor.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
