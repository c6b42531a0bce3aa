"""A run whose gradients are not finite: a bad step changes nothing but counters, and too many in a row stop the run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.bad_steps import TooManyBadSteps
from engine.checkpoint import Position
from engine.metrics import MetricsSnapshot
from engine.run import TrainingRun
from engine.settings_fields import SettingsError
from tests.run_helpers import checkpoint_tensors, run, run_settings, steps_of, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
# The second step's weights are so large that no loss after it is finite.
DIVERGES = ("optimizer.lr=1e30", "optimizer.warmup_ratio=0", "run.epochs=50", "run.save_every=0")
AfterStep = Callable[[int, Callable[[], None]], None]


def spoil(run: TrainingRun) -> None:
    run.engine.objective.ce_weight.fill_(float("nan"))


def test_the_run_stops_and_names_the_samples(tmp_path: Path) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "run"
    with pytest.raises(TooManyBadSteps) as caught:
        run(data, out, *DIVERGES, "run.max_bad_steps=8")
    record = json.loads((out / "bad_steps.json").read_text())
    assert record["max_bad_steps"] == 8 and 8 <= record["in_a_row"] <= 9
    first, last = record["steps"][0], record["steps"][-1]
    assert [step["step"] for step in record["steps"]] == list(range(first["step"], record["step"] + 1))
    assert len(record["steps"]) == record["in_a_row"] and first["step"] in (2, 3)
    (batch,) = last["batches"]
    (sample,) = batch["samples"]
    assert batch["bucket"].startswith("1x") and sample["piece"] == 0 and sample["tokens"][0] == 0
    assert record["seen"][-1]["step"] == record["step"] and record["seen"][-1]["grad_norm"] in ("nan", "inf")
    assert record["seen"][-1]["bad_micro_batches"] == 2
    line = str(caught.value)
    ids = first["batches"][0]["samples"][0]["sample"]
    assert f"{out / 'bad_steps.json'} names their samples, those of step {first['step']}: {ids}. Look at these" in line
    assert "expected a finite gradient in one of 8 steps (run.max_bad_steps), found none in the " in line


def test_the_checkpoint_before_the_stop_has_what_was_learned_before_the_bad_steps(
    tmp_path: Path, after_step: AfterStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = training_dataset(tmp_path / "data")
    changes = ("run.epochs=50", "run.save_every=5")
    spoiled: list[TrainingRun] = []
    begin_at = TrainingRun.begin_at

    def noted(self: TrainingRun, start: Position) -> None:
        spoiled[:] = [self]
        begin_at(self, start)

    monkeypatch.setattr(TrainingRun, "begin_at", noted)
    # From here on every gradient is NaN: a weight of the loss is.
    after_step(5, lambda: spoil(spoiled[0]))
    with pytest.raises(TooManyBadSteps):
        run(data, tmp_path / "run", *changes, "run.max_bad_steps=4", "run.keep=9")
    assert steps_of(tmp_path / "run") == [5, 9]
    before, after = (checkpoint_tensors(tmp_path / "run", step) for step in (5, 9))
    counters = {name for name in before if not torch.equal(before[name], after[name])}
    assert counters == {"optimizer.skipped", "metrics.sums", "consumed"}
    # The same command goes on from there, and learns again.
    result = run(data, tmp_path / "run", *changes, "run.max_bad_steps=4", "run.max_steps=12")
    assert result["steps"] == 12 and result["skipped_steps"] == 4


def test_0_never_stops(tmp_path: Path) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "run"
    result = run(data, out, *DIVERGES, "run.max_bad_steps=0", "run.max_steps=25")
    assert result["skipped_steps"] >= 23 and not (out / "bad_steps.json").exists()


def test_numbers_that_have_not_come_over_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = training_dataset(tmp_path / "data"), tmp_path / "run"
    asked: list[MetricsSnapshot] = []

    def not_yet(self: MetricsSnapshot) -> bool:
        asked.append(self)
        return False

    monkeypatch.setattr(MetricsSnapshot, "ready", not_yet)
    run(data, out, *DIVERGES, "run.max_bad_steps=1", "run.max_steps=10", "run.log_every=100")
    assert asked and not (out / "bad_steps.json").exists()


@pytest.mark.parametrize("gamma", ["1e-300", "1e-40", "0.009"])
def test_a_gamma_with_which_no_weight_is_a_number_is_refused(gamma: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"objective\.gamma: expected 0 \(the paper's\) or at least 0\.01, found "):
        run_settings(tmp_path, tmp_path, f"objective.gamma={gamma}")
    assert run_settings(tmp_path, tmp_path, "objective.gamma=0.01").objective.gamma == 0.01
