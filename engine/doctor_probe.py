"""`python -m engine.doctor_probe`: captures a small step on the first GPU and prints its figures as a line of JSON. A process
of its own, because allocator and module loading are settled when a process first touches the device."""

from __future__ import annotations

import json
import time

_REPLAYS = 50


def main() -> None:
    """start_s: from here to the first result; outside_mib: device memory that is neither free nor torch's; replay_ms; equal:
    whether the replay gave the eager step's bits."""
    start = time.perf_counter()
    import torch

    from graphs.executor import GraphExecutor

    device = torch.device("cuda", 0)
    x, w = (torch.randn(1024, 1024, device=device, dtype=torch.bfloat16) for _ in range(2))
    w.requires_grad_()
    out = torch.empty_like(x)

    def step() -> None:
        y = x
        for _ in range(4):
            y = torch.nn.functional.silu(y @ w)
        (gradient,) = torch.autograd.grad(y.float().square().mean(), w)
        out.copy_(gradient)

    executor = GraphExecutor(device)
    executor.add("probe", step)
    executor.call("probe")
    torch.cuda.synchronize(device)
    start_s = time.perf_counter() - start
    eager = out.clone()
    executor.build()
    executor.run("probe")
    equal = torch.equal(out, eager)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_REPLAYS):
        executor.run("probe")
    end.record()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    figures = {
        "start_s": start_s,
        "outside_mib": (total - free - torch.cuda.memory_reserved(device)) / 2**20,
        "replay_ms": begin.elapsed_time(end) / _REPLAYS,
        "equal": equal,
    }
    executor.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
