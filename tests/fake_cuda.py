"""As much of torch.cuda as GraphExecutor uses, without a device: a capture runs the step, a replay is counted."""

from collections import Counter, deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Stream:
    cuda_stream: int

    def wait_stream(self, other: "Stream") -> None: ...


class Event:
    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...
    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class FakeCuda:
    """Patches torch.cuda. Streams come in turn from a pool of 32, as torch's do."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.replays = 0
        self.ending_a_broken_capture_fails = False
        self.executables_take = 0
        self._users: Counter[int] = Counter()  # of each pool
        self._captured: Counter[int] = Counter()
        self._open_captures: deque[int] = deque()
        self._stream = Stream(0)
        numbers, pools = count(), count(1)

        def set_stream(stream: Stream) -> None:
            self._stream = stream

        fakes = {
            "Stream": lambda device=None: Stream(1 + next(numbers) % 32),
            "Event": lambda **_: Event(),
            "current_stream": lambda device=None: self._stream,
            "set_stream": set_stream,
            "stream": lambda stream: nullcontext(),
            "set_device": lambda device: None,
            "current_device": lambda: DEVICE.index,
            "device": lambda device: nullcontext(),
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "memory_reserved": lambda device=None: 0,
            "mem_get_info": lambda device=None: (3 * 2**29 - self.executables_take, 8 * 2**30),
            "graph_pool_handle": lambda: next(pools),
            "CUDAGraph": lambda keep_graph: _Graph(self),
            "graph": self._capture,
        }
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_allocating, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: self._leave(pool), raising=False)
        patch.setattr("graphs.executor.count_kernels", lambda graph: 3)
        patch.setattr("graphs.executor.upload", lambda executable, stream: True)
        # Collecting all that a test process has made takes a good part of a second, and frees no device's memory here.
        patch.setattr("graphs.executor.gc.collect", lambda: 0)
        patch.setattr("graphs.executor._make_workspaces", lambda device: None)

    def pools_alive(self) -> int:
        """Pools that a graph or a capture that was never ended still holds."""
        return sum(users > 0 for users in self._users.values())

    def captured_into_the_living_pool(self) -> int:
        """Captures that ever went into the one pool there is."""
        (pool,) = (pool for pool, users in self._users.items() if users)
        return self._captured[pool]

    @contextmanager
    def _capture(self, graph: "_Graph", pool: int, **_: Any) -> Any:
        self._users[pool] += 1
        self._captured[pool] += 1
        self._open_captures.append(pool)
        broken = True
        try:
            yield
            broken = False
        finally:
            if broken and self.ending_a_broken_capture_fails:
                raise RuntimeError("operation failed due to a previous error during capture: invalidated")
            self._open_captures.pop()
            graph.pool = pool

    def _end_allocating(self, device: int, pool: int) -> None:
        if pool not in self._open_captures:
            raise RuntimeError("not currently recording to mempool_id")
        self._open_captures.remove(pool)

    def _leave(self, pool: int) -> None:
        self._users[pool] -= 1


class _Graph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.pool = cuda, 0

    def raw_cuda_graph(self) -> int:
        return 1

    def raw_cuda_graph_exec(self) -> int:
        return 2

    def instantiate(self) -> None:
        self._cuda.executables_take += 5 * 2**20

    def replay(self) -> None:
        self._cuda.replays += 1

    def reset(self) -> None:
        if self.pool:
            self._cuda._leave(self.pool)
            self.pool = 0
