"""train --check: a sound run comes through with the same bits; each broken promise stops it with one line that names it."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.cli import main
from engine.checking import CheckFailed, StepChecks
from engine.engine import Engine
from engine.settings import Settings
from engine.train import train
from graphs.guards import Counters, noting_host_syncs
from graphs.pool_poison import POISON
from graphs.steps import CallExecutor
from tests.run_helpers import SETTINGS, checkpoint_tensors, metrics, run_settings, steps_of, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
AfterStep = Callable[[int, Callable[[], None]], None]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return training_dataset(tmp_path / "data", last_hidden_norm="post")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Every engine that is built."""
    built: list[Engine] = []
    build = Engine.build

    def note(self: Engine, *loads: Any) -> Any:
        built.append(self)
        return build(self, *loads)

    monkeypatch.setattr(Engine, "build", note)
    return built


def checked(data: Path, output: Path, *changes: str) -> Settings:
    soft = ("objective.kl_weight=0.5", "run.accumulation=2", "run.save_every=0")
    return run_settings(data, output, "run.check_every=3", *soft, *changes)


def test_a_sound_run_is_the_same_run_bit_for_bit(data: Path, tmp_path: Path) -> None:
    train(checked(data, tmp_path / "plain", "run.check_every=0"))
    figures = train(checked(data, tmp_path / "checked"))
    assert figures["checks"] == {"steps": 10, "compared": 3, "poisoned_mib": 0.0}
    plain, looked_at = (checkpoint_tensors(tmp_path / name, 10) for name in ("plain", "checked"))
    assert all((plain[name] == looked_at[name]).all() for name in plain)
    losses = [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("plain", "checked")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_a_step_that_reads_padding_stops_without_a_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.ops.zero_padding_ref.zero_padding_ref", lambda x, lengths: None)
    settings = [*SETTINGS, f"data.path={data}", f"run.output={tmp_path / 'run'}"]
    command = ["train", "--check", *(word for setting in settings for word in ("--set", setting))]
    assert main(command) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: step 1: expected finite numbers, found NaN or infinity in ")
    assert "--check's NaN from the padding of the inputs, so a step reads it" in line
    assert not (tmp_path / "run" / "checkpoints").exists() or steps_of(tmp_path / "run") == []


def test_padding_that_counts_without_being_nan_is_found_by_comparing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[Engine]
) -> None:
    run = CallExecutor.run

    def counts_padding(self: CallExecutor, name: str) -> None:
        run(self, name)
        kind, _, bucket = name.partition(" ")
        if kind in ("train", "add"):
            (engine,) = engines
            inputs = engine.options.inputs(next(b for b in engine.buckets if b.name == bucket))
            engine.metrics.sums[0] += inputs["loss_mask"].sum()

    monkeypatch.setattr(CallExecutor, "run", counts_padding)
    with pytest.raises(
        CheckFailed, match="step 3: expected the same numbers whatever padding holds, found (loss|metrics) off by"
    ):
        train(checked(data, tmp_path / "run"))


def test_a_replay_that_stops_being_the_eager_step_is_found(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[Engine], after_step: AfterStep
) -> None:
    run = CallExecutor.run

    def spoil() -> None:
        def run_wrongly(self: CallExecutor, name: str) -> None:
            run(self, name)
            if name.startswith("add"):
                engines[0].gradients()["fc.weight"][0, 0] += 1.0

        monkeypatch.setattr(CallExecutor, "run", run_wrongly)

    monkeypatch.setattr(CallExecutor, "how_of", lambda self, name: "replayed")
    after_step(4, spoil)
    with pytest.raises(
        CheckFailed, match=r"step 6: bucket 1x\d+x32: the replay differs from the eager step in fc.weight by"
    ):
        train(checked(data, tmp_path / "run"))


def test_a_buffer_that_moves_is_named(data: Path, tmp_path: Path, engines: list[Engine], after_step: AfterStep) -> None:
    def move() -> None:
        engines[0].metrics.sums = engines[0].metrics.sums.clone()

    after_step(2, move)
    with pytest.raises(
        CheckFailed, match=r"step 2: expected every buffer where it was, found metrics.training sums: 0x\w+ .* -> 0x"
    ):
        train(checked(data, tmp_path / "run"))


def test_nan_that_the_metrics_leave_out_is_found(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[Engine], after_step: AfterStep
) -> None:
    def count_a_bad_one() -> None:
        engines[0].metrics.sums[-1] += 1  # as Metrics.add does for sums that are not finite

    after_step(2, count_a_bad_one)
    with pytest.raises(
        CheckFailed, match="step 2: expected finite numbers, found NaN or infinity in metrics: it does not"
    ):
        train(checked(data, tmp_path / "run"))


def test_weights_that_the_update_spoils_are_found(
    data: Path, tmp_path: Path, engines: list[Engine], after_step: AfterStep
) -> None:
    def spoil() -> None:
        engines[0].params.weight[3] = float("nan")

    after_step(2, spoil)
    with pytest.raises(
        CheckFailed,
        match="found NaN or infinity in the weights: the gradients are finite, so the update diverges or reads",
    ):
        train(checked(data, tmp_path / "run"))


class Pool:
    """Plays the graphs' pool: as long as it is poisoned, the steps that are run read of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines: list[Engine]) -> None:
        run = CallExecutor.run

        def run_over_stale_memory(executor: CallExecutor, name: str) -> None:
            run(executor, name)
            if executor.pool_fill == POISON and not name.startswith("update"):
                self.spoil(engines[0])

        monkeypatch.setattr(CallExecutor, "run", run_over_stale_memory)
        monkeypatch.setattr(CallExecutor, "how_of", lambda executor, name: "replayed")

    def spoil(self, engine: Engine) -> None:
        """What comes of reading it."""
        engine.gradients()["fc.weight"][0, 0] = float("nan")


def test_nan_from_memory_of_the_pool_is_told_from_that_of_the_padding(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[Engine]
) -> None:
    Pool(monkeypatch, engines)
    with pytest.raises(
        CheckFailed, match="step 1: .*infinity in fc.weight: --check's NaN from the graphs' pool, so a step"
    ):
        train(checked(data, tmp_path / "run"))


def test_a_replay_that_is_the_eager_step_until_the_pool_is_poisoned(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[Engine]
) -> None:
    class Adds(Pool):
        def spoil(self, engine: Engine) -> None:
            engine.gradients()["fc.weight"][0, 0] += 1.0

    Adds(monkeypatch, engines)
    with pytest.raises(
        CheckFailed,
        match="step 3: .* differs from the eager step in fc.weight .*; only with NaN in free memory of the graphs",
    ):
        train(checked(data, tmp_path / "run"))


class Steps:
    """StepChecks over counts that a test sets; the step itself is played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counters = Counters(0, 0)
        monkeypatch.setattr(Counters, "read", staticmethod(lambda device: self.counters))
        engine: Any = SimpleNamespace(
            device=torch.device("cpu"),
            metrics=SimpleNamespace(bad_micro_batches=lambda: 0),
            executor=SimpleNamespace(how="replayed", how_of=lambda name: "replayed"),
        )
        self.engine = engine
        self.checks = StepChecks(engine, lambda: 1000)
        self.batches: Any = [SimpleNamespace(bucket=SimpleNamespace(name="1x2x3"))]

    def take(self, allocations: int = 0, compilations: int = 0, inside: Callable[[], None] = lambda: None) -> None:
        self.checks.begin()
        self.counters += Counters(allocations, compilations)
        inside()
        self.checks.end(5, self.batches, None)  # type: ignore[arg-type]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    yield Steps(monkeypatch)


def test_allocations_and_compilations_are_counted_and_told(steps: Steps) -> None:
    with pytest.raises(CheckFailed, match="step 5: expected no allocation on the device, found 2; "):
        steps.take(allocations=2)
    with pytest.raises(CheckFailed, match="step 5: expected nothing to be compiled, found 1 compilations"):
        steps.take(compilations=1)
    steps.engine.executor.how_of = lambda name: "called"
    with pytest.raises(AttributeError):  # past the counts: a bucket that is called allocates as every eager step does
        steps.take(allocations=2)


def test_a_wait_of_the_host_is_told_with_its_place(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: modes.append(mode))

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    with pytest.raises(
        CheckFailed, match=r"expected no wait of the host for the device, found 1, first at .*test_check.py:\d+; "
    ):
        steps.take(inside=wait)
    assert modes[-1] == 0 and "warn" in modes
    places: list[str] = []
    with pytest.warns(UserWarning, match="something else"), noting_host_syncs(places):
        warnings.warn("something else", stacklevel=1)
    assert places == [] and modes[-1] == 0
