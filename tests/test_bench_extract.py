"""`bench extract` on the CPU: a random target, its states, training from them, and what is written down."""

import json
from pathlib import Path

import pytest

from bench.cli import main
from bench.extract import forget_peak, peak_gib

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_extraction_and_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("run.device=cpu", "model.num_hidden_layers=1", "model.block_size=4", "buckets.num_anchors=32")
    arguments = [part for setting in settings for part in ("--set", setting)]
    out = tmp_path / "result.json"
    assert main(["bench", "extract", "--samples", "10", "--steps", "3", *arguments, "--json", "--out", str(out)]) == 0
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


def test_peak_is_of_what_is_held_since() -> None:
    held = bytearray(b"\1") * 2**28
    with_held = peak_gib()
    del held
    forget_peak()
    assert 0.05 < peak_gib() <= with_held
