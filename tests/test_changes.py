"""What a change of settings would ask of a run, told before anything is done."""

import json
from pathlib import Path

import pytest

from bench.cli import main
from engine.changes import changes_between, refuse_restarts, worst
from engine.settings import Settings, load_settings
from engine.settings_fields import SettingsError


def classes(old: tuple[str, ...], new: tuple[str, ...]) -> dict[str, str]:
    found = changes_between(load_settings(None, old), load_settings(None, new))
    return {change.name: change.change for change in found}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("optimizer.lr=1e-3", "optimizer.lr=2e-3", "live"),
        ("objective.kl_weight=0.5", "objective.kl_weight=0.25", "live"),
        ("objective.kl_weight=0", "objective.kl_weight=0.25", "recapture"),
        ("objective.kl_weight=0.25", "objective.kl_weight=0", "recapture"),
        ("run.accumulation=1", "run.accumulation=2", "recapture"),
        ("run.accumulation=2", "run.accumulation=1", "recapture"),
        ("run.accumulation=2", "run.accumulation=4", "live"),
        ("objective.ce_weight=0.25", "objective.ce_weight=1", "live"),
        ("buckets.num_anchors=128", "buckets.num_anchors=256", "recapture"),
        ("model.attention=flex", "model.attention=triton", "recapture"),
        ("model.block_size=8", "model.block_size=16", "restart"),
        ("data.path=a", "data.path=b", "restart"),
    ],
)
def test_the_class_of_one_change(old: str, new: str, expected: str) -> None:
    assert list(classes((old,), (new,)).values()) == [expected]


def test_of_several_the_class_that_asks_most_holds_and_comes_first() -> None:
    old, new = (
        Settings(),
        load_settings(None, ["run.keep=3", "buckets.lengths=512", "model.block_size=8", "run.seed=1"]),
    )
    changes = changes_between(old, new)
    assert [change.change for change in changes] == ["restart", "restart", "recapture", "live"]
    assert worst(changes) == "restart"
    message = (
        "model.block_size 16 -> 8, run.seed 0 -> 1: expected a change that a run can take over, found some of what"
    )
    with pytest.raises(SettingsError, match=message):
        refuse_restarts(changes)
    refuse_restarts([change for change in changes if change.change != "restart"])
    assert changes_between(old, old) == [] and worst([]) == "live"


def test_explain_shows_the_classes_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run"
    output.mkdir()
    (output / "settings.toml").write_text(load_settings(None, [f"run.output={output}"]).to_toml())
    before = sorted(output.iterdir())
    config = tmp_path / "run.toml"
    config.write_text(f'[run]\noutput = "{output}"\n[optimizer]\nlr = 1e-3\n[buckets]\nlengths = [512]\n')
    assert main(["train", str(config), "--explain", "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert figures["class"] == "recapture"
    assert figures["changes"] == [
        {"setting": "buckets.lengths", "old": [], "new": [512], "class": "recapture"},
        {"setting": "optimizer.lr", "old": 6e-4, "new": 1e-3, "class": "live"},
    ]
    assert any("optimizer.lr" in line and "0.0006" in line and "0.001" in line and "live" in line for line in text)
    assert "recapture: one new generation of graphs, between two steps" in text
    assert sorted(output.iterdir()) == before
    assert main(["train", str(config), "--explain", "--set", "model.block_size=8"]) == 0
    assert "restart: refused: the run goes on as it was" in capsys.readouterr().out
    assert main(["train", "--explain", "--set", f"run.output={output}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"run": str(output), "class": "none", "changes": []}


def test_explain_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--explain", "--set", f"run.output={tmp_path}"]) == 2
    assert "run.output: expected a run to compare with, found no" in capsys.readouterr().err
