"""`dflash-engine plan`: its table and its figures."""

import json
from pathlib import Path

import pytest

from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.planning import show_plan
from engine.settings import load_settings
from engine.work import step_flop
from tests.run_helpers import SETTINGS, run, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_row_for_each_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = training_dataset(tmp_path / "data", (40, 130, 60, 150, 90))
    figures = show_plan(data, load_settings(None, [*SETTINGS, "buckets.lengths=", "buckets.max_buckets=2"]))
    json.dumps(figures)
    assert [row["bucket"] for row in figures["buckets"]] == ["1x128x32", "1x256x32"]
    small, large = figures["buckets"]
    assert (small["B"], small["S"], small["N"], small["samples"], small["batches"]) == (1, 128, 32, 3, 3)
    assert small["padding_fraction"] == pytest.approx(1 - 190 / (3 * 128))
    assert figures["padding"] == pytest.approx(1 - 470 / (3 * 128 + 2 * 256))
    assert small["cost_share"] + large["cost_share"] == pytest.approx(1)
    assert small["tflop"] < large["tflop"]
    assert figures["too_long"] == []
    told = capsys.readouterr().out
    assert "5 samples, 470 tokens" in told
    assert "1x128x32" in told
    assert "MFLOP" in told and "e-" not in told.partition("device memory")[0]
    assert "padding of an epoch: 47.5%; too long (skip): 0" in told


def test_too_long_samples_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = training_dataset(tmp_path / "data", (40, 300, 60))
    for too_long, rows in (("skip", 2), ("truncate", 3), ("split", 5)):
        changes = ("buckets.lengths=128", f"data.too_long={too_long}")
        figures = show_plan(data, load_settings(None, [*SETTINGS, *changes]))
        assert figures["too_long"] == [(1, 300)]
        assert figures["buckets"][0]["samples"] == rows
        assert f"too long ({too_long}): 1" in capsys.readouterr().out


def test_the_plan_is_what_training_uses(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data")
    changes = ("buckets.lengths=", "buckets.max_rows=3", "run.epochs=1")
    figures = show_plan(data, load_settings(None, [*SETTINGS, *changes]))
    trained = run(data, tmp_path / "run", *changes)
    found = [(row["bucket"], row["batches"]) for row in trained["buckets"]]
    assert found == [(row["bucket"], row["batches"]) for row in figures["buckets"]]


def test_the_drafter_of_the_settings_is_what_costs(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 60))
    one, five = (
        show_plan(data, load_settings(None, [*SETTINGS, f"model.num_hidden_layers={layers}"]))["buckets"][0]["tflop"]
        for layers in (1, 5)
    )
    assert 1 < five / one < 5


def test_a_name_with_brackets_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = training_dataset(tmp_path / "[red]data[", (40, 60))
    show_plan(data, load_settings(None, SETTINGS))
    assert "[red]data[:" in capsys.readouterr().out


def test_a_model_to_start_from_decides_the_sizes(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 60))
    run(data, tmp_path / "run", "model.block_size=8", "run.epochs=1")
    settings = load_settings(None, [*SETTINGS, f"model.init={tmp_path / 'run' / 'drafter'}"])
    (row,) = show_plan(data, settings)["buckets"]
    config = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert config["block_size"] == 8
    assert row["tokens"] == row["B"] * (row["S"] + 8 * row["N"])
    bucket = Bucket(B=row["B"], S=row["S"], N=row["N"], K=8)
    assert row["tflop"] == step_flop(DrafterConfig.from_json(config), bucket) / 1e12
