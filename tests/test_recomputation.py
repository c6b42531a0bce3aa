"""Layer ids and norm of a dataset told by running the target again."""

from pathlib import Path
from typing import Any

import pytest

from buffers.dataset import Dataset
from engine.cli import cli
from engine.cli import run as run_command
from engine.extract_options import ExtractOptions
from engine.hf_extract import extract_dataset
from engine.inspection import inspect_dataset
from engine.recomputation import recompute
from engine.settings import load_settings
from tests.dataset_helpers import rewrite_manifest, rewrite_shard
from tests.foreign_helpers import archive
from tests.hf_helpers import SIZES, id_records, save_model, transformers, write_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def data(model: Path, tmp_path: Path) -> Path:
    """Twelve samples, tapped after the second and the fourth of six layers: neither is the last."""
    options = ExtractOptions(
        target=str(model),
        data=write_jsonl(tmp_path / "ids.jsonl", id_records(12)),
        out=tmp_path / "data",
        layers=(1, 3),
        mask_token_id=SIZES["vocab_size"] - 1,
        device="cpu",
    )
    extract_dataset(options)
    return tmp_path / "data"


def inspect(path: Path, *changes: str) -> dict[str, Any]:
    return inspect_dataset(path, load_settings(None, changes), verify=False, recompute=5)


def layer_warnings(figures: dict[str, Any]) -> list[str]:
    """Without what a random target's loss has to say."""
    return [warning for warning in figures["warnings"] if "does not predict the next token" not in warning]


def test_what_is_recorded_rightly(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target is found by its name in dataset.json."""
    figures = inspect(data)
    assert figures["layer_ids"] == "every tap is of the layer recorded" and layer_warnings(figures) == []
    found = figures["recomputed"]
    assert found["samples"] == 5 and [tap["is"] for tap in found["taps"]] == [1, 3]
    assert all(tap["distance"] < 0.01 for tap in found["taps"])
    assert found["last_hidden"]["pre"] < 0.01 < found["last_hidden"]["post"]
    assert "tap_of_layer_3_is" in capsys.readouterr().out


@pytest.mark.parametrize("ids", [[0, 2], [2, 4]])
def test_layer_ids_that_are_off_by_one(data: Path, ids: list[int]) -> None:
    rewrite_manifest(data, lambda values: values.update(target_layer_ids=ids))
    figures = inspect(data)
    assert figures["layer_ids"] == "2 taps are not of the layers recorded"
    first, second = layer_warnings(figures)
    assert first.startswith(f"the tap recorded as layer {ids[0]} is layer 1 (0.00")
    assert second.startswith(f"the tap recorded as layer {ids[1]} is layer 3 (0.00") and "count from 0" in second


@pytest.mark.parametrize(("recorded", "truth"), [("post", "pre"), ("pre", "post")])
def test_a_norm_recorded_wrongly(data: Path, model: Path, recorded: str, truth: str) -> None:
    if truth == "post":
        norm = transformers.AutoModelForCausalLM.from_pretrained(model).model.norm
        rewrite_shard(
            data, lambda values: values.update(last_hidden=norm(values["last_hidden"].float()).detach().bfloat16())
        )
    rewrite_manifest(data, lambda values: values.update(last_hidden_norm=recorded))
    (warning,) = layer_warnings(inspect(data))
    assert warning.startswith(f"last_hidden is recorded as {recorded} and is {truth} (")


def test_states_of_other_tokens(data: Path) -> None:
    """Another tokenizer's ids beside the right states, or another target's states."""
    rewrite_shard(data, lambda values: values.update(input_ids=(values["input_ids"] * 7 + 3) % 90))
    figures = inspect(data)
    assert [tap["is"] for tap in figures["recomputed"]["taps"]] == [None, None]
    assert "the tap recorded as layer 1 is of no layer of this target" in layer_warnings(figures)[0]
    assert "last_hidden is neither before nor after the final norm of this target" in layer_warnings(figures)[-1]


def test_another_trainers_files(data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted from 1 by mistake; and what the command says when it has not enough to go on."""
    folder = tmp_path / "specforge"
    folder.mkdir()
    dataset = Dataset(data)
    for i in range(len(dataset)):
        sample = dataset.sample(i)
        values = {
            "input_ids": sample.input_ids.long(),
            "loss_mask": sample.loss_mask,
            "hidden_states": sample.hidden_states,
        }
        (folder / f"data_{i}.ckpt").write_bytes(archive({name: tensor.clone() for name, tensor in values.items()}))
    figures = inspect(folder, f"data.target={model}", "data.target_layer_ids=2,4")
    found = figures["recomputed"]
    assert [tap["is"] for tap in found["taps"]] == [1, 3] and found["last_hidden"] is None
    assert run_command(cli, ["data", "inspect", str(folder), "--recompute", "2", "--target", str(model)]) == 2
    assert "--recompute: expected data.target and data.target_layer_ids" in capsys.readouterr().err


def test_another_target(data: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", vocab_size=100)
    with pytest.raises(ValueError, match=r"vocabulary 96 with layers \[1, 3\], found 16, 100 and 6 layers"):
        recompute(Dataset(data), str(other), 2, recorded_norm="pre")
