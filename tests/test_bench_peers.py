"""`bench peers` on the CPU, against a stand-in with SpecForge's layout and names: SpecForge itself is the user's."""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import peers, workloads
from bench.agreement import gradient_differences
from bench.cli import main
from bench.specforge import load_specforge, loss_arguments
from bench.workloads import Workload
from engine.settings import ObjectiveSettings

STAND_IN = Path(__file__).parent / "specforge_stand_in"
MODEL = "specforge.algorithms.common.dflash_family_model"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def smaller_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # N 128 of 127 eligible positions: one block of ours stays unused, SpecForge makes none for it.
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", Workload("tiny", 16, 32, 8, 64, S=128, N=128, K=4))
    monkeypatch.setattr(peers, "WARM_UPS", 0)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "specforge"]:
        del sys.modules[name]


def command(*more: str, folder: Path = STAND_IN) -> list[str]:
    return ["bench", "peers", "--specforge", str(folder), "--set", "run.device=cpu", "--repeats", "1", *more]


def test_both_agree_and_both_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "peers.json", tmp_path / "peers.png"
    assert main(command("--json", "--out", str(out), "--plot", str(picture))) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr()
    figures = json.loads(told.out.splitlines()[-1])
    assert figures == json.loads(out.read_text())
    (row,) = figures["workloads"]
    assert (row["workload"], row["bucket"], row["K"], row["precision"]) == ("tiny", "1x128x128", 4, "fp32")
    assert row["loss"] == pytest.approx(row["specforge_loss"], rel=1e-5)
    assert 0 < row["gradient_difference"] <= row["worst_gradient_difference"] < 1e-4
    assert row["specforge_loss_as_shipped"] == row["specforge_loss"]  # in fp32 no cast rounds its RoPE
    assert (row["ours_attention"], row["specforge_attention"], row["ours_how"]) == ("reference", "sdpa", "called")
    assert row["ratio"] > 0
    # The CPU's own times say nothing.
    assert row["ours_ms"] is row["specforge_ms"] is row["ours_peak_gib"] is row["specforge_held_gib"] is None
    assert figures["specforge"]["commit"] is None
    assert len(figures["specforge"]["sources"]) == 12
    assert "relative differences" in told.out
    assert told.out.index("relative differences") < told.out.index("times faster")


def test_no_speed_is_shown_when_the_gradients_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(folder: Path) -> object:
        found = load_specforge(folder)
        importlib.import_module(MODEL).__dict__["SEEN_TOO_MANY"] = 1
        return found

    monkeypatch.setattr(peers, "load_specforge", changed)
    monkeypatch.setattr("bench.agreement.TOLERANCES", {"fp32": (0.1, 1e-4, 1e-3)})
    out = tmp_path / "peers.json"
    assert main(command("--out", str(out))) == 1
    told = capsys.readouterr()
    assert told.out == ""
    last = told.err.splitlines()[-1]
    assert re.match(
        r"error: tiny: expected ours and SpecForge's gradient to differ by at most 1e-04 in fp32, found \d", last
    )
    assert last.endswith("no speed is shown")
    assert not out.exists()


def test_its_packages_are_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(STAND_IN, folder)
    for package in ("specforge", "specforge/modeling/draft", "specforge/algorithms"):
        (folder / package / "__init__.py").write_text("raise RuntimeError('the whole trainer')\n")
    assert load_specforge(folder).sources == load_specforge(STAND_IN).sources


def test_the_sources_digest_tells_versions_apart(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(STAND_IN, folder)
    with (folder / "specforge/modeling/draft/dflash.py").open("a") as file:
        file.write("\n# another version\n")
    assert load_specforge(folder).sources != load_specforge(STAND_IN).sources


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="--specforge .*: expected a checkout of sgl-project/SpecForge, which has specforge/"
    ):
        load_specforge(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import surely_not_installed", "found no module surely_not_installed; install that package"),
        ("import specforge.core.moved", r"found no module specforge.core.*; use another commit \(a6b6b02 works\)"),
        ("raise TypeError('no such class')", "found TypeError: no such class; use another commit"),
        ("del OnlineDFlashModel", "found AttributeError: .*OnlineDFlashModel.*; use another commit"),
    ],
)
def test_a_checkout_that_cannot_be_imported(tmp_path: Path, line: str, message: str) -> None:
    shutil.copytree(STAND_IN, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "specforge/algorithms/common/dflash_family_model.py").open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(ValueError, match=message):
        load_specforge(tmp_path)
    assert not any(name.split(".")[0] == "specforge" for name in sys.modules)


def test_a_training_model_that_takes_other_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(STAND_IN, tmp_path, dirs_exist_ok=True)
    model = tmp_path / "specforge/algorithms/common/dflash_family_model.py"
    model.write_text(model.read_text().replace("num_anchors: int,", "anchors: int,"))
    assert main(command(folder=tmp_path)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: expected SpecForge's training model to be built as at a6b6b02, found TypeError: ")
    assert last.endswith("'num_anchors'; use that commit")


def test_what_it_cannot_measure_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--workload", "W1")) == 2
    assert "--workload W1: expected a CUDA device for steps of 9 TFLOP, found the CPU; --workload tiny runs here" in (
        capsys.readouterr().err
    )
    assert main(command("--set", "objective.kl_weight=0.5")) == 2
    assert "objective: expected ce_weight 1 and kl_weight 0, SpecForge's DFlash loss, found 1 and 0.5" in (
        capsys.readouterr().err
    )


def test_the_objective_in_specforges_words() -> None:
    assert loss_arguments(ObjectiveSettings(), 16) == {"loss_decay_gamma": 7.0}
    assert loss_arguments(ObjectiveSettings(weighting="uniform"), 16) == {"loss_decay_gamma": None}
    dpace = ObjectiveSettings(weighting="dpace", dpace_alpha=0.25)
    assert loss_arguments(dpace, 16) == {"loss_type": "dpace", "dpace_alpha": 0.25}


def test_a_difference_is_relative_to_the_expected_gradient() -> None:
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.zeros(2)}
    whole, each = gradient_differences(found, expected)
    assert whole == pytest.approx(0.1)
    assert each == pytest.approx({"a": 0.1, "b": 0.0})
    with pytest.raises(ValueError, match="expected the same gradients on both sides, found only on one .'b'."):
        gradient_differences({"a": found["a"]}, expected)
