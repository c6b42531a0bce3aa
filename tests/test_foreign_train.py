"""Other trainers' hidden states through the commands: trained on as they are, gone on with, planned, evaluated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cli import cli
from engine.cli import run as run_command
from engine.evaluate import evaluate_drafter
from engine.planning import show_plan
from engine.settings import Settings, load_settings
from engine.train import train
from tests.foreign_helpers import FIXTURES, MASK, TAPS, archive, specforge_values, truth, write_specforge, write_target
from tests.run_helpers import checkpoint_tensors, metrics

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def settings(data: Path, target: Path, output: Path, *changes: str) -> Settings:
    return load_settings(
        None,
        [
            f"data.path={data}",
            f"data.target={target}",
            f"data.target_layer_ids={','.join(map(str, TAPS))}",
            f"data.mask_token_id={MASK}",
            f"run.output={output}",
            "model.num_hidden_layers=1",
            "model.block_size=4",
            "buckets.num_anchors=8",
            "buckets.max_rows=5",
            "buckets.lengths=64",
            "run.device=cpu",
            "run.epochs=1",
            "run.log_every=1",
            "run.save_every=2",
            *changes,
        ],
    )


def test_training_on_specforges_files_with_deepspecs_held_out(target: Path, tmp_path: Path) -> None:
    held_out = f"data.eval_path={FIXTURES / 'deepspec'}"
    figures = train(settings(FIXTURES / "specforge", target, tmp_path / "run", held_out), resume=True)
    assert figures["steps"] == 2 and figures["final"]["loss"] > 0 and figures["eval_loss"] > 0
    config = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == list(TAPS)
    assert config["dflash_config"]["mask_token_id"] == MASK

    # The drafter knows its layers and mask token; the target's head is still needed.
    known = load_settings(
        None, [f"data.target={target}", "run.device=cpu", "buckets.lengths=64", "buckets.num_anchors=8"]
    )
    drafter = tmp_path / "run" / "drafter"
    by_format = [evaluate_drafter(drafter, FIXTURES / name, known) for name in ("specforge", "speculators", "deepspec")]
    assert by_format[0]["samples"] == 10
    assert [figures["loss"] for figures in by_format] == [by_format[0]["loss"]] * 3


def test_a_run_goes_on_over_the_same_files_only(target: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(settings(FIXTURES / "speculators", target, whole, "objective.kl_weight=0.5", "run.epochs=2"), resume=True)
    train(settings(FIXTURES / "speculators", target, parts, "objective.kl_weight=0.5"), resume=True)
    train(settings(FIXTURES / "speculators", target, parts, "objective.kl_weight=0.5", "run.epochs=2"), resume=True)
    assert metrics(parts)[-1]["step"] == metrics(whole)[-1]["step"] == 4
    assert checkpoint_tensors(parts, 4)["consumed"].equal(checkpoint_tensors(whole, 4)["consumed"])
    with pytest.raises(ValueError, match="the checkpoint was trained on 10 with 427 of other content"):
        train(settings(FIXTURES / "specforge", target, parts), resume=True)


def test_bad_files_are_left_out_and_listed(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(values: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
        return values | {"hidden_states": values["hidden_states"].float()}

    data = write_specforge(tmp_path / "data", change)
    bad = specforge_values(truth()[0])
    del bad["loss_mask"]
    (data / "rows_0-2000" / "data_10.ckpt").write_bytes(archive(bad))
    with pytest.raises(
        ValueError, match=r"1 of 11 samples cannot be used: rows_0-2000/data_10.ckpt: expected input_ids"
    ):
        train(settings(data, target, tmp_path / "run"), resume=True)
    train(settings(data, target, tmp_path / "run", "data.on_bad_file=skip", "run.max_steps=2"), resume=True)
    told = capsys.readouterr().err
    assert "10 samples have float32 hidden states; they are rounded to bf16" in told
    assert "1 files cannot be used and are left out" in told
    left_out = json.loads((tmp_path / "run" / "left_out.json").read_text())
    assert list(left_out["bad_files"]) == ["rows_0-2000/data_10.ckpt"]


def test_samples_without_a_block_are_told_before_anything_is_done_with_them(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(values: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
        mask = torch.zeros_like(values["loss_mask"])
        mask[: 1 if len(mask) > 50 else None] = 1
        return values | {"loss_mask": mask}

    data = write_specforge(tmp_path / "data", change)
    few = sum(len(sample["input_ids"]) > 50 for sample in truth())
    line = (
        f"{data}: {few} of 10 samples have no two supervised tokens side by side, so no draft block: they add nothing"
    )
    show_plan(data, settings(data, target, tmp_path))
    assert line in capsys.readouterr().err
    mixture = settings(Path(f"{data},{FIXTURES / 'specforge'}"), target, tmp_path, "data.weights=2,1")
    show_plan(mixture.data.folders, mixture)
    assert capsys.readouterr().err.splitlines() == [line]
    train(settings(data, target, tmp_path / "run"), resume=True)
    assert line in capsys.readouterr().err


def test_what_the_settings_do_not_say_is_bad_usage(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, as for any other setting, by every command and for one folder or several."""
    known = ["--set", f"data.target={target}", "--set", "data.mask_token_id=511"]
    for folders in ([FIXTURES / "specforge"], [FIXTURES / "specforge", FIXTURES / "deepspec"]):
        assert run_command(cli, ["plan", *map(str, folders), *known]) == 2
        assert "data.target_layer_ids" in capsys.readouterr().err
    given = ["--target", str(target), "--mask-token-id", "511", "--target-layer-ids", "1,2,9"]
    for command in (["inspect", str(FIXTURES / "specforge")], ["convert", str(FIXTURES / "specforge"), "unused"]):
        assert run_command(cli, ["data", *command, *given]) == 2
        assert "different layers of 0..4" in capsys.readouterr().err


def test_plan(target: Path, tmp_path: Path) -> None:
    figures = show_plan(FIXTURES / "modelopt", settings(Path(), target, tmp_path, "data.last_hidden_norm=pre"))
    assert sum(row["samples"] for row in figures["buckets"]) == 10
