"""The demo from end to end with everything small: its files, its figures, and text that is the target's own."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bench.cli import main
from engine import demo
from engine.plots import plot_run
from tests.run_helpers import files_under

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def small() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("DATASET_TOKENS", 3000),
            ("HELD_OUT_TOKENS", 800),
            ("PROMPTS", 2),
            ("PROMPT_TOKENS", 48),
            ("NEW_TOKENS", 12),
        ):
            patch.setattr(demo, name, value)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shown") / "demo"


def test_the_whole_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(folder), "--steps", "8", "--device", "cpu", "--json"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out.splitlines()[-1])
    for name in (
        "tokens_per_verification_before",
        "tokens_per_verification_after",
        "differing_tokens",
        "near_ties",
        "steps",
        "eval_loss",
        "eval_accept_len",
        "buckets",
        "how",
        "drafter",
        "metrics",
        "picture",
        "seconds",
    ):
        assert figures[name] is not None, name
    assert figures["steps"] == 8
    assert figures["how"] == "called"
    assert figures["differing_tokens"] == 0
    assert 1 <= figures["tokens_per_verification_before"] <= 8
    assert 1 <= figures["tokens_per_verification_after"] <= 8
    assert sum(row["batches"] for row in figures["buckets"]) == 8
    for row in figures["buckets"]:
        expected = {"bucket", "batches", "useful_tokens_per_s", "padding", "device_ms", "host_ms", "how"}
        assert row.keys() >= expected

    drafter = Path(figures["drafter"])
    assert len(load_file(drafter / "model.safetensors")) == 11 + 3
    assert json.loads((drafter / "config.json").read_text())["block_size"] == 8
    records = [json.loads(line) for line in Path(figures["metrics"]).read_text().splitlines()]
    evaluations = [record for record in records if "eval_accept_len" in record]
    assert evaluations[-1]["eval_accept_len"] == figures["eval_accept_len"]
    if Path(figures["picture"]).suffix == ".png":
        assert Path(figures["picture"]).read_bytes().startswith(b"\x89PNG")
    for told in ("hidden states", "training", "speculative decoding", "accepted tokens per verification", "batches"):
        assert told in captured.err


def test_a_second_demo_does_not_write_over_the_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_under(folder)
    assert before
    assert main(["demo", "--out", str(folder), "--steps", "8"]) == 1
    expected = f"error: {folder} holds an earlier demo; remove it or choose another folder with --out\n"
    assert capsys.readouterr().err == expected
    assert files_under(folder) == before


def test_a_run_without_matplotlib_has_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot_run(tmp_path / "metrics.jsonl", [], tmp_path / "demo.png") is None
    assert not (tmp_path / "demo.png").exists()


def test_a_picture_of_a_run_without_held_out_samples(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{"step": step, "loss": 3.0 / step, "accept_len": 0.1 * step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {
        "bucket": "1x128x32",
        "batches": 3,
        "padding": 0.5,
        "useful_tokens_per_s": 10.0,
        "device_ms": 1.0,
        "how": "called",
    }
    out = plot_run(tmp_path / "metrics.jsonl", [row], tmp_path / "demo.png")
    assert out is not None and out.read_bytes().startswith(b"\x89PNG")
