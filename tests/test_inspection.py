"""`dflash-engine data inspect`: what it shows, and what --verify finds."""

import json
from pathlib import Path
from typing import Any

import pytest

from buffers.dataset import Dataset
from engine.inspection import inspect_dataset
from engine.settings import Settings
from tests.dataset_helpers import rewrite_shard
from tests.run_helpers import LENGTHS, training_dataset


def test_what_a_dataset_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = training_dataset(tmp_path / "data", LENGTHS, last_hidden_norm="pre")
    figures = inspect_dataset(data, Settings(), verify=True)
    json.dumps(figures)
    dataset = Dataset(data)
    sizes = [shard.stat().st_size for shard in data.glob("shard-*.safetensors")]
    nats = figures.pop("last_hidden_nats")
    assert nats["fits"] == "neither"  # random states and a random head
    assert figures == {
        "format": "dflash-engine",
        "target": "tiny",
        "shards": len(sizes),
        "bytes": sum(sizes),
        "samples": 10,
        "tokens": sum(LENGTHS),
        "hidden_size": 8,
        "target_layer_ids": [1, 3, 4],
        "vocab_size": 50,
        "mask_token_id": 49,
        "last_hidden_norm": "pre",
        "length_min_median_p90_p99_max": [40, 90, 160, 170, 170],
        "anchor_positions": int(dataset.eligible_counts.sum()),
        "samples_without_anchor": 0,
        "samples_under_two_supervised": 0,
        "bad_files": {},
        "verified": True,
        "samples_not_finite": 0,
        "layer_ids": "cannot be told from the numbers: no tap is of the last layer, or there is no last_hidden; see --recompute",
        "warnings": [figures["warnings"][0]],
    }
    assert "last_hidden does not predict the next token" in figures["warnings"][0]
    *lines, warning = capsys.readouterr().out.splitlines()
    assert warning == f"warnings: {figures['warnings'][0]}"
    told = [line.split()[0] for line in lines]
    assert sorted(told) == sorted([*figures, "last_hidden_nats"])


def test_samples_that_train_nothing_are_counted(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (1, 1, 40))
    figures = inspect_dataset(data, Settings(), verify=False)
    assert figures["samples_without_anchor"] == figures["samples_under_two_supervised"] == 2
    assert "2 of 3 samples have fewer than two supervised tokens: they train nothing" in figures["warnings"]


def test_samples_whose_supervised_tokens_are_no_neighbours_are_counted(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (1, 40, 40))

    def change(tensors: dict[str, Any]) -> None:
        tensors["loss_mask"][1:41] = 0
        tensors["loss_mask"][[3, 9, 20]] = 1

    rewrite_shard(data, change)
    figures = inspect_dataset(data, Settings(), verify=False)
    assert (figures["samples_without_anchor"], figures["samples_under_two_supervised"]) == (2, 1)
    assert "1 of 3 samples have no two supervised tokens side by side: they train nothing" in figures["warnings"]


def test_samples_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 50, 60), nonfinite=(0, 2))
    assert inspect_dataset(data, Settings(), verify=True)["samples_not_finite"] == 2


def test_verify_reads_every_byte(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data")
    shard = data / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # a byte of the hidden states, of which opening reads nothing
    shard.write_bytes(content)
    assert inspect_dataset(data, Settings(), verify=False)["verified"] is False
    with pytest.raises(ValueError, match=r"expected the sha256 of dataset.json, found another for shard-00000"):
        inspect_dataset(data, Settings(), verify=True)
