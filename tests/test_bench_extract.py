"""`bench extract` on the CPU: a random target, its states, training from them, and what is written down."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.extract import forget_peak, peak_gib
from buffers.dataset import Dataset

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_extraction_and_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("run.device=cpu", "model.num_hidden_layers=1", "model.block_size=4", "buckets.num_anchors=32")
    arguments = [part for setting in settings for part in ("--set", setting)]
    out, plot = tmp_path / "result.json", tmp_path / "result.png"
    files = ["--out", str(out), "--plot", str(plot)]
    assert main(["bench", "extract", "--samples", "10", "--steps", "3", *arguments, "--json", *files]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert figures == json.loads(out.read_text())
    extraction, training = figures["extraction"], figures["training"]
    assert extraction["samples"] == 10 and extraction["target_layer_ids"] == [1, 2, 4, 6, 7]
    assert extraction["tokens_per_s"] == pytest.approx(extraction["tokens"] / extraction["seconds"])
    assert 0 < extraction["padding"] < 1 and extraction["bytes"] > extraction["tokens"] * 6 * 64 * 2
    assert training["steps"] == 3 and training["tokens_per_s"] > 0 and training["how"] == "called"
    assert figures["host_peak_gib"].keys() == {"extraction", "training"}
    assert "extraction" in printed and "host peak GiB" in printed
    assert figures["compared"]["samples"] == 4 and figures["compared"]["farthest_tap"] < 2**-8
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_no_speed_is_shown_when_the_files_hold_other_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sample = Dataset.sample

    def shifted(*args: Any) -> Any:
        found = sample(*args)
        return replace(found, hidden_states=found.hidden_states.roll(1, 0))

    monkeypatch.setattr("buffers.dataset.Dataset.sample", shifted)
    out = tmp_path / "result.json"
    command = ["bench", "extract", "--samples", "10", "--steps", "3", "--set", "run.device=cpu", "--out", str(out)]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert "extraction: the tap recorded as layer 1 is of no layer of this target" in captured.err
    assert captured.err.rstrip().endswith("no speed is shown") and "tokens/s" not in captured.out
    assert not out.exists()


def test_peak_is_of_what_is_held_since() -> None:
    held = bytearray(b"\1") * 2**28
    with_held = peak_gib()
    del held
    forget_peak()
    assert 0.05 < peak_gib() <= with_held
