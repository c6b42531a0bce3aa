"""A final norm or layer ids recorded wrongly show in the numbers of a real target's hidden states."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from buffers.dataset import Dataset
from engine.corpus_extract import extract_corpus
from engine.demo import EMBEDDED_TARGET
from engine.inspection import inspect_dataset
from engine.reading_checks import cross_entropy
from engine.settings import load_settings
from engine.target import load_target
from tests.dataset_helpers import rewrite_manifest, rewrite_shard
from tests.foreign_helpers import archive

LAST = json.loads((EMBEDDED_TARGET / "config.json").read_text())["num_hidden_layers"] - 1
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target's hidden states over this test's own source, the last layer among the taps."""
    folder = tmp_path_factory.mktemp("extracted")
    target = load_target(EMBEDDED_TARGET, torch.device("cpu"), torch.float32)
    extract_corpus(
        target,
        [Path(__file__)],
        folder / "data",
        target_layer_ids=(1, LAST),
        min_length=32,
        max_length=256,
        max_tokens=2000,
    )
    return folder / "data"


@pytest.fixture
def data(extracted: Path, tmp_path: Path) -> Path:
    shutil.copytree(extracted, tmp_path / "data")
    return tmp_path / "data"


def inspect(path: Path, *changes: str) -> dict[str, Any]:
    return inspect_dataset(path, load_settings(None, changes), verify=False)


def test_cross_entropy_is_torchs() -> None:
    states, head, next_ids = torch.randn(5, 8), torch.randn(9000, 8), torch.tensor([0, 1, 8191, 8192, 8999])
    expected = torch.nn.functional.cross_entropy(states @ head.T, next_ids)
    assert cross_entropy(states, next_ids, head) == pytest.approx(float(expected), rel=1e-5)


def test_what_is_recorded_rightly_raises_no_warning(data: Path) -> None:
    figures = inspect(data)
    nats = figures["last_hidden_nats"]
    assert nats["fits"] == "pre" and nats["pre"] < 3 < nats["post"] and nats["guessing"] > 5
    assert figures["layer_ids"] == f"the tap of layer {LAST} is the last layer's"
    assert figures["warnings"] == []


def test_a_norm_recorded_wrongly(data: Path) -> None:
    rewrite_manifest(data, lambda values: values.update(last_hidden_norm="post"))
    figures = inspect(data)
    (warning,) = figures["warnings"]
    nats = figures["last_hidden_nats"]
    assert (
        f"recorded as post and fits pre (next token {nats['pre']:.3f} nats read as pre, {nats['post']:.3f} as post"
        in warning
    )
    # The taps are still compared by the reading that fits.
    assert figures["layer_ids"] == f"the tap of layer {LAST} is the last layer's"


@pytest.mark.parametrize("recorded", ["pre", "post"])
def test_states_after_the_norm(data: Path, recorded: str) -> None:
    target = load_target(EMBEDDED_TARGET, torch.device("cpu"), torch.float32)

    def normed(tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            tensors["last_hidden"] = target.model.norm(tensors["last_hidden"].float()).bfloat16()

    for shard in range(len(Dataset(data).info.shards)):
        rewrite_shard(data, normed, shard)
    rewrite_manifest(data, lambda values: values.update(last_hidden_norm=recorded))
    figures = inspect(data)
    assert figures["last_hidden_nats"]["fits"] == "post"
    assert figures["layer_ids"] == f"the tap of layer {LAST} is the last layer's"
    assert len(figures["warnings"]) == (recorded == "pre")


@pytest.mark.parametrize("ids", [(0, LAST - 1), (1, LAST - 1)])
def test_layer_ids_that_are_off_by_one(data: Path, ids: tuple[int, int]) -> None:
    rewrite_manifest(data, lambda values: values.update(target_layer_ids=list(ids)))
    figures = inspect(data)
    assert figures["layer_ids"] == "wrong"
    (warning,) = figures["warnings"]
    assert f"recorded as layer {LAST - 1} is layer {LAST}" in warning


def test_a_tap_that_is_not_the_last_layers(data: Path) -> None:
    rewrite_shard(data, lambda tensors: tensors.update(hidden_states=tensors["hidden_states"].roll(1, 0)))
    (warning,) = inspect(data)["warnings"]
    assert f"recorded as layer {LAST} is not the last layer's" in warning


def test_a_last_tap_that_was_normed_already(data: Path) -> None:
    # As transformers' output_hidden_states has it.
    target = load_target(EMBEDDED_TARGET, torch.device("cpu"), torch.float32)
    D = target.config.hidden_size

    def change(tensors: dict[str, torch.Tensor]) -> None:
        hidden = tensors["hidden_states"].clone()
        with torch.no_grad():
            hidden[:, D:] = target.model.norm(hidden[:, D:].float()).bfloat16()
        tensors["hidden_states"] = hidden

    rewrite_shard(data, change)
    (warning,) = inspect(data)["warnings"]
    assert f"recorded as layer {LAST} is the last layer after the final norm" in warning


def test_a_tap_that_is_the_embedding(data: Path) -> None:
    target = load_target(EMBEDDED_TARGET, torch.device("cpu"), torch.float32)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        embedded = target.model.embed_tokens.weight[tensors["input_ids"].long()].detach()
        tensors["hidden_states"] = torch.cat([embedded.bfloat16(), tensors["last_hidden"]], dim=1)

    rewrite_shard(data, change)
    (warning,) = inspect(data)["warnings"]
    assert "recorded as layer 1 is the embedding, before layer 0" in warning


def test_without_the_last_layer_it_cannot_be_told(data: Path) -> None:
    D = load_target(EMBEDDED_TARGET, torch.device("cpu"), torch.float32).config.hidden_size
    rewrite_shard(data, lambda tensors: tensors.update(hidden_states=tensors["hidden_states"][:, :D].contiguous()))
    rewrite_manifest(data, lambda values: values.update(target_layer_ids=[1]))
    figures = inspect(data)
    assert figures["layer_ids"].startswith("cannot be told") and figures["warnings"] == []


def test_tokens_of_another_tokenizer(data: Path) -> None:
    rewrite_shard(data, lambda tensors: tensors.update(input_ids=(tensors["input_ids"] * 7 + 3) % 250))
    figures = inspect(data)
    nats = figures["last_hidden_nats"]
    assert nats["fits"] == "neither" and math.isclose(nats["guessing"], math.log(Dataset(data).info.vocab_size))
    assert "last_hidden does not predict the next token" in figures["warnings"][0]


def test_an_open_norm_is_told_before_it_is_set(extracted: Path, tmp_path: Path) -> None:
    """Model-Optimizer's files do not say which norm they have; the target's head does."""
    folder = tmp_path / "modelopt"
    folder.mkdir()
    dataset = Dataset(extracted)
    for i in range(len(dataset)):
        sample = dataset.sample(i)
        states = {"aux_hidden_states": sample.hidden_states.clone(), "hidden_states": sample.last_hidden}
        tokens = {"input_ids": sample.input_ids.long(), "loss_mask": sample.loss_mask.long()}
        if i == 1:
            tokens["input_ids"] = tokens["input_ids"] + 1000
        if i == 2:
            tokens["loss_mask"] = torch.zeros_like(tokens["loss_mask"])
        (folder / f"c{i}.pt").write_bytes(
            archive({k: v.clone() for k, v in (states | tokens).items() if v is not None})
        )
    figures = inspect(folder, f"data.target={EMBEDDED_TARGET}", f"data.target_layer_ids=1,{LAST}")
    assert [setting.split()[0] for setting in figures["missing_settings"]] == [
        "data.mask_token_id",
        "data.last_hidden_norm",
    ]
    assert figures["last_hidden_norm"] is None and figures["last_hidden_nats"]["fits"] == "pre"
    assert figures["layer_ids"] == f"the tap of layer {LAST} is the last layer's"
    assert figures["samples_with_ids_outside_the_vocabulary"] == 1 and figures["first_of_them"] == "c1.pt"
    assert figures["samples_under_two_supervised"] == 1
    assert any("1 samples have token ids outside" in warning for warning in figures["warnings"])
