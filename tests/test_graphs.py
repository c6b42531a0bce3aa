"""Named steps on the CPU, the comparison of two runs, and the counters that prove a steady state."""

import pytest
import torch

from graphs.executor import CallExecutor, make_executor
from graphs.guards import Counters, host_sync_is_an_error
from graphs.parity import Difference, worst_difference
from graphs.timing import StepTimes

CPU = torch.device("cpu")


def test_steps_are_called_in_the_order_they_are_run() -> None:
    executor, seen = CallExecutor(), []
    executor.add("a", lambda: seen.append("a"))
    executor.add("b", lambda: seen.append("b"))
    reports = executor.build()
    assert [(report.name, report.how) for report in reports] == [("a", "called"), ("b", "called")]
    assert {report.pool_mib for report in reports} == {0.0}
    assert seen == [], "on the CPU building runs nothing"
    for name in ("b", "a", "b"):
        executor.run(name)
    executor.call("a")
    assert seen == ["b", "a", "b", "a"]


def test_runs_are_timed_and_calls_are_not() -> None:
    executor = CallExecutor()
    executor.add("step", lambda: None)
    executor.build()
    for _ in range(3):
        executor.run("step")
    executor.call("step")
    times = executor.times.read(wait=True)["step"]
    assert (times.count, len(times.samples_ms)) == (3, 3)
    assert times.device_ms == times.host_ms == pytest.approx(sum(times.samples_ms))
    executor.times.clear()
    assert executor.times.read() == {}


def test_a_step_that_raises_is_not_counted() -> None:
    times = StepTimes(None)
    with pytest.raises(RuntimeError, match="boom"), times.measure("step"):
        raise RuntimeError("boom")
    assert times.read() == {}


def test_a_name_is_given_once() -> None:
    executor = CallExecutor()
    executor.add("step", lambda: None)
    with pytest.raises(AssertionError, match="step step was added twice"):
        executor.add("step", lambda: None)


def test_after_close_there_is_nothing_to_run() -> None:
    executor = CallExecutor()
    executor.add("step", lambda: None)
    executor.close()
    with pytest.raises(ValueError, match="none: it is closed"):
        executor.run("step")
    assert executor.build() == []


def test_the_cpu_gets_calls() -> None:
    assert isinstance(make_executor(CPU), CallExecutor)


def test_equal_tensors_have_no_difference() -> None:
    a = {"x": torch.tensor([1.0, float("nan"), float("inf")]), "n": torch.tensor([1, 2]), "empty": torch.zeros(0)}
    assert worst_difference(a, {name: tensor.clone() for name, tensor in a.items()}) is None


def test_the_worst_tensor_is_named_with_its_relative_difference() -> None:
    expected = {"small": torch.tensor([1.0, 2.0]), "large": torch.tensor([100.0, 400.0]), "same": torch.ones(3)}
    found = {"small": torch.tensor([1.0, 2.5]), "large": torch.tensor([101.0, 400.0]), "same": torch.ones(3)}
    assert worst_difference(found, expected) == Difference("small", 0.25)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_on_one_side_is_the_worst(value: float) -> None:
    expected = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    found = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([1.0, value]), "c": torch.tensor([1.0, 9.0])}
    difference = worst_difference(found, expected)
    assert difference is not None
    assert difference.name == "b"
    assert difference.relative == float("inf")


def test_equal_infinities_do_not_hide_how_large_a_difference_is() -> None:
    expected = {"x": torch.tensor([float("nan"), float("inf"), 4.0])}
    found = {"x": torch.tensor([float("nan"), float("inf"), 5.0])}
    assert worst_difference(found, expected) == Difference("x", 0.25)


def test_a_difference_from_zero_is_seen() -> None:
    difference = worst_difference({"x": torch.tensor([1e-20])}, {"x": torch.zeros(1)})
    assert difference is not None
    assert difference.relative > 1


def test_tensors_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected the tensors \['a'\], found \['b'\]"):
        worst_difference({"b": torch.ones(1)}, {"a": torch.ones(1)})
    with pytest.raises(ValueError, match=r"a: expected torch.float32 \(2,\), found torch.float32 \(3,\)"):
        worst_difference({"a": torch.ones(3)}, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match=r"a: expected torch.float32 \(2,\), found torch.float64 \(2,\)"):
        worst_difference({"a": torch.ones(2).double()}, {"a": torch.ones(2)})


def test_counters_count_what_lies_between_two_readings() -> None:
    before = Counters.read(CPU)
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    assert Counters.read(CPU) - before == Counters(device_allocations=0, compilations=1)
    before = Counters.read(CPU)
    compiled(torch.ones(2))
    assert Counters.read(CPU) - before == Counters(0, 0)


def test_the_sync_detector_does_nothing_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with host_sync_is_an_error():
        assert torch.ones(1).item() == 1
