"""Building captured generations, on a CUDA device that is none: what is captured, called and given back, and what is said when a
step cannot be captured."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.ops import rms_norm_ref
from graphs.executor import BuildReport, CaptureError, GraphExecutor
from graphs.generation import hand_over
from tests.fake_cuda import DEVICE, FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


class Step:
    """Fails at the calls whose numbers are given, from 1 on."""

    def __init__(self, *fails_at: int, error: Exception | None = None) -> None:
        self.calls, self.fails_at = 0, fails_at
        self.error = error or RuntimeError("operation not permitted when stream is capturing\nand a page of advice")

    def __call__(self) -> None:
        self.calls += 1
        if self.calls in self.fails_at:
            raise self.error


def executor_with(cuda: FakeCuda, steps: Mapping[str, Callable[[], Any]], on_failure: Any = "stop") -> GraphExecutor:
    executor = GraphExecutor(DEVICE)
    executor.on_failure = on_failure
    for name, step in steps.items():
        executor.add(name, step, group=name.split()[-1])
    return executor


def test_every_step_is_warmed_up_before_any_is_captured(cuda: FakeCuda) -> None:
    steps = {"train a": Step(), "add a": Step(), "train b": Step()}
    executor = executor_with(cuda, steps)
    reports = executor.build()
    assert [(report.name, report.how, report.why) for report in reports] == [(name, "replayed", "") for name in steps]
    assert {(report.nodes, report.exec_mib) for report in reports} == {(3, 5.0)}
    assert {step.calls for step in steps.values()} == {2}  # once to warm up, once into the graph
    for name in steps:
        executor.run(name)
    assert {step.calls for step in steps.values()} == {2}
    assert cuda.replays == 3 and cuda.pools_alive() == 1
    executor.close()
    assert cuda.pools_alive() == 0


def test_a_step_that_waited_for_the_device_is_called_once_more_where_waiting_is_an_error(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling may wait, a compiled step may not."""
    a, b = Step(), Step()
    forbidden: list[int] = []

    @contextmanager
    def noting(places: list[str]) -> Iterator[None]:
        yield
        if not b.calls:
            places.append("engine/step.py:1")

    @contextmanager
    def forbidding() -> Iterator[None]:
        forbidden.append(a.calls)
        yield

    monkeypatch.setattr("graphs.executor.noting_host_syncs", noting)
    monkeypatch.setattr("graphs.executor.host_sync_is_an_error", forbidding)
    executor = executor_with(cuda, {"train a": a, "train b": b})
    executor.build()
    assert (a.calls, b.calls, forbidden) == (3, 2, [1])
    executor.close()


@pytest.mark.parametrize(("at", "doing"), [(1, "warming up"), (2, "capturing")])
def test_strict_is_the_default_and_names_the_step(cuda: FakeCuda, at: int, doing: str) -> None:
    executor = executor_with(cuda, {"train a": Step(), "train b": Step(at)})
    with pytest.raises(CaptureError, match=f"could not finish {doing} train b: operation not permitted when stream is"):
        executor.build()
    executor.close()
    assert cuda.pools_alive() == 0


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("out_of_memory", [False, True])
def test_a_bucket_that_cannot_be_captured_is_called_and_the_others_are_replayed(
    cuda: FakeCuda, at: int, out_of_memory: bool
) -> None:
    error = torch.OutOfMemoryError("operation not permitted: 9 GiB asked for") if out_of_memory else None
    steps = {"train a": Step(), "add a": Step(at, error=error), "train b": Step(), "add b": Step()}
    executor = executor_with(cuda, steps, "eager")
    reports = {report.name: report for report in executor.build()}
    assert {name: report.how for name, report in reports.items()} == {
        "train a": "called",
        "add a": "called",
        "train b": "replayed",
        "add b": "replayed",
    }
    assert executor.how == "partly replayed"
    assert re.search("add a: .*operation not permitted", reports["train a"].why) and not reports["train b"].why
    assert (
        cuda.pools_alive() == 1 and cuda.captured_into_the_living_pool() == 2
    )  # nothing that was captured of bucket a is left
    calls = {name: step.calls for name, step in steps.items()}
    for name in steps:
        executor.run(name)
    assert {name: step.calls - calls[name] for name, step in steps.items()} == {
        "train a": 1,
        "add a": 1,
        "train b": 0,
        "add b": 0,
    }
    executor.close()


def test_a_bucket_that_is_called_after_all_leaves_the_pool(cuda: FakeCuda) -> None:
    steps = {"train a": Step(), "add a": Step(), "train b": Step(), "update": Step()}
    executor = executor_with(cuda, steps, "eager")
    executor.build()
    assert executor.how == "replayed"
    executor.call_instead("add a", "its replay was wrong")
    assert {name: executor.how_of(name) for name in steps} == {
        "train a": "called",
        "add a": "called",
        "train b": "replayed",
        "update": "replayed",
    }
    assert cuda.pools_alive() == 1 and cuda.captured_into_the_living_pool() == 2
    executor.close()


def test_a_refused_bucket_is_called_too_when_the_graphs_are_made_again(cuda: FakeCuda) -> None:
    old = executor_with(cuda, {"train a": Step(), "add a": Step(), "train b": Step()}, "eager")
    old.build()
    old.call_instead("train a", "its replay was wrong")
    new = old.successor()
    new.add("train c", Step(1))
    new.on_failure = "stop"
    reports: list[BuildReport] = []
    with pytest.raises(CaptureError, match="train c"):
        hand_over(old, new, order="after", make=new.build, remake=lambda: reports.extend(old.build()))
    assert {report.name: (report.how, report.why) for report in reports} == {
        "train a": ("called", "its replay was wrong"),
        "add a": ("called", "its replay was wrong"),
        "train b": ("replayed", ""),
    }
    assert cuda.captured_into_the_living_pool() == 1
    old.close()


def test_a_bucket_whose_capture_failed_is_tried_again_with_the_next_graphs(cuda: FakeCuda) -> None:
    executor = executor_with(cuda, {"train a": Step(2), "train b": Step()}, "eager")
    executor.build()
    assert executor.how_of("train a") == "called"
    executor.release()
    executor.build()
    assert executor.how == "replayed"
    executor.close()


def test_a_step_that_cannot_even_be_called_stops_all_the_same(cuda: FakeCuda) -> None:
    executor = executor_with(cuda, {"train a": Step(*range(10))}, "eager")
    with pytest.raises(CaptureError, match="could not finish calling train a: operation not permitted"):
        executor.build()


def test_out_of_memory_names_the_step_and_what_to_lower(cuda: FakeCuda) -> None:
    error = torch.OutOfMemoryError("Tried to allocate 9 GiB\nand a page of advice")
    message = (
        "out of GPU memory while capturing train 4x512x64: 1.5 of 8.0 GiB were free before it; lower "
        r"buckets.token_budget, buckets.num_anchors or model.head_chunk \(Tried to allocate 9 GiB\)"
    )
    executor = executor_with(cuda, {"train 4x512x64": Step(2, error=error)})
    with pytest.raises(CaptureError, match=message):
        executor.build()


def test_what_triton_cannot_do_on_this_card_names_the_step_too(cuda: FakeCuda) -> None:
    OutOfResources = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    error = OutOfResources("out of resource: shared memory, Required: 300000, Hardware limit: 232448")
    executor = executor_with(cuda, {"train a": Step(1, error=error), "train b": Step()}, "eager")
    reports = {report.name: report for report in executor.build()}
    assert [report.how for report in reports.values()] == ["called", "replayed"]
    assert "could not finish warming up train a: out of resource: shared memory" in reports["train a"].why
    executor.close()
    executor = executor_with(cuda, {"train a": Step(1, error=ValueError("a setting that does not fit"))}, "eager")
    with pytest.raises(ValueError, match="a setting that does not fit"):
        executor.build()
    executor.close()


def test_the_innermost_line_of_ours_is_named(cuda: FakeCuda) -> None:
    def step() -> None:
        rms_norm_ref.normalise(torch.ones(2, 3), eps=torch.ones(5))  # type: ignore[arg-type]

    executor = executor_with(cuda, {"train a": step})
    with pytest.raises(CaptureError, match=r"must match .*\(at engine/ops/rms_norm_ref.py:\d+, in normalise\)"):
        executor.build()


def test_the_cause_is_told_where_ending_a_broken_capture_fails_too(cuda: FakeCuda) -> None:
    cuda.ending_a_broken_capture_fails = True
    executor = executor_with(cuda, {"train a": Step(2)}, "eager")
    (report,) = executor.build()
    assert "capturing train a: operation not permitted when stream is capturing" in report.why
    assert "invalidated" not in report.why
    assert cuda.pools_alive() == 0, "torch keeps the pool of a capture that it could not end"
    executor.close()


def test_an_earlier_error_is_not_taken_for_the_cause(cuda: FakeCuda) -> None:
    executor = executor_with(cuda, {"train a": Step(1)})
    try:
        raise ValueError("something else")
    except ValueError:
        with pytest.raises(CaptureError, match="warming up train a: operation not permitted"):
            executor.build()


@pytest.mark.parametrize("order", ["beside", "after"])
def test_a_generation_takes_over_whole(cuda: FakeCuda, order: Any) -> None:
    outer = torch.cuda.current_stream()
    old = executor_with(cuda, {"train a": Step()})
    old.build()
    for _ in range(20):
        new = old.successor()
        new.add("train b", Step())
        seen: list[int] = []

        def make(new: GraphExecutor = new, seen: list[int] = seen) -> None:
            new.build()
            seen.append(cuda.pools_alive())

        hand_over(old, new, order=order, make=make, remake=lambda: pytest.fail("nothing to make again"))
        assert seen == [2 if order == "beside" else 1]
        assert cuda.pools_alive() == 1
        assert torch.cuda.current_stream() == new.stream
        new.run("train b")
        with pytest.raises(ValueError, match="none: it is closed"):
            old.run("train a")
        old = new
    old.close()
    assert torch.cuda.current_stream() == outer


@pytest.mark.parametrize("order", ["beside", "after"])
@pytest.mark.parametrize("at", [1, 2])
def test_where_the_new_generation_fails_the_old_goes_on(cuda: FakeCuda, order: Any, at: int) -> None:
    step = Step()
    old = executor_with(cuda, {"train a": step})
    old.build()
    new = old.successor()
    new.add("train c", Step())  # of it there is a graph by then
    new.add("train b", Step(at))
    with pytest.raises(CaptureError, match="train b"):
        hand_over(old, new, order=order, make=new.build, remake=old.build)
    assert cuda.pools_alive() == 1
    assert step.calls == (2 if order == "beside" else 4)
    assert torch.cuda.current_stream() == old.stream
    old.run("train a")
    assert cuda.replays == 1
    old.close()


def test_engines_that_are_open_have_streams_of_their_own(cuda: FakeCuda) -> None:
    first = GraphExecutor(DEVICE)
    others = []
    for _ in range(40):
        executor = GraphExecutor(DEVICE)
        others.append(executor.stream)
        executor.close()
    assert first.stream not in others
    first.close()
