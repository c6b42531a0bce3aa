"""From every kind of target that can be extracted to a drafter that is measured, by the commands."""

import json
from pathlib import Path

import pytest

from engine.cli import cli
from engine.cli import run as run_command
from tests.hf_helpers import id_records, save_model, write_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = (
    "model.num_hidden_layers=1",
    "model.block_size=4",
    "buckets.num_anchors=8",
    "run.device=cpu",
    "run.max_steps=1",
)
RECURRENT = ("qwen3-next", "falcon-h1")


def command(*words: object) -> int:
    return run_command(cli, [str(word) for word in words])


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3-moe", *RECURRENT])
def test_extracted_trained_exported_and_evaluated(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_model(tmp_path / "target", kind)
    records = write_jsonl(tmp_path / "ids.jsonl", id_records(6, longest=40))
    data, run, served = tmp_path / "data", tmp_path / "run", tmp_path / "served"
    options = ("--num-taps", 3, "--mask-token-id", 95, "--device", "cpu")
    assert command("data", "extract", "--target", target, "--data", records, "--out", data, *options) == 0
    changes = [word for change in (*SETTINGS, f"run.output={run}") for word in ("--set", change)]
    assert command("train", "--set", f"data.path={data}", *changes) == 0
    assert command("export", run, served) == 0
    of_drafter, of_target = (json.loads((folder / "config.json").read_text()) for folder in (served, target))
    theta = of_target["rope_parameters"]["rope_theta"]
    assert of_drafter["rope_parameters"] == {"rope_theta": theta, "rope_type": "default"}
    capsys.readouterr()
    assert command("eval", served, data, "--set", "run.device=cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["samples"] == 6

    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"input_ids": [5, 6, 7, 8]}])
    decoding = ("--target", target, "--prompts", prompts, "--max-new-tokens", 6, "--set", "run.device=cpu", "--json")
    code = command("eval", served, *decoding)
    told = capsys.readouterr()
    if kind in RECURRENT:
        assert code == 1 and "Train for this target and measure with `eval DRAFTER DATA`" in told.err
    else:
        assert code == 0 and json.loads(told.out.splitlines()[-1])["decoding"]["differing_tokens"] == 0


def test_a_rope_that_no_drafter_gets_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    target = save_model(tmp_path / "target", "llama", rope_parameters=scaling)
    records = write_jsonl(tmp_path / "ids.jsonl", id_records(6, longest=40))
    options = ("--num-taps", 3, "--mask-token-id", 95, "--device", "cpu", "--json")
    assert command("data", "extract", "--target", target, "--data", records, "--out", tmp_path / "data", *options) == 0
    told = capsys.readouterr()
    assert "`train` will refuse a new drafter" in json.loads(told.out.splitlines()[-1])["warnings"][0]
    assert "llama3" in told.err.splitlines()[2]
    assert command("train", "--set", f"data.path={tmp_path / 'data'}", "--set", "run.device=cpu") == 1
    assert "llama3" in capsys.readouterr().err
