"""TensorBoard and Weights & Biases, with stand-ins for their packages: what they get, and what happens when they fail."""

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from engine.settings import SINK_NAMES, load_settings
from engine.settings_fields import SettingsError
from engine.sinks import SINKS, flat
from engine.train import train
from tests.run_helpers import Killed, kill, records, run, run_settings, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


class Recorder:
    """Stands for both packages: notes what it is asked for, and fails from the step `fails_at` on."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.got: list[tuple[int, str, float]] = []
        self.closed = 0
        self.fails_at = 10**9

    def open(self, *args: Any, **options: Any) -> "Recorder":
        self.opened.append({"args": args, **options})
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if step >= self.fails_at:
            raise RuntimeError("no connection\nto anywhere")
        self.got.append((step, name, value))

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.add_scalar(name, value, step)

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed += 1

    finish = close


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    stand_in = types.ModuleType(name)
    stand_in.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(stand_in).update(content)
    monkeypatch.setitem(sys.modules, name, stand_in)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    found = {"tensorboard": Recorder(), "wandb": Recorder()}
    module(monkeypatch, "tensorboard")
    module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=found["tensorboard"].open)
    module(monkeypatch, "wandb", init=found["wandb"].open)
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return training_dataset(tmp_path / "data")


def test_both_get_the_numbers_of_every_line(data: Path, tmp_path: Path, packages: dict[str, Recorder]) -> None:
    run(data, tmp_path / "run", "run.sinks=tensorboard,wandb", "run.epochs=1")
    lines = [r for r in records(tmp_path / "run") if "event" not in r]
    for recorder in packages.values():
        assert [(s, v) for s, name, v in recorder.got if name == "loss"] == [(r["step"], r["loss"]) for r in lines]
        assert ("accuracy_per_slot/1", lines[-1]["accuracy_per_slot"][0]) in {(n, v) for _, n, v in recorder.got}
        assert "machine/device_s/update" in {name for _, name, _ in recorder.got}
        assert recorder.closed == 1
    assert packages["wandb"].opened[0]["config"]["run"]["epochs"] == 1
    assert packages["tensorboard"].opened == [{"args": (str(tmp_path / "run" / "tensorboard"),), "purge_step": None}]


def test_a_run_that_goes_on_writes_on(
    data: Path, tmp_path: Path, packages: dict[str, Recorder], after_step: Any
) -> None:
    changes = ("run.sinks=tensorboard,wandb", "run.epochs=1")
    after_step(6, kill)
    with pytest.raises(Killed):
        run(data, tmp_path / "run", *changes)
    run(data, tmp_path / "run", *changes)
    first, second = packages["wandb"].opened
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert [opened["purge_step"] for opened in packages["tensorboard"].opened] == [
        None,
        5,
    ]  # the checkpoint is of step 4
    run(data, tmp_path / "another", *changes)
    assert packages["wandb"].opened[2]["id"] != first["id"]


def test_one_that_fails_is_left_out_and_training_goes_on(
    data: Path, tmp_path: Path, packages: dict[str, Recorder], capsys: pytest.CaptureFixture[str]
) -> None:
    packages["wandb"].fails_at = 6
    run(data, tmp_path / "run", "run.sinks=tensorboard,wandb", "run.epochs=1")
    told = [line for line in capsys.readouterr().err.splitlines() if "run.sinks" in line]
    assert told == ["run.sinks: wandb failed and gets no more figures, training goes on: no connection to anywhere"]
    assert max(step for step, _, _ in packages["wandb"].got) == 3
    assert max(step for step, _, _ in packages["tensorboard"].got) == 10


def test_quiet_is_quiet(
    data: Path, tmp_path: Path, packages: dict[str, Recorder], capsys: pytest.CaptureFixture[str]
) -> None:
    for quiet in (False, True):
        train(run_settings(data, tmp_path / f"run-{quiet}", "run.sinks=wandb", "run.max_steps=1"), quiet=quiet)
    assert [opened["settings"] for opened in packages["wandb"].opened] == [{}, {"silent": True}]


def test_the_packages_themselves(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], after_step: Any
) -> None:
    """Where they are installed: offline, quiet, killed and taken up again."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = run_settings(data, tmp_path / "run", "run.sinks=tensorboard,wandb", "run.epochs=1")
    capfd.readouterr()
    after_step(6, kill)
    with pytest.raises(Killed):
        train(settings, quiet=True)
    train(settings, quiet=True)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = [r for r in records(tmp_path / "run") if "loss" in r]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in lines
    ]
    assert "machine/device_s/update" in events.Tags()["scalars"]
    known = (tmp_path / "run" / "wandb-id.txt").read_text().strip()
    offline = [file.name for file in (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")]
    assert offline == [f"run-{known}.wandb"] * 2


@pytest.mark.parametrize("name", SINK_NAMES)
def test_a_missing_package_is_named_with_its_extra(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError, match=rf"run.sinks: .* package {name} .*pip install 'dflash-engine\[{name}\]'"):
        run(data, tmp_path / "run", f"run.sinks={name}")
    assert not (tmp_path / "run").exists()


def test_one_that_does_not_start_ends_the_run_before_it_begins(
    data: Path, tmp_path: Path, packages: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **options: 1 / 0)
    with pytest.raises(SettingsError, match="run.sinks: expected wandb to start, found: division by zero"):
        run(data, tmp_path / "run", "run.sinks=tensorboard,wandb")
    assert packages["tensorboard"].closed == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("sinks", "word"), [("tensorbord", "tensorbord"), ("wandb,wandb", "what is there twice")])
def test_mistakes_are_named(sinks: str, word: str) -> None:
    with pytest.raises(SettingsError, match=f"run.sinks: expected some of tensorboard, wandb.*Leave out {word}"):
        load_settings(None, [f"run.sinks={sinks}"])


def test_every_name_has_a_sink_and_an_extra() -> None:
    assert tuple(SINKS) == SINK_NAMES
    setup = (Path(__file__).parent.parent / "setup.py").read_text(encoding="utf-8")
    assert all(f'        "{name}": ' in setup for name in SINK_NAMES)


def test_names_are_flat_and_only_numbers_pass() -> None:
    record = {
        "loss": 1,
        "how": "x",
        "bad": True,
        "none": None,
        "slots": [0.5, None],
        "machine": {"buckets": {"a": {"n": 2.0}}},
    }
    assert flat(record) == {"loss": 1.0, "slots/1": 0.5, "machine/buckets/a/n": 2.0}
