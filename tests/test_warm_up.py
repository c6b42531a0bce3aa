"""Compile first, threads later: after the warm-up compiling is an error in every thread, and engines step side by side."""

import _thread
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.workloads import RandomInputs
from buffers.shapes import Bucket
from engine.engine import Engine
from engine.settings import ObjectiveSettings, OptimizerSettings
from engine.warm_up import warm_up
from graphs.compile_ban import CompilationError, compilation_allowed, no_compilation
from graphs.executor import CallExecutor
from tests.drafter_helpers import CPU, assert_same_bits, random_target, random_weights, small_config

pytestmark = pytest.mark.usefixtures("one_thread")

BUCKETS = [Bucket(B=2, S=32, N=4, K=4, tile=16), Bucket(B=1, S=64, N=16, K=4, tile=16)]
MESSAGE = "a function under torch.compile is being compiled in thread {} after the warm-up: expected everything to be compiled"


def in_threads(*works: Callable[[], None]) -> list[BaseException]:
    """Does them at the same time; what they raised."""
    raised: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), name=f"worker {i}") for i, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.fixture
def compiled() -> Any:
    """A compiled function that knows one shape."""
    torch._dynamo.reset()
    function = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    function(torch.ones(2))
    yield function
    torch._dynamo.reset()


def test_what_is_compiled_goes_on_and_what_is_not_is_an_error_in_every_thread(compiled: Any) -> None:
    with no_compilation():
        assert compiled(torch.ones(2)).tolist() == [2, 2]
        with pytest.raises(RuntimeError, match=MESSAGE.format("MainThread")):
            compiled(torch.ones(3))
        (error,) = in_threads(lambda: compiled(torch.ones(3)))
        assert MESSAGE.format("worker 0") in str(error)
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]


def test_a_new_generation_may_compile_in_its_thread_alone(compiled: Any) -> None:
    with no_compilation(), compilation_allowed():
        (error,) = in_threads(lambda: compiled(torch.ones(4)))
        assert "worker 0" in str(error)
        assert compiled(torch.ones(4)).sum() == 8
        with no_compilation():
            pass
    with no_compilation(), pytest.raises(RuntimeError, match="after the warm-up"):
        compiled(torch.ones(5))


def test_what_autograd_runs_in_threads_of_its_own_compiles_for_a_new_generation_too(compiled: Any) -> None:
    """On CUDA a backward pass does not run in the thread that asked for it. Threads of no Python name stand for autograd's."""

    def in_autograds_thread(size: int) -> list[BaseException]:
        raised: list[BaseException] = []
        done = threading.Event()

        def backward() -> None:
            try:
                compiled(torch.ones(size))
            except BaseException as error:
                raised.append(error)
            done.set()

        _thread.start_new_thread(backward, ())
        assert done.wait(60)
        return raised

    with no_compilation():
        (error,) = in_autograds_thread(6)
        assert "after the warm-up" in str(error)
        with compilation_allowed():
            assert in_autograds_thread(6) == []
            (error,) = in_threads(lambda: compiled(torch.ones(8)))
            assert "worker 0" in str(error)
        (error,) = in_autograds_thread(9)
        assert "after the warm-up" in str(error)


def test_a_compiler_that_is_loaded_later_is_watched_too() -> None:
    torch._dynamo.reset()  # forgets that it is watched
    original = torch.compile
    hidden = {name: module for name, module in sys.modules.items() if name == "torch._dynamo.callback"}
    with pytest.MonkeyPatch.context() as patch:
        for name in hidden:
            patch.delitem(sys.modules, name)
        with no_compilation():
            patch.undo()  # now it is loaded
            function = torch.compile(lambda x: x - 1, backend="eager")
            with pytest.raises(RuntimeError, match="after the warm-up"):
                function(torch.ones(2))
    assert torch.compile is original


def test_a_triton_kernel_for_a_new_combination_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    runtime = SimpleNamespace(jit_cache_hook=lambda **kwargs: asked.append(kwargs))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    with no_compilation():
        with pytest.raises(CompilationError, match="the Triton kernel rms_norm_kernel is being compiled in thread"):
            runtime.jit_cache_hook(fn=SimpleNamespace(name="rms_norm_kernel"))
        assert not asked
    runtime.jit_cache_hook(fn=SimpleNamespace(name="rms_norm_kernel"))
    assert len(asked) == 1, "whoever was asked before us is asked still"


def make_engine(seed: int) -> tuple[Engine, RandomInputs]:
    config = small_config()
    inputs = RandomInputs(config, BUCKETS, CPU, torch.float32)
    engine = Engine(
        config,
        random_target(config),
        BUCKETS,
        inputs,
        device=CPU,
        objective=ObjectiveSettings(),
        optimizer=OptimizerSettings(weight_decay=0.1 * seed),
    )
    engine.params.load_(random_weights(config))
    return engine, inputs


def trained(engine: Engine, inputs: RandomInputs, seed: int, into: dict[int, dict[str, Tensor]]) -> None:
    engine.attach()
    for step in range(6):
        for bucket in BUCKETS:
            inputs.fill(bucket, seed=100 * seed + step)
            engine.micro_step(bucket)
        engine.update(lr=1e-2)
    into[seed] = {name: value.clone() for name, value in engine.params.state().items()}


def test_engines_built_in_one_thread_step_side_by_side_in_others() -> None:
    expected: dict[int, dict[str, Tensor]] = {}
    found: dict[int, dict[str, Tensor]] = {}
    for seed in (1, 2):
        engine, inputs = make_engine(seed)
        engine.build()
        trained(engine, inputs, seed, expected)
    made = [make_engine(seed) for seed in (1, 2)]
    with warm_up([engine for engine, _ in made]) as reports:
        assert [len(of_engine) for of_engine in reports] == [5, 5]
        works = [lambda e=e, i=i, s=s: trained(e, i, s, found) for s, (e, i) in enumerate(made, start=1)]  # type: ignore[misc]
        assert in_threads(*works) == []
    for seed in (1, 2):
        assert_same_bits(found[seed], expected[seed])
    assert not torch.equal(found[1]["fc.weight"], found[2]["fc.weight"])


def test_a_run_forbids_compiling_while_it_trains(
    tmp_path: Any, after_step: Callable[[int, Callable[[], None]], None], compiled: Any
) -> None:
    from tests.run_helpers import run, training_dataset

    seen: list[str] = []

    def compile_something() -> None:
        with pytest.raises(RuntimeError, match="after the warm-up"):
            compiled(torch.ones(7))
        seen.append("refused")

    after_step(2, compile_something)
    run(training_dataset(tmp_path / "data"), tmp_path / "run", "run.max_steps=3")
    assert seen == ["refused"]
    assert compiled(torch.ones(7)).sum() == 14


def test_regenerating_an_engine_changes_its_shapes_and_keeps_its_state() -> None:
    engine, inputs = make_engine(1)
    engine.build()
    fewer = BUCKETS[:1]
    new_inputs = RandomInputs(small_config(), fewer, CPU, torch.float32)
    inputs.fill(BUCKETS[0], seed=1)
    engine.micro_step(BUCKETS[0])
    with pytest.raises(AssertionError, match="between two optimizer steps"):
        engine.regenerate(buckets=fewer, inputs=new_inputs)
    engine.update(lr=1e-2)
    assert engine.optimizer is not None
    before = {name: tensor.clone() for name, tensor in state_of(engine).items()}
    seen: Sequence[Any] = engine.regenerate(
        buckets=fewer, inputs=new_inputs, objective=ObjectiveSettings(weighting="uniform", ce_weight=2.0)
    )
    assert sorted(report.name for report in seen) == ["add 2x32x4", "train 2x32x4", "update"]
    assert (engine.generation, engine.buckets, engine.objective.weighting) == (2, (BUCKETS[0],), "uniform")
    assert float(engine.objective.ce_weight) == 2.0
    assert_same_bits(state_of(engine), before)
    with pytest.raises(ValueError, match="expected one of the generation's steps"):
        engine.micro_step(BUCKETS[1])


def test_a_generation_that_cannot_even_be_assembled_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, inputs = make_engine(1)
    engine.build()
    closed, attached = [], []
    successor = CallExecutor.successor

    def noted(old: CallExecutor) -> CallExecutor:
        new = successor(old)
        monkeypatch.setattr(new, "close", lambda: closed.append(new))
        monkeypatch.setattr(old, "attach", lambda: attached.append(old))
        return new

    def no_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 9 GiB")

    monkeypatch.setattr(CallExecutor, "successor", noted)
    monkeypatch.setattr("engine.engine.assemble", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        engine.regenerate(recompute="layer")
    assert len(closed) == 1, "its stream is free again"
    assert attached == [engine.executor] and engine.generation == 1
    inputs.fill(BUCKETS[0], seed=1)
    engine.micro_step(BUCKETS[0])
    engine.update(lr=1e-2)


def state_of(engine: Engine) -> dict[str, Tensor]:
    assert engine.optimizer is not None
    metrics = {"sums": engine.metrics.sums, "slots": engine.metrics.slots, "grad norm": engine.optimizer.grad_norm}
    return metrics | engine.params.state() | engine.optimizer.state()
