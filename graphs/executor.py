"""Named steps, captured once and replayed. The CPU's twin, which calls them, is in steps.py; which of the two it is, is reported.

All graphs of a GraphExecutor are one generation: one memory pool, one stream, captured in the order they were added (add the
largest first: later graphs then fit into blocks that exist), replayed by one thread at a time, closed together.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from buffers.stages import stage
from graphs.capture_errors import CaptureError, explained
from graphs.guards import host_sync_is_an_error, noting_host_syncs
from graphs.nodes import count_kernels, upload
from graphs.pool_poison import fill_pool
from graphs.steps import BuildReport, CallExecutor, Named, OnFailure, Step, nothing, step_named
from graphs.timing import StepTimes

__all__ = ["BuildReport", "CallExecutor", "CaptureError", "Executor", "GraphExecutor", "make_executor"]

Pool = Any  # torch's handle of a graph's memory pool

# From torch 2.12 on, freeing a graph frees the cuBLAS workspaces of its stream, whose addresses are in every graph that was
# captured there (pytorch #193402): a generation that outlives another needs a stream of its own. Before, nothing ever frees
# them, so that the same stream must serve again.
_RESET_FREES_WORKSPACES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
_STREAMS = 32  # torch hands these out in turn


@dataclass(frozen=True)
class _Captured:
    seconds: float
    pool_mib: float
    exec_mib: float
    nodes: int | None


class GraphExecutor:
    """Captures the steps into CUDA graphs. Makes its stream the calling thread's current one until close()."""

    def __init__(self, device: torch.device, *, predecessor: GraphExecutor | None = None) -> None:
        """predecessor: the generation before, whose place on the thread this one takes."""
        self.device = device
        self.on_failure: OnFailure = "stop"
        self.times = StepTimes(device)
        # What every replay begins with in all memory of the pool that nobody holds (pool_poison.py): None, whatever is there.
        self.pool_fill: int | None = None
        self.filled_mib = 0.0  # of the pool, before the last replay that was
        self._pool: Pool | None = None
        self._steps: dict[str, Step] = {}
        self._groups: dict[str, str] = {}
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._nodes: dict[str, int | None] = {}
        self._exec_mib: dict[str, float] = {}
        self._called: dict[str, str] = {}  # why, by name of a step that is called instead of replayed
        self._refused: dict[str, str] = {}  # those of them that are to be called whenever the graphs are made
        self.stream: torch.cuda.Stream
        self._previous_stream: torch.cuda.Stream
        if predecessor is None:
            self.stream, self._previous_stream = _free_stream(device), torch.cuda.current_stream(device)
        else:
            self.stream = _free_stream(device) if _RESET_FREES_WORKSPACES else predecessor.stream
            self._previous_stream = predecessor._previous_stream
        with _open_lock:
            _open.add(self)
        self.attach()
        _make_workspaces(device)

    @property
    def how(self) -> str:
        """replayed, or partly replayed where some steps could not be captured."""
        return "partly replayed" if self._called else "replayed"

    def add(self, name: str, step: Step, *, group: str = "") -> None:
        """Registers a step without arguments, with effects on memory whose addresses stay. Add the largest first. Steps of one
        group are all captured or, with on_failure = "eager", all called."""
        assert not self._graphs, "all steps are added before build(): a generation is made whole"
        assert name not in self._steps, f"step {name} was added twice"
        self._steps[name] = step
        self._groups[name] = group or name

    def build(self, *, before: Named = nothing, after: Named = nothing) -> list[BuildReport]:
        """Warms up every step on the capture stream (all compilation happens there), then captures them.

        The steps really run, between before(name) and after(name): the caller restores what they changed. A step that cannot be
        captured raises CaptureError naming it and the line; with on_failure = "eager" its group is called instead, and the other
        steps are captured into a pool that never held it. A step that cannot even be called raises all the same.
        """
        assert not self._graphs, "build() was called twice without release()"
        with torch.cuda.device(self.device):
            self.attach()
            _make_workspaces(self.device)
            self._called = dict(self._refused)
            warm_up_s = {
                name: self._tried(name, lambda name: self._warm_up(name, before, after)) for name in self._steps
            }
            captured = self._capture_all()
            for name in self._called:
                with explained(name, "calling", self.device):
                    before(name)
                    self._steps[name]()
                    torch.cuda.synchronize(self.device)
        reports = []
        for name in self._steps:
            c = captured.get(name, _Captured(0.0, 0.0, 0.0, None))
            why = self._called.get(name, "")
            reports.append(
                BuildReport(
                    name, self.how_of(name), warm_up_s[name], c.seconds, c.pool_mib, c.exec_mib, nodes=c.nodes, why=why
                )
            )
        return reports

    def run(self, name: str) -> None:
        """Replays. Whatever the step returned when captured is overwritten; read results from fixed memory. Right from any
        thread, one at a time; without waiting for that thread's other work after attach()."""
        graph = self._graphs.get(name)
        with stage("replay" if graph is not None else "call", name), self._on_our_stream():
            if graph is not None and self.pool_fill is not None:
                self.filled_mib = fill_pool(self.device, self._pool, self.pool_fill) / 2**20
            with self.times.measure(name):
                if graph is None:
                    step_named(self._steps, name)()
                else:
                    graph.replay()

    def call(self, name: str) -> None:
        """The eager twin, on the same stream."""
        with self._on_our_stream(), torch.cuda.device(self.device):
            step_named(self._steps, name)()

    def how_of(self, name: str) -> str:
        """What run() does with this step."""
        return "called" if name in self._called else "replayed"

    def call_instead(self, name: str, why: str) -> None:
        """From here on, also after another build(), the steps of this one's group are called; the others are captured anew, into
        a pool that never held it."""
        group = self._groups[name]
        self._refused |= {other: why for other in self._steps if self._groups[other] == group}
        self._called |= self._refused
        self.release()
        with torch.cuda.device(self.device):
            self._capture_all()

    def successor(self) -> GraphExecutor:
        """An empty executor for the next generation, on this one's place on the thread. Close one of the two, then attach()
        the other."""
        new = GraphExecutor(self.device, predecessor=self)
        new.on_failure = self.on_failure
        return new

    def attach(self) -> None:
        """From here on the calling thread's current stream is this executor's, and its device the current one."""
        torch.cuda.set_device(self.device)
        current = torch.cuda.current_stream(self.device)
        if current != self.stream:
            self.stream.wait_stream(current)
            torch.cuda.set_stream(self.stream)

    def release(self) -> None:
        """Frees all graphs at once (cuBLAS workspaces are shared by the graphs of a stream) and their pool. build() makes them
        again."""
        torch.cuda.synchronize(self.device)
        self.times.clear()
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._pool = None
        gc.collect()
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Frees everything and leaves the stream."""
        self._steps.clear()
        self.release()
        with _open_lock:
            _open.discard(self)
        if torch.cuda.current_stream(self.device) == self.stream:
            self._previous_stream.wait_stream(self.stream)
            torch.cuda.set_stream(self._previous_stream)

    def _capture_all(self) -> dict[str, _Captured]:
        """Every step that may be captured, in one pool."""
        while True:
            torch.cuda.synchronize(self.device)
            gc.collect()
            torch.cuda.empty_cache()
            # A release() may have freed them, and those made inside a capture would lie in its pool.
            _make_workspaces(self.device)
            pool = self._pool = torch.cuda.graph_pool_handle()
            captured = {}
            for name in self._steps:
                if name in self._called:
                    continue
                held = torch.cuda.memory_reserved(self.device)
                capture_s = self._tried(name, lambda name: self._capture(name, pool))  # noqa: B023 - called at once
                if name in self._called:
                    break
                grown = torch.cuda.memory_reserved(self.device) - held
                captured[name] = _Captured(capture_s, grown / 2**20, self._exec_mib[name], self._nodes[name])
            else:
                return captured
            # The pool has grown for a step that will not use it.
            self.release()

    def _tried(self, name: str, do: Callable[[str], None]) -> float:
        """Seconds that it took. Notes the step's group as called where it failed and may."""
        start = time.perf_counter()
        try:
            do(name)
        except CaptureError as error:
            if self.on_failure == "stop":
                raise
            group = self._groups[name]
            self._called |= {other: str(error) for other in self._steps if self._groups[other] == group}
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _warm_up(self, name: str, before: Named = nothing, after: Named = nothing) -> None:
        """One call is enough for a capture to initialise nothing: Triton's kernels are compiled and loaded for the very types,
        alignments and constants that are captured, cuBLAS has chosen and loaded its kernels for these shapes (its handles and
        workspaces are _make_workspaces's), autograd's thread runs, and Inductor has chosen what it
        chooses by timing. Each step has a call of its own, for each has kernels of its own."""
        waits: list[str] = []
        with explained(name, "warming up", self.device):
            before(name)
            with noting_host_syncs(waits):
                self._steps[name]()
            if waits:
                # Compiling may wait for the device; a step that is compiled may not.
                before(name)
                with host_sync_is_an_error():
                    self._steps[name]()
            after(name)
            torch.cuda.synchronize(self.device)

    def _capture(self, name: str, pool: Pool) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # thread_local: the loader thread may pin and copy meanwhile.
        capture = torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local")
        try:
            with explained(name, "capturing", self.device), _no_garbage_collection(), capture:
                self._steps[name]()
            self._nodes[name] = count_kernels(graph.raw_cuda_graph())
            if self._nodes[name] == 0:
                raise CaptureError(
                    f"captured no kernel of {name}: expected its work on the capture stream, found it elsewhere; do not cache "
                    "streams"
                )
            with explained(name, "instantiating", self.device):
                free = torch.cuda.mem_get_info(self.device)[0]
                graph.instantiate()
                upload(graph.raw_cuda_graph_exec(), self.stream.cuda_stream)
                self._exec_mib[name] = max(0, free - torch.cuda.mem_get_info(self.device)[0]) / 2**20
        except CaptureError:
            _abandon(graph, pool, self.device)
            self.attach()  # torch before 2.15 stays where a failed capture was
            raise
        self._graphs[name] = graph

    @contextmanager
    def _on_our_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        if current == self.stream and torch.cuda.current_device() == self.device.index:
            yield
            return
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)


Executor = CallExecutor | GraphExecutor

_open: weakref.WeakSet[GraphExecutor] = weakref.WeakSet()
_open_lock = threading.Lock()


def make_executor(device: torch.device) -> Executor:
    """Graphs on CUDA, calls on the CPU."""
    return GraphExecutor(device) if device.type == "cuda" else CallExecutor()


def _free_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no open executor captures on: their graphs would share workspaces, and could not run side by side."""
    with _open_lock:
        taken = {executor.stream.cuda_stream for executor in _open}
    for _ in range(_STREAMS):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in taken:
            return stream
    raise RuntimeError(
        f"expected a free stream on {device}, found {len(taken)} taken; close engines that are done with"
    )


def _make_workspaces(device: torch.device) -> None:
    """cuBLAS keeps a workspace for each thread and stream. Made before anything large exists: otherwise it would settle inside
    a block that the warm-up frees, and keep all of that block's segment from being given back."""
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()  # the backward pass runs in a thread of its own


def _abandon(graph: torch.cuda.CUDAGraph, pool: Pool, device: torch.device) -> None:
    """Frees what a failed capture holds. Where the capture itself was broken, torch before 2.14 goes on counting it as one
    under way, keeps its pool, and frees no memory of anybody else's (pytorch #190348)."""
    graph.reset()
    with suppress(RuntimeError):  # raised where torch has ended it
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


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
