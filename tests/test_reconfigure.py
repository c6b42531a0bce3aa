"""A run whose settings change while it trains goes on as one that was stopped there and resumed under them - or as it was."""

import errno
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from buffers.stages import stages_now
from engine.config_file import ConfigFile
from engine.engine import Engine
from engine.run import TrainingRun
from engine.settings import Settings, load_settings
from engine.settings_fields import SettingsError
from engine.train import train
from graphs.executor import CallExecutor, CaptureError
from tests.drafter_helpers import assert_same_bits
from tests.reconfigure_helpers import (
    AfterStep,
    assert_same_run,
    events,
    hang_up,
    train_edited,
    train_resumed,
    write_config,
)
from tests.run_helpers import (
    checkpoint_tensors,
    every_token,
    interrupt,
    metrics,
    records,
    run,
    run_settings,
    steps_of,
    tokens_of_epoch,
    training_dataset,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LIVE = [
    "optimizer.lr=3e-2",
    "optimizer.schedule=constant",
    "optimizer.warmup_ratio=0.4",
    "optimizer.weight_decay=0.3",
    "optimizer.clip_norm=0.01",
    "optimizer.beta1=0.5",
    "optimizer.beta2=0.5",
    "optimizer.eps=1e-2",
    "objective.gamma=1.5",
    "objective.ce_weight=2",
    "run.log_every=2",
    "run.eval_every=3",
    "run.eval_batches=1",
    "run.save_every=3",
    "run.epochs=3",
    "run.max_steps=15",
    "run.switch_interval_ms=2",
]
RECAPTURE = [
    "buckets.lengths=256",
    "buckets.num_anchors=64",
    "buckets.max_rows=2",
    "buckets.packing=true",
    "model.recompute=layer",
    "model.head_chunk=64",
    "model.attention=reference",
    "objective.weighting=dpace",
    "objective.weighting=uniform",
    "objective.kl_weight=0.5",
    "data.too_long=truncate",
    "run.accumulation=2",
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return training_dataset(tmp_path / "data", last_hidden_norm="pre")


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    return training_dataset(tmp_path / "held-out", (50, 100, 140), first_sample=100, last_hidden_norm="pre")


@pytest.mark.parametrize("change", LIVE + RECAPTURE)
def test_it_goes_on_as_a_run_resumed_under_the_new_settings(
    data: Path, held_out: Path, tmp_path: Path, after_step: AfterStep, change: str
) -> None:
    first = (f"data.eval_path={held_out}", "run.log_every=1", "run.eval_every=5")
    edits = [(7, (change,))]
    figures = train_edited(after_step, data, tmp_path / "edited", edits, *first)
    resumed = train_resumed(after_step, data, tmp_path / "resumed", edits, *first)
    assert figures["steps"] == resumed["steps"]
    assert_same_run(tmp_path / "edited", tmp_path / "resumed", figures["steps"])
    (event,) = events(tmp_path / "edited")
    kind = "recapture" if change in RECAPTURE else "live"
    generation = 2 if kind == "recapture" else 1
    assert (event["step"], event["event"], event["why"]) == (7, "reconfigured", kind)
    assert event["generation"] == figures["generation"] == generation
    assert [changed["setting"] for changed in event["changes"]] == [change.partition("=")[0]]
    assert load_settings(tmp_path / "edited" / "settings.toml") == run_settings(
        data, tmp_path / "edited", *first, change
    )


def test_a_change_of_a_live_setting_is_seen_by_the_steps_after_it_alone(
    data: Path, tmp_path: Path, after_step: AfterStep
) -> None:
    """So that the test above compares more than two runs that changed nothing."""
    run(data, tmp_path / "plain", "run.log_every=1")
    plain = metrics(tmp_path / "plain")
    on_the_device = [change for change in LIVE if change.startswith(("optimizer.", "objective."))]
    for change in on_the_device:
        output = tmp_path / change
        train_edited(after_step, data, output, [(7, (change,))], "run.log_every=1", config=tmp_path / "edited.toml")
        lines = [record for record in metrics(output) if "loss" in record]
        assert [line["loss"] for line in lines[:7]] == [line["loss"] for line in plain[:7]]
        assert lines[8]["loss"] != plain[8]["loss"], change


def test_twenty_changes_in_a_row(data: Path, tmp_path: Path, after_step: AfterStep) -> None:
    """Of every class, a recapture every second time; each resumed twin starts where the settings changed."""
    changes = [
        ("buckets.lengths=256",), ("optimizer.lr=2e-2",), ("objective.kl_weight=0.5",), ("objective.kl_weight=0.25",),
        ("model.recompute=layer",), ("objective.gamma=2",), ("buckets.packing=true",), ("optimizer.weight_decay=0.1",),
        ("objective.weighting=dpace",), ("run.accumulation=2",), ("buckets.packing=false", "buckets.lengths=128,256"),
        ("run.log_every=2",), ("objective.kl_weight=0",), ("optimizer.beta2=0.9",), ("model.head_chunk=100",),
        ("run.epochs=9",), ("buckets.max_rows=2",), ("objective.ce_weight=0.5",), ("objective.weighting=decay",),
        ("model.recompute=none", "optimizer.clip_norm=0.5"),
    ]  # fmt: skip
    edits = [(step, change) for step, change in enumerate(changes, start=3)]
    first = ("run.epochs=5", "run.log_every=1")
    threads = threading.active_count()  # other tests' libraries leave some
    figures = train_edited(after_step, data, tmp_path / "edited", edits, *first)
    train_resumed(after_step, data, tmp_path / "resumed", edits, *first)
    assert_same_run(tmp_path / "edited", tmp_path / "resumed", figures["steps"])
    assert [event["step"] for event in events(tmp_path / "edited")] == list(range(3, 23))
    assert figures["generation"] == 13
    assert {row["generation"] for row in figures["buckets"]} == set(range(1, 14))
    assert threading.active_count() == threads, "a loader of an earlier generation still runs"


def test_every_sample_is_served_once_in_an_epoch_whose_plan_changes(
    data: Path, tmp_path: Path, after_step: AfterStep, steps_taken: list[Any]
) -> None:
    edits = [(3, ("buckets.lengths=256",)), (6, ("buckets.max_rows=2", "buckets.lengths=128,256"))]
    train_edited(after_step, data, tmp_path / "run", edits)
    served = tokens_of_epoch(steps_taken, 0)
    assert set(served) == every_token(data) and set(served.values()) == {1}
    assert len({batch.bucket for step in steps_taken for batch in step}) == 3


def test_weights_moments_and_scalars_stay_where_they_are(data: Path, tmp_path: Path, after_step: AfterStep) -> None:
    seen: list[dict[str, int]] = []
    with TrainingRun(run_settings(data, tmp_path / "run"), resume=True) as under_way:
        engine = under_way.engine

        def addresses() -> dict[str, int]:
            assert engine.optimizer is not None
            tensors: dict[str, Tensor] = {"weight": engine.params.weight, "grad": engine.params.grad}
            tensors |= engine.optimizer.state() | engine.optimizer.scalars()
            return {name: tensor.data_ptr() for name, tensor in tensors.items()}

        for batches in under_way.steps():
            for batch in under_way.arrivals(batches):
                engine.micro_step(batch.bucket)
            engine.update(under_way.schedule(under_way.progress.step))
            under_way.progress.took(batches)
            seen.append(addresses())
            if under_way.progress.step in (4, 9):
                before = {name: tensor.clone() for name, tensor in engine.params.state().items()}
                lengths = "256" if under_way.progress.step == 4 else "128,256"
                under_way.reconfigure(run_settings(data, tmp_path / "run", f"buckets.lengths={lengths}"))
                assert_same_bits(engine.params.state(), before)
        assert engine.generation == 3
        under_way.finish()
    assert all(places == seen[0] for places in seen)


@pytest.mark.parametrize(
    "change", ["model.num_hidden_layers=2", "run.seed=3", "run.precision=bf16", "optimizer.grad_dtype=fp32"]
)
def test_what_a_run_is_made_of_is_refused_and_the_run_goes_on(
    data: Path, tmp_path: Path, after_step: AfterStep, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    run(data, tmp_path / "plain")
    edits = [(5, (change, "optimizer.lr=1"))]
    train_edited(after_step, data, tmp_path / "edited", edits)
    assert_same_run(tmp_path / "edited", tmp_path / "plain", 20)
    (event,) = events(tmp_path / "edited")
    assert event["event"] == "refused"
    name = change.partition("=")[0]
    message = (
        rf"edited.toml is not taken over, the run goes on as it was: {name} .* expected a change that a run can take"
    )
    assert re.search(message, capsys.readouterr().err)
    assert load_settings(tmp_path / "edited" / "settings.toml") == run_settings(data, tmp_path / "edited")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run\nepochs = ", "edited.toml: expected TOML, found a mistake"),
        ("[run]\nepoch = 3\n", "edited.toml: unknown setting run.epoch; the nearest is run.epochs"),
        ("[optimizer]\nlr = -1.0\n", "optimizer.lr: expected a number, more than 0, found -1.0"),
        (None, "edited.toml: expected a settings file, found none to read"),
    ],
)
def test_an_edit_that_is_no_settings_file_leaves_the_run_as_it_was(
    data: Path,
    tmp_path: Path,
    after_step: AfterStep,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    message: str,
) -> None:
    monkeypatch.setattr("engine.config_file._EVERY_S", 0.0)
    run(data, tmp_path / "plain")
    config = tmp_path / "edited.toml"
    write_config(config, data, tmp_path / "edited")

    def edit() -> None:
        if text is None:
            config.unlink()
        else:
            config.write_text(text)

    after_step(5, edit)
    file = ConfigFile(config)
    train(file.load(), config=file)
    assert_same_run(tmp_path / "edited", tmp_path / "plain", 20)
    said = capsys.readouterr().err
    assert said.count("is not taken over, the run goes on as it was: ") == 1, "said once, not at every step"
    assert message in said
    assert [event["event"] for event in events(tmp_path / "edited")] == ["refused"]


def test_a_plan_or_an_objective_that_the_data_do_not_have_is_refused(
    tmp_path: Path, after_step: AfterStep, capsys: pytest.CaptureFixture[str]
) -> None:
    data = training_dataset(tmp_path / "data")  # without last_hidden
    run(data, tmp_path / "plain")
    too_little = ("objective.kl_weight=0", "buckets.lengths=256", "run.memory_budget_gib=1e-6")
    edits = [(4, ("objective.kl_weight=0.5",)), (6, too_little)]
    train_edited(after_step, data, tmp_path / "edited", edits)
    assert_same_run(tmp_path / "edited", tmp_path / "plain", 20)
    said = capsys.readouterr().err
    assert "objective.kl_weight: soft labels need last_hidden" in said
    assert "buckets: expected a plan within 0.00 GiB (run.memory_budget_gib), found one estimated to need" in said
    assert [event["event"] for event in events(tmp_path / "edited")] == ["refused", "refused"]


@pytest.mark.parametrize("order", ["beside", "after"])
@pytest.mark.parametrize("fails", ["capture", "inputs", "host memory", "tables", "verification"])
def test_a_generation_that_cannot_be_made_leaves_the_old_one(
    data: Path,
    tmp_path: Path,
    after_step: AfterStep,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    order: str,
    fails: str,
) -> None:
    run(data, tmp_path / "plain", f"run.regenerate={order}", "run.log_every=1")
    build = Engine._build

    def broken_build(engine: Engine, generation: Any) -> Any:
        reports = build(engine, generation)
        if generation.number == 2 and fails == "capture":
            raise CaptureError("out of GPU memory while capturing train 1x256x32: 0.1 of 8.0 GiB were free")
        return reports

    compared: list[int] = []
    make_ready = TrainingRun.make_ready

    def differs(under_way: TrainingRun, *arguments: Any) -> None:
        compared.append(under_way.engine.generation)
        if fails == "verification" and compared[-1] == 2:
            raise CaptureError("bucket 1x256x32: the replay differs from the eager step in grad by 1.0e-01")
        make_ready(under_way, *arguments)

    def no_memory(*args: Any, **kwargs: Any) -> None:
        if fails != "host memory":
            raise torch.OutOfMemoryError("Tried to allocate 9 GiB")
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 96000012288 bytes.")

    def break_it() -> None:
        monkeypatch.setattr(Engine, "_build", broken_build)
        monkeypatch.setattr(TrainingRun, "make_ready", differs)
        if fails in ("inputs", "host memory"):
            monkeypatch.setattr("engine.intake.InputPipeline", no_memory)
        if fails == "tables":
            monkeypatch.setattr("engine.engine.assemble", no_memory)

    config = tmp_path / "edited.toml"
    write_config(config, data, tmp_path / "edited", f"run.regenerate={order}", "run.log_every=1")

    def edit() -> None:
        break_it()
        write_config(
            config, data, tmp_path / "edited", f"run.regenerate={order}", "run.log_every=1", "buckets.lengths=256"
        )
        hang_up()

    after_step(6, edit)
    file = ConfigFile(config)
    figures = train(file.load(), config=file)
    assert figures["generation"] == 1
    assert_same_run(tmp_path / "edited", tmp_path / "plain", 20)
    assert "is not taken over, the run goes on as it was: " in capsys.readouterr().err
    assert [row["bucket"] for row in figures["buckets"]][-2:] == ["1x128x32", "1x256x32"]
    made_again = order == "after" and fails in ("capture", "verification")
    assert compared == [2] * (fails == "verification") + [1] * made_again, "graphs made again are compared again"


def test_a_regeneration_is_a_stage_of_its_own_and_no_step(
    data: Path, tmp_path: Path, after_step: AfterStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ready, stages = TrainingRun.make_ready, []

    def slowly(self: TrainingRun, *args: Any) -> None:
        if hasattr(self, "watch"):
            stages.append(stages_now()[threading.main_thread()].name)
            time.sleep(0.3)
        make_ready(self, *args)

    monkeypatch.setattr(TrainingRun, "make_ready", slowly)
    train_edited(after_step, data, tmp_path / "run", [(7, ("buckets.lengths=256",))], "run.log_every=4")
    assert stages == ["regenerate"]
    spent = {line["step"]: line["machine"] for line in records(tmp_path / "run") if "loss" in line}
    assert spent[8]["aside_s"] >= spent[8]["host_s"]["regeneration"] >= 0.3
    assert spent[12]["host_s"]["regeneration"] == 0


def test_where_the_old_generation_is_lost_too_the_run_ends_with_a_checkpoint(
    data: Path, tmp_path: Path, after_step: AfterStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(engine: Engine, generation: Any) -> Any:
        raise CaptureError(f"out of GPU memory while capturing generation {generation.number}")

    def edit() -> None:
        monkeypatch.setattr(Engine, "_build", broken)
        write_config(config, data, tmp_path / "run", "run.regenerate=after", "buckets.lengths=256")
        hang_up()

    config = tmp_path / "run.toml"
    write_config(config, data, tmp_path / "run", "run.regenerate=after")
    after_step(6, edit)
    file = ConfigFile(config)
    message = r"new generation of graphs failed \(.*generation 2\), and then the old one could not .* \(.*generation 1\); start"
    with pytest.raises(CaptureError, match=message):
        train(file.load(), config=file)
    monkeypatch.undo()
    assert steps_of(tmp_path / "run")[-1] == 6


def test_a_file_that_changes_is_taken_over_without_a_signal(
    data: Path, tmp_path: Path, after_step: AfterStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.config_file._EVERY_S", 0.0)
    config, output = tmp_path / "run.toml", tmp_path / "run"
    write_config(config, data, output)
    after_step(5, lambda: write_config(config, data, output, "optimizer.lr=3e-2"))
    file = ConfigFile(config, ["run.log_every=1"])
    train(file.load(), config=file)
    (event,) = events(output)
    assert event["changes"] == [{"setting": "optimizer.lr", "old": 1e-2, "new": 3e-2}]
    assert load_settings(output / "settings.toml").run.log_every == 1, "what --set says holds over the file"
    rates = [record["lr"] for record in metrics(output) if "lr" in record]
    assert rates[4] < 1e-2 < rates[6]


def test_a_file_is_looked_at_twice_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("engine.config_file.time.monotonic", lambda: now[0])
    path = tmp_path / "run.toml"
    path.write_text("[run]\nseed = 1\n")
    file = ConfigFile(path)
    path.write_text("[run]\nseed = 22\n")
    assert file.changed() is None
    now[0] += 0.6
    found = file.changed()
    assert found is not None and found.run.seed == 22
    now[0] += 0.6
    assert file.changed() is None, "nothing changed since"
    assert file.changed(at_once=True) == found


def test_a_pipe_is_read_once_and_never_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("[run]\nseed = 1\n",))
    writer.start()
    file = ConfigFile(path)
    assert file.load().run.seed == 1
    writer.join()
    file._next_look_s = 0.0
    assert file.changed() is None
    with pytest.raises(
        SettingsError, match="expected a file that can be read again, found a folder, a pipe or a device"
    ):
        file.changed(at_once=True)


def test_hanging_up_without_a_settings_file_is_left_to_the_system(
    data: Path, tmp_path: Path, after_step: AfterStep
) -> None:
    seen: list[Any] = []
    after_step(2, lambda: seen.append(signal.getsignal(signal.SIGHUP)))
    run(data, tmp_path / "run", "run.max_steps=3")
    assert seen == [signal.SIG_DFL]


def test_the_signals_handler_is_put_back(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    write_config(config, data, tmp_path / "run", "run.max_steps=1")
    file = ConfigFile(config)
    train(file.load(), config=file)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_an_interrupt_in_the_same_step_saves_under_the_new_settings(
    data: Path, tmp_path: Path, after_step: AfterStep
) -> None:
    config, output = tmp_path / "run.toml", tmp_path / "run"
    write_config(config, data, output)

    def both() -> None:
        write_config(config, data, output, "buckets.lengths=256")
        hang_up()
        interrupt()

    after_step(5, both)
    file = ConfigFile(config)
    with pytest.raises(KeyboardInterrupt):
        train(file.load(), config=file)
    assert train(file.load())["steps"] == 20
    assert os.path.exists(output / "drafter")


def test_a_change_that_ends_the_run_ends_it(data: Path, tmp_path: Path, after_step: AfterStep) -> None:
    figures = train_edited(after_step, data, tmp_path / "run", [(7, ("run.max_steps=3",))])
    assert figures["steps"] == 7
    assert checkpoint_tensors(tmp_path / "run", 7)


def test_samples_left_out_are_counted_over_all_generations(tmp_path: Path, after_step: AfterStep) -> None:
    data = training_dataset(tmp_path / "data", nonfinite=(2, 5))
    edits = [(14, ("buckets.lengths=256",))]
    figures = train_edited(after_step, data, tmp_path / "run", edits, "data.on_nonfinite=skip")
    assert figures["skipped_samples"] == [2, 5]
    assert sum(row["batches"] for row in figures["buckets"]) == 20
    assert [(row["generation"], row["bucket"]) for row in figures["buckets"]] == [
        (1, "1x128x32"),
        (1, "1x256x32"),
        (2, "1x256x32"),
    ]


def test_reconfigure_refuses_by_itself(data: Path, tmp_path: Path) -> None:
    with TrainingRun(run_settings(data, tmp_path / "run"), resume=True) as under_way:
        with pytest.raises(
            SettingsError, match="data.path .*: expected a change that a run can take over, found one of what"
        ):
            under_way.reconfigure(run_settings(tmp_path / "elsewhere", tmp_path / "run"))
        under_way.reconfigure(run_settings(data, tmp_path / "run"))
        assert not events(tmp_path / "run")


def test_a_disk_that_is_full_after_a_change_was_taken_over_ends_the_run_as_ever(
    data: Path, tmp_path: Path, after_step: AfterStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(under_way: TrainingRun) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "settings.toml")

    config, output = tmp_path / "run.toml", tmp_path / "run"
    write_config(config, data, output)

    def edit() -> None:
        monkeypatch.setattr("engine.reconfigure.write_description", full)
        write_config(config, data, output, "buckets.lengths=256")
        hang_up()

    after_step(6, edit)
    file = ConfigFile(config)
    with pytest.raises(OSError, match="No space left on device"):
        train(file.load(), config=file)
    assert steps_of(output)[-1] == 6 and not events(output)


def test_a_change_is_taken_over_though_the_folder_was_deleted(
    data: Path, tmp_path: Path, after_step: AfterStep
) -> None:
    config, output = tmp_path / "run.toml", tmp_path / "run"
    write_config(config, data, output)

    def edit() -> None:
        output.rename(tmp_path / "away")
        write_config(config, data, output, "buckets.lengths=256")
        hang_up()

    after_step(6, edit)
    file = ConfigFile(config)
    assert train(file.load(), config=file)["generation"] == 2
    assert [event["event"] for event in events(output)] == ["reconfigured"]
    assert load_settings(output / "settings.toml").buckets.lengths == (256,)


def test_reconfigure_within_a_step_or_from_another_thread_is_refused_and_breaks_nothing(
    data: Path, tmp_path: Path
) -> None:
    refused: list[str] = []

    def try_it(run: TrainingRun, settings: Settings) -> None:
        with pytest.raises(
            ValueError, match="expected a call between two steps, in the thread that takes them"
        ) as caught:
            run.reconfigure(settings)
        refused.append(str(caught.value))

    settings = run_settings(data, tmp_path / "run", "buckets.lengths=256")
    with TrainingRun(run_settings(data, tmp_path / "run"), resume=True) as under_way:
        for batches in under_way.steps():
            for batch in under_way.arrivals(batches):
                under_way.engine.micro_step(batch.bucket)
                try_it(under_way, settings)
            under_way.engine.update(under_way.schedule(under_way.progress.step))
            under_way.took(batches)
            thread = threading.Thread(target=try_it, args=(under_way, settings))
            thread.start()
            thread.join()
        assert under_way.finish()["generation"] == 1
    assert len(refused) == 2 * 20
    run(data, tmp_path / "plain")
    assert_same_bits(*(checkpoint_tensors(tmp_path / name, 20) for name in ("run", "plain")))


def test_graphs_json_and_buffers_are_the_new_generations(data: Path, tmp_path: Path, after_step: AfterStep) -> None:
    train_edited(after_step, data, tmp_path / "run", [(7, ("buckets.lengths=256",))])
    record = json.loads((tmp_path / "run" / "graphs.json").read_text())
    assert record["generation"] == 2
    assert [bucket["bucket"] for bucket in record["buckets"]] == ["1x256x32"]
    text = (tmp_path / "run" / "buffers.txt").read_text()
    assert "tables of generation 2" in text and "1x128x32" not in text


class PartlyReplayed(CallExecutor):
    """Says that it replays all but the largest bucket, whose capture failed."""

    how = "partly replayed"

    def build(self, **calls: Any) -> Any:
        return [
            replace(report, how=self.how_of(report.name), why=self._why(report.name))
            for report in super().build(**calls)
        ]

    def how_of(self, name: str) -> str:
        return "called" if name.endswith("1x256x32") and not name.startswith("eval") else "replayed"

    def _why(self, name: str) -> str:
        return "could not finish capturing: not permitted" if self.how_of(name) == "called" else ""


def test_a_bucket_that_is_called_where_others_are_replayed_is_told_in_every_report(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.engine.make_executor", lambda device: PartlyReplayed())
    output = tmp_path / "run"
    figures = run(data, output, "run.on_capture_failure=eager", "run.max_steps=4")
    assert figures["how"] == "partly replayed"
    assert {row["bucket"]: row["how"] for row in figures["buckets"]} == {"1x128x32": "replayed", "1x256x32": "called"}
    said = capsys.readouterr().err
    assert "train 1x256x32 is called, not replayed: could not finish capturing: not permitted" in said
    record = json.loads((output / "graphs.json").read_text())
    assert {bucket["bucket"]: bucket["how"] for bucket in record["buckets"]} == {
        "1x128x32": "replayed",
        "1x256x32": "called",
    }


def test_a_file_that_is_just_being_saved_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.config_file._EVERY_S", 0.0)
    path = tmp_path / "run.toml"
    whole = "[run]\nseed = 1\nepochs = 2\n"
    path.write_text(whole)
    file = ConfigFile(path)
    for half in ("", whole[:-8], None):  # emptied, half written, taken away
        path.unlink() if half is None else path.write_text(half)
        assert file.changed() is None
        path.write_text(whole + "# saved\n" * (1 + len(half or "")))
        found = file.changed()
        assert found is not None and (found.run.seed, found.run.epochs) == (1, 2)
    path.write_text("")
    assert file.changed() is None
    assert file.changed() is not None, "a file that stays empty asks for the defaults"
    path.write_text("[run\n")
    assert file.changed() is None
    with pytest.raises(SettingsError, match="expected TOML"):
        file.changed()
    assert file.changed() is None, "said once"


def test_a_hang_up_that_changes_nothing_is_answered(
    data: Path, tmp_path: Path, after_step: AfterStep, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    write_config(config, data, tmp_path / "run", "run.max_steps=4")
    after_step(2, hang_up)
    file = ConfigFile(config)
    train(file.load(), config=file)
    assert f"{config} was read: it changes nothing" in capsys.readouterr().err.replace("\n", "")
