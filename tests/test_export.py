"""Export: from a run, a checkpoint or a drafter to what servers load, without loss and without writing over anything."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.export
from engine.checkpoint import save_drafter
from engine.drafter_config import FULL, SLIDING
from engine.export import export_drafter, load_drafter
from engine.params import parameter_shapes
from tests.drafter_helpers import assert_same_bits, random_weights, small_config
from tests.run_helpers import checkpoint_tensors, files_under, run, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")

# What z-lab's Qwen3-8B-DFlash-b16 has in its config.json.
KEYS = {
    "architectures", "auto_map", "model_type", "block_size", "dflash_config", "num_target_layers", "num_hidden_layers",
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "attention_bias", "attention_dropout", "initializer_range", "layer_types", "max_window_layers",
    "sliding_window", "use_sliding_window", "max_position_embeddings", "rope_theta", "rope_scaling", "vocab_size",
    "bos_token_id", "eos_token_id", "tie_word_embeddings", "use_cache", "dtype",
    "rope_parameters", "torch_dtype",  # and the other spelling of two of them
}  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with 5 layers, evaluated at steps 4 and 6, with both checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    data = training_dataset(folder / "data", (40, 60, 90))
    held_out = training_dataset(folder / "held-out", (50,), first_sample=50)
    changes = ("model.num_hidden_layers=5", "buckets.lengths=128", "run.eval_every=4")
    run(data, folder / "run", *changes, f"data.eval_path={held_out}")
    return folder / "run"


def test_from_a_run_comes_its_best_drafter(run_folder: Path, tmp_path: Path) -> None:
    figures = export_drafter(run_folder, tmp_path / "out")
    assert figures == {
        "source": str(run_folder / "best"),
        "out": str(tmp_path / "out"),
        "layout": "z-lab",
        "tensors": 58,
        "block_size": 4,
    }
    assert_same_bits(
        load_file(tmp_path / "out" / "model.safetensors"), load_file(run_folder / "best" / "model.safetensors")
    )


def test_from_a_run_without_evaluation_comes_its_last_checkpoint(tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 60, 90))
    run(data, tmp_path / "run", "buckets.lengths=128")
    assert export_drafter(tmp_path / "run", tmp_path / "out")["source"].endswith("checkpoints/step-00000006")
    found, saved = load_file(tmp_path / "out" / "model.safetensors"), checkpoint_tensors(tmp_path / "run", 6)
    assert_same_bits(found, {name: saved[f"master.{name}"].bfloat16() for name in found})


@pytest.mark.parametrize("moment", ["engine.checkpoint_choice.check_whole", "engine.export.saved_weights"])
def test_a_checkpoint_that_the_run_replaces_meanwhile_is_no_damaged_one(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = training_dataset(tmp_path / "data", (40, 60, 90))
    run(data, tmp_path / "run", "buckets.lengths=128")
    read = getattr(engine.export, moment.rpartition(".")[2])

    def too_late(folder: Path) -> Any:
        if folder.name == "step-00000006":
            folder.rename(folder.with_name("step-00000007"))  # stands for a newer one
        return read(folder)

    monkeypatch.setattr(moment, too_late)
    assert export_drafter(tmp_path / "run", tmp_path / "out")["source"].endswith("checkpoints/step-00000007")


def test_a_best_drafter_that_the_run_replaces_meanwhile_is_read_again(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    load, best = engine.export.load_drafter, tmp_path / "run" / "best"
    calls: list[Path] = []

    def between_two_renames(folder: Path, *args: Any) -> Any:
        calls.append(folder)
        if len(calls) > 1:
            return load(folder, *args)
        shutil.copytree(best, tmp_path / "newer")
        shutil.rmtree(best)
        (tmp_path / "newer").rename(best)
        raise ValueError("found no model.safetensors")

    monkeypatch.setattr("engine.export.load_drafter", between_two_renames)
    assert engine.export.load_trained(tmp_path / "run")[0] == best and calls == [best, best]
    (best / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model.safetensors"):
        engine.export.load_trained(tmp_path / "run")


def test_from_a_checkpoint_and_from_a_drafter_comes_what_was_named(run_folder: Path, tmp_path: Path) -> None:
    export_drafter(run_folder / "checkpoints" / "step-00000004", tmp_path / "four")
    saved = checkpoint_tensors(run_folder, 4)
    found = load_file(tmp_path / "four" / "model.safetensors")
    assert_same_bits(found, {name: saved[f"master.{name}"].bfloat16() for name in found})
    export_drafter(run_folder / "drafter", tmp_path / "last")
    assert files_under(tmp_path / "last") == files_under(run_folder / "drafter")
    export_drafter(tmp_path / "last", tmp_path / "again")
    assert files_under(tmp_path / "again") == files_under(tmp_path / "last")


def test_what_servers_load(run_folder: Path, tmp_path: Path) -> None:
    export_drafter(run_folder, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    config: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())
    # Every layer is full, so that is_causal, which a server applies to all of them, may be written.
    assert config.keys() == KEYS | {"is_causal"}
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert config["dflash_config"] == {"mask_token_id": 49, "target_layer_ids": [1, 3, 4]}
    assert config["layer_types"] == [FULL] * 5
    assert (config["is_causal"], config["use_sliding_window"], config["dtype"]) == (False, False, "bfloat16")
    assert (config["num_hidden_layers"], config["num_target_layers"], config["max_window_layers"]) == (5, 6, 5)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert len(tensors) == 58
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    expected = {"fc.weight": (8, 24), "hidden_norm.weight": (8,), "norm.weight": (8,)}
    for i in range(5):
        expected |= {
            f"layers.{i}.self_attn.q_proj.weight": (8, 8),
            f"layers.{i}.self_attn.k_proj.weight": (4, 8),
            f"layers.{i}.self_attn.v_proj.weight": (4, 8),
            f"layers.{i}.self_attn.o_proj.weight": (8, 8),
            f"layers.{i}.self_attn.q_norm.weight": (4,),
            f"layers.{i}.self_attn.k_norm.weight": (4,),
            f"layers.{i}.mlp.gate_proj.weight": (16, 8),
            f"layers.{i}.mlp.up_proj.weight": (16, 8),
            f"layers.{i}.mlp.down_proj.weight": (8, 16),
            f"layers.{i}.input_layernorm.weight": (8,),
            f"layers.{i}.post_attention_layernorm.weight": (8,),
        }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected


def test_a_mix_of_layers_has_no_is_causal(tmp_path: Path) -> None:
    config = small_config()
    assert config.layer_types == (FULL, SLIDING)
    save_drafter(tmp_path / "drafter", config, random_weights(config))
    export_drafter(tmp_path / "drafter", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.keys() == KEYS
    assert (written["use_sliding_window"], written["sliding_window"]) == (True, 12)
    assert load_drafter(tmp_path / "out")[0] == config


def test_bf16_comes_back_exactly_and_says_so(tmp_path: Path) -> None:
    config = small_config(dtype="float32")
    weights = random_weights(config)
    save_drafter(tmp_path / "drafter", config, weights)
    read, found = load_drafter(tmp_path / "drafter")
    assert read.dtype == "bfloat16"
    assert_same_bits(found, {name: tensor.bfloat16() for name, tensor in weights.items()})
    assert found.keys() == parameter_shapes(config).keys()


def test_nothing_is_written_over(run_folder: Path, tmp_path: Path) -> None:
    export_drafter(run_folder, tmp_path / "model")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    before = files_under(tmp_path)
    for name, message in (
        ("model", "expected a new or empty folder, found that it holds a model already"),
        ("notes", "expected a new or empty folder, found that it holds something already"),
        ("file", "expected a new or empty folder, found a file"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {message}; choose another"):
            export_drafter(run_folder, tmp_path / name)
    assert files_under(tmp_path) == before
    (tmp_path / "empty").mkdir()
    export_drafter(run_folder, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_a_source_without_a_drafter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: expected a run's folder, a checkpoint or a drafter, found none of"):
        export_drafter(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("file", "keep"), [("training.safetensors", 0.5), ("state.json", 0.5), ("state.json", 0.0)])
def test_a_damaged_checkpoint(run_folder: Path, tmp_path: Path, file: str, keep: float) -> None:
    copy = tmp_path / "step-00000004"
    copy.mkdir()
    for name, content in files_under(run_folder / "checkpoints" / "step-00000004").items():
        (copy / name).write_bytes(content[: int(len(content) * keep)] if name == file else content)
    with pytest.raises(ValueError, match="step-00000004: expected a training checkpoint, found a damaged one"):
        export_drafter(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_drafter(tmp_path: Path) -> None:
    config = small_config()
    weights = random_weights(config)
    folder = tmp_path / "drafter"
    save_drafter(folder, config, weights)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    with pytest.raises(ValueError, match="expected a safetensors file in .*drafter/model.safetensors, found"):
        export_drafter(folder, tmp_path / "out")
    del weights["norm.weight"]
    save_file(weights, file)
    with pytest.raises(ValueError, match=r"expected the 25 tensors of its config.json, found no norm.weight. Take"):
        export_drafter(folder, tmp_path / "out")
    save_file(weights | {"norm.weight": torch.ones(63)}, file)
    with pytest.raises(ValueError, match=r"expected the 25 tensors .*, found norm.weight \(63,\) for \(64,\). Take"):
        export_drafter(folder, tmp_path / "out")
    file.write_bytes(whole)
    (folder / "config.json").write_text('{"block_size": ')
    with pytest.raises(ValueError, match="expected JSON in .*config.json, found .* Copy the file again"):
        export_drafter(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    config = small_config()
    weights = random_weights(config)
    weights["norm.weight"][3] = float("nan")
    with pytest.raises(ValueError, match="expected finite weights, found NaN or infinity in norm.weight and 0 more"):
        save_drafter(tmp_path / "drafter", config, weights)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".model.old", ".model.writing"])
def test_a_folder_with_a_name_that_the_writing_uses_stays(run_folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=f"expected no {name} beside it, found one"):
        export_drafter(run_folder, tmp_path / "model")
    assert (tmp_path / name / "thesis.txt").is_file()
