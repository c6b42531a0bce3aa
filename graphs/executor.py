"""Named steps, captured once and replayed - or, on the CPU, called. One interface; which of the two it is, is reported.

All graphs of a GraphExecutor are one generation: one memory pool, one stream, captured in the order they were added (add the
largest first: later graphs then fit into blocks that exist), replayed by one thread, closed together.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from graphs.guards import host_sync_is_an_error
from graphs.nodes import count_kernels
from graphs.timing import StepTimes

Step = Callable[[], object]


@dataclass(frozen=True)
class BuildReport:
    """What building one step took. pool_mib: growth of the memory that torch holds on the device, by this capture; exec_mib:
    what the device has less of besides, for the executable graph; nodes: kernels in it, None where nobody counted."""

    name: str
    how: str  # "replayed" | "called"
    warm_up_s: float
    capture_s: float
    pool_mib: float
    exec_mib: float = 0.0
    nodes: int | None = None


class CaptureError(RuntimeError):
    """A step could not be warmed up or captured; says which and what to do."""


class CallExecutor:
    """Calls the steps: what runs where there is no GPU. No stream, no pool, no addresses to keep."""

    how = "called"

    def __init__(self) -> None:
        self.times = StepTimes(None)
        self._steps: dict[str, Step] = {}

    def add(self, name: str, step: Step) -> None:
        """Registers a step without arguments and with effects on fixed memory only."""
        assert name not in self._steps, f"step {name} was added twice"
        self._steps[name] = step

    def build(self) -> list[BuildReport]:
        """Nothing to capture; steps may run from here on."""
        return [BuildReport(name, self.how, 0.0, 0.0, 0.0) for name in self._steps]

    def run(self, name: str) -> None:
        """The step's effects, by the fastest way there is."""
        with self.times.measure(name):
            self._steps[name]()

    def call(self, name: str) -> None:
        """The step called from Python, whatever was captured."""
        self._steps[name]()

    def close(self) -> None:
        """Forgets the steps."""
        self._steps.clear()


class GraphExecutor:
    """Captures the steps into CUDA graphs. Makes its stream the calling thread's current one until close()."""

    how = "replayed"

    def __init__(self, device: torch.device, *, warm_ups: int = 2) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._previous_stream = torch.cuda.current_stream(device)
        self.stream.wait_stream(self._previous_stream)
        torch.cuda.set_stream(self.stream)
        _make_workspaces(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._warm_ups = warm_ups
        self._steps: dict[str, Step] = {}
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self.times = StepTimes(device)

    def add(self, name: str, step: Step) -> None:
        """Registers a step without arguments, with effects on memory whose addresses stay. Add the largest first."""
        assert not self._graphs, "all steps are added before build(): a generation is made whole"
        assert name not in self._steps, f"step {name} was added twice"
        self._steps[name] = step

    def build(self) -> list[BuildReport]:
        """Warms up every step on the capture stream (all compilation happens there), then captures them.

        The steps really run: the caller restores what they changed. Raises CaptureError naming the step.
        """
        warm_up_s = {name: self._warm_up(name) for name in self._steps}
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        reports = []
        for name in self._steps:
            held, free = torch.cuda.memory_reserved(self.device), torch.cuda.mem_get_info(self.device)[0]
            start = time.perf_counter()
            nodes = self._capture(name)
            capture_s = time.perf_counter() - start
            grown = torch.cuda.memory_reserved(self.device) - held
            beside = max(0, free - torch.cuda.mem_get_info(self.device)[0] - grown)
            reports.append(
                BuildReport(name, self.how, warm_up_s[name], capture_s, grown / 2**20, beside / 2**20, nodes)
            )
        return reports

    def run(self, name: str) -> None:
        """Replays. Whatever the step returned when captured is overwritten; read results from fixed memory."""
        with self.times.measure(name):
            self._graphs[name].replay()

    def call(self, name: str) -> None:
        """The eager twin, on the same stream."""
        self._steps[name]()

    def close(self) -> None:
        """Frees all graphs at once (cuBLAS workspaces are shared by the graphs of a stream) and leaves the stream."""
        torch.cuda.synchronize(self.device)
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._steps.clear()
        self._previous_stream.wait_stream(self.stream)
        if torch.cuda.current_stream(self.device) == self.stream:
            torch.cuda.set_stream(self._previous_stream)
        gc.collect()
        torch.cuda.empty_cache()

    def _warm_up(self, name: str) -> float:
        start = time.perf_counter()
        with self._explained(name, "warming up"):
            for i in range(self._warm_ups):
                # The first call compiles, which may synchronise; the later ones are what will be captured.
                with host_sync_is_an_error(i > 0):
                    self._steps[name]()
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _capture(self, name: str) -> int | None:
        """Captures one step; the kernels in its graph, where they can be counted."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # thread_local: the loader thread may pin and copy meanwhile.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local")
        with self._explained(name, "capturing"), _no_garbage_collection(), capture:
            self._steps[name]()
        nodes = count_kernels(graph.raw_cuda_graph())
        if nodes == 0:
            raise CaptureError(
                f"captured no kernel of {name}: expected its work on the capture stream, found it elsewhere; do not cache streams"
            )
        with self._explained(name, "instantiating"):
            graph.instantiate()
        self._graphs[name] = graph
        return nodes

    @contextmanager
    def _explained(self, name: str, doing: str) -> Iterator[None]:
        free = torch.cuda.mem_get_info(self.device)[0] / 2**30
        try:
            yield
        except torch.OutOfMemoryError as error:
            total = torch.cuda.mem_get_info(self.device)[1] / 2**30
            raise CaptureError(
                f"out of GPU memory while {doing} {name}: {free:.1f} of {total:.1f} GiB were free before it; lower "
                f"buckets.token_budget, buckets.num_anchors or model.head_chunk ({_first_line(error)})"
            ) from error
        except RuntimeError as error:
            raise CaptureError(f"could not finish {doing} {name}: {_first_line(error)}") from error


def make_executor(device: torch.device) -> CallExecutor | GraphExecutor:
    """Graphs on CUDA, calls on the CPU."""
    return GraphExecutor(device) if device.type == "cuda" else CallExecutor()


def _make_workspaces(device: torch.device) -> None:
    """cuBLAS keeps a workspace for each thread and stream for good. Made before anything large exists: otherwise it would
    settle inside a block that the warm-up frees, and keep all of that block's segment from being given back."""
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()  # the backward pass runs in a thread of its own


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # A graph or tensor collected during another capture invalidates that capture (pytorch #161037).
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
