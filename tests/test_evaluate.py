"""Evaluation of a saved drafter: the figures, what of the data they cover, and drafters that do not belong to it."""

import json
import sys
from pathlib import Path

import pytest

from bench.cli import main
from engine.checkpoint import save_drafter
from engine.drafter_config import DrafterConfig
from engine.evaluate import evaluate_drafter
from engine.params import initial_parameters
from engine.settings import load_settings
from tests.dataset_helpers import random_sample, writer
from tests.run_helpers import LENGTHS, metrics, run, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
CHANGES = ("run.device=cpu", "buckets.lengths=128,256", "buckets.num_anchors=32", "buckets.max_rows=1")
SETTINGS = load_settings(None, CHANGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data, held-out and a run over them."""
    folder = tmp_path_factory.mktemp("evaluated")
    data = training_dataset(folder / "data")
    held_out = training_dataset(folder / "held-out", (50, 100, 140), first_sample=100)
    run(data, folder / "run", f"data.eval_path={held_out}", "run.epochs=4", "run.eval_every=10")
    return folder


def test_figures_are_those_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = evaluate_drafter(folder / "run" / "drafter", folder / "held-out", SETTINGS)
    last = metrics(folder / "run")[-1]
    # The run measured in fp32 what was saved in bf16.
    assert figures["loss"] == pytest.approx(last["eval_loss"], rel=1e-2)
    assert figures["tokens_per_verification"] == figures["accept_len"] + 1
    assert len(figures["accuracy_per_slot"]) == 3
    assert figures["samples"] == 3
    assert (figures["skipped_samples"], figures["too_long_samples"], figures["how"]) == ([], 0, "called")
    told = capsys.readouterr().out
    for name in figures:
        assert name in told


def test_training_shows(folder: Path) -> None:
    trained = evaluate_drafter(folder / "run" / "drafter", folder / "data", SETTINGS)
    config = DrafterConfig(
        block_size=4,
        mask_token_id=49,
        target_layer_ids=(1, 3, 4),
        num_target_layers=6,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=50,
        layer_types=("full_attention",),
    )
    save_drafter(folder / "new", config, initial_parameters(config, seed=0))
    new = evaluate_drafter(folder / "new", folder / "data", SETTINGS)
    assert trained["loss"] < 0.75 * new["loss"]
    assert trained["accept_len"] > new["accept_len"]


def test_it_is_the_same_each_time_and_neither_rows_nor_buckets_matter(folder: Path) -> None:
    drafter, data = folder / "run" / "drafter", folder / "held-out"
    once, again = (evaluate_drafter(drafter, data, SETTINGS) for _ in range(2))
    assert once == again
    other = load_settings(None, [*CHANGES[:1], "buckets.num_anchors=32", "buckets.lengths=256"])
    third = evaluate_drafter(drafter, data, other)
    for name in ("loss", "accuracy", "accept_len"):
        assert third[name] == pytest.approx(once[name], rel=1e-5)


def test_what_was_not_evaluated_is_told(folder: Path, tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 300, 60, 90), nonfinite=(2,))
    settings = load_settings(None, [*CHANGES, "data.on_nonfinite=skip", "run.eval_batches=0"])
    figures = evaluate_drafter(folder / "run" / "drafter", data, settings)
    assert (figures["samples"], figures["skipped_samples"], figures["too_long_samples"]) == (2, [2], 1)
    few = load_settings(None, [*CHANGES, "run.eval_batches=4"])
    assert evaluate_drafter(folder / "run" / "drafter", folder / "data", few)["samples"] == 4
    pieces = load_settings(None, [*CHANGES, "data.on_nonfinite=skip", "data.too_long=split"])
    assert evaluate_drafter(folder / "run" / "drafter", data, pieces)["samples"] == 3


def test_soft_labels_are_measured_where_the_data_has_them(folder: Path, tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", LENGTHS[:3], last_hidden_norm="pre")
    soft = load_settings(None, [*CHANGES, "objective.kl_weight=0.15"])
    plain, with_kl = (
        evaluate_drafter(folder / "run" / "drafter", data, settings)["loss"] for settings in (SETTINGS, soft)
    )
    assert with_kl > plain
    with pytest.raises(ValueError, match=r"objective.kl_weight: soft labels need last_hidden, which .* does not have"):
        evaluate_drafter(folder / "run" / "drafter", folder / "data", soft)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (0, 3, 4)}, r"has target_layer_ids \(1, 3, 4\), .* has \(0, 3, 4\)"),
        ({"vocab_size": 60}, "has vocab_size 50, .* has 60"),
    ],
)
def test_a_drafter_of_other_data_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with writer(tmp_path / "data", **changes) as out:
        sample = random_sample(20)
        del sample["last_hidden"]
        out.add(**sample)
    with pytest.raises(ValueError, match=f"drafter {message}; evaluate on the hidden states of its own target"):
        evaluate_drafter(folder / "run" / "drafter", tmp_path / "data", SETTINGS)


def test_the_histogram_is_that_of_the_accepted_length(folder: Path) -> None:
    figures = evaluate_drafter(folder / "run" / "drafter", folder / "data", SETTINGS)
    histogram = figures["acceptance_histogram"]
    assert len(histogram) == 4 and histogram[0] > 0 and sum(histogram[1:]) > 0
    mean = sum(n * count for n, count in enumerate(histogram)) / sum(histogram)
    assert mean == pytest.approx(figures["accept_len"], rel=1e-9)


def test_a_runs_folder_means_its_best_drafter_and_its_settings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out, picture = str(folder / "held-out"), tmp_path / "out.png"
    assert main(["eval", str(folder / "run"), held_out, "--plot", str(picture), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["drafter"] == str(folder / "run" / "best")
    settings = load_settings(str(folder / "run" / "settings.toml"), [])
    best = evaluate_drafter(folder / "run" / "best", folder / "held-out", settings)
    for name in ("loss", "accept_len", "acceptance_histogram"):
        assert figures[name] == best[name]
    assert picture.read_bytes().startswith(b"\x89PNG")
    few = ["--set", "run.eval_batches=1", "--set", "buckets.max_rows=1"]
    assert main(["eval", str(folder / "run"), held_out, *few, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["samples"] == 1
    assert main(["eval", str(tmp_path), held_out]) == 1
    assert "expected a run's folder, a checkpoint or a drafter" in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match=r"plot: expected the name of a .png file in a folder that exists, found .*out.pdf"
    ):
        evaluate_drafter(folder / "run", folder / "data", SETTINGS, plot=tmp_path / "out.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"plot: expected the package matplotlib, found none; pip install"):
        evaluate_drafter(folder / "run", folder / "data", SETTINGS, plot=tmp_path / "out.png")
