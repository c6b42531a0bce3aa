"""A drafter's way out and back in: bit-exact round trips, both layouts, shards, and weights that do not belong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.assemble import drafter_config, initial_weights
from engine.checkpoint import save_drafter
from engine.cli import cli
from engine.cli import run as run_command
from engine.drafter_config import FULL, SLIDING, DrafterConfig
from engine.export import export_drafter, load_drafter
from engine.params import ParamArena, parameter_shapes
from engine.settings import Settings, load_settings
from tests.drafter_helpers import CPU, assert_same_bits, random_weights, small_config
from tests.run_helpers import TARGET_CONFIG, checkpoint_tensors, files_under, run_settings, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")

MIXES: list[dict[str, Any]] = [
    {"layer_types": (FULL,) * 5, "sliding_window": None},
    {"layer_types": (SLIDING,) * 4 + (FULL,)},
    {"layer_types": (SLIDING,) * 5, "causal_layers": (False,) * 5},
]


def saved(folder: Path, config: DrafterConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A drafter as someone else released it: z-lab's layout, in this type. Returns its tensors."""
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(config).items()}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return weights


@pytest.mark.parametrize("mix", MIXES)
def test_export_then_init_then_export_is_the_same_bytes(mix: dict[str, Any], tmp_path: Path) -> None:
    config = small_config(**mix)
    saved(tmp_path / "released", config)
    export_drafter(tmp_path / "released", tmp_path / "first")
    read, weights = load_drafter(tmp_path / "first")
    params = ParamArena(read, CPU, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)
    params.load_(weights)
    save_drafter(tmp_path / "trained", read, params.state())
    export_drafter(tmp_path / "trained", tmp_path / "second")
    assert len(weights) == 58
    assert files_under(tmp_path / "second") == files_under(tmp_path / "first")


@pytest.mark.parametrize("mix", MIXES)
def test_speculators_layout_and_back_is_the_same_bytes(mix: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path / "released", small_config(**mix))
    export_drafter(tmp_path / "released", tmp_path / "first")
    export_drafter(tmp_path / "first", tmp_path / "other", layout="speculators", verifier="a/target")
    export_drafter(tmp_path / "other", tmp_path / "second")
    assert files_under(tmp_path / "second") == files_under(tmp_path / "first")


def test_what_vllm_reads_of_speculators_layout(tmp_path: Path) -> None:
    config = small_config(layer_types=(SLIDING, SLIDING), causal_layers=(False, False))
    saved(tmp_path / "released", config)
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    figures = export_drafter(tmp_path / "released", tmp_path / "out", layout="speculators", verifier=str(target))
    assert figures["layout"] == "speculators" and figures["tensors"] == 25
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["speculators_model_type"] == "dflash" and written["architectures"] == ["DFlashSpeculator"]
    assert (written["mask_token_id"], written["block_size"], written["draft_vocab_size"]) == (511, 4, 512)
    # speculators' ids count from the embedding's output on: z-lab's layer i is its i + 1.
    assert config.target_layer_ids == (1, 3) and written["aux_hidden_state_layer_ids"] == [2, 4]
    assert written["sliding_window_non_causal"] is True and written["sample_from_anchor"] is False
    assert written["speculators_config"] == {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": 3,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": str(target), "architectures": ["Qwen3ForCausalLM"]},
    }
    layers = written["transformer_layer_config"]
    assert (layers["model_type"], layers["num_hidden_layers"], layers["sliding_window"]) == ("qwen3", 2, 12)
    assert layers["layer_types"] == [SLIDING, SLIDING] and layers["is_causal"] is False
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == parameter_shapes(config).keys()


def test_speculators_layout_with_the_targets_head(tmp_path: Path) -> None:
    config = small_config()
    saved(tmp_path / "released", config)
    (tmp_path / "target").mkdir()
    target = {
        "model.embed_tokens.weight": torch.randn(512, 64).bfloat16(),
        "lm_head.weight": torch.randn(512, 64).bfloat16(),
        "model.norm.weight": torch.ones(64).bfloat16(),
    }
    save_file(target, tmp_path / "target" / "model.safetensors")
    (tmp_path / "target" / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    options: dict[str, Any] = {"layout": "speculators", "verifier": str(tmp_path / "target"), "with_head": True}
    export_drafter(tmp_path / "released", tmp_path / "out", **options)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], target["model.embed_tokens.weight"])
    assert torch.equal(written["lm_head.weight"], target["lm_head.weight"])
    assert load_drafter(tmp_path / "out")[1].keys() == parameter_shapes(config).keys()
    small = {name: tensor[:500].contiguous() for name, tensor in target.items()}
    save_file(small, tmp_path / "target" / "model.safetensors")
    with pytest.raises(ValueError, match=r"found embed_tokens.weight \(500, 64\) for \(512, 64\)"):
        export_drafter(tmp_path / "released", tmp_path / "bad", **options)


def test_a_layout_and_its_options_belong_together(tmp_path: Path) -> None:
    saved(tmp_path / "released", small_config())
    for options, message in (
        ({"layout": "speculators"}, "verifier: expected the target's name or folder with layout speculators"),
        ({"verifier": "a/target"}, "verifier: expected .* and none otherwise, found 'a/target' with z-lab"),
        ({"with_head": True}, "with head: expected layout speculators, found z-lab"),
        ({"layout": "gguf"}, "layout: expected one of z-lab, speculators, found 'gguf'"),
    ):
        with pytest.raises(ValueError, match=message):
            export_drafter(tmp_path / "released", tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type: expected 'dflash', found 'eagle3'"),
        ({"sample_from_anchor": True}, "sample_from_anchor: expected false, found true"),
        ({"draft_vocab_size": 100}, "draft_vocab_size: expected vocab_size 512, found 100"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids: expected a list of layer numbers"),
        ({"transformer_layer_config": None}, "transformer_layer_config: expected an object, found None"),
    ],
)
def test_a_speculator_that_is_no_plain_dflash(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path / "released", small_config())
    export_drafter(tmp_path / "released", tmp_path / "out", layout="speculators", verifier="a/target")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_float_type_and_shards_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    config = small_config()
    weights = saved(tmp_path / "whole", config, dtype)
    assert_same_bits(load_drafter(tmp_path / "whole")[1], weights)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    names = sorted(weights)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert_same_bits(load_drafter(sharded)[1], weights)
    export_drafter(sharded, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files | {"norm2.weight": "a"}}))
    with pytest.raises(ValueError, match="expected a safetensors file in .*sharded/a, found"):
        load_drafter(sharded)
    (sharded / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"expected an object in .*index.json, found \[\]"):
        load_drafter(sharded)


def test_one_message_lists_what_is_missing_unexpected_and_misshapen(tmp_path: Path) -> None:
    config = small_config()
    weights = saved(tmp_path / "drafter", config)
    wrong = {name: tensor for name, tensor in weights.items() if name != "layers.1.mlp.up_proj.weight"}
    wrong |= {"embed_tokens.weight": torch.zeros(2, 2), "norm.weight": torch.zeros(63)}
    save_file(wrong, tmp_path / "drafter" / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load_drafter(tmp_path / "drafter")
    assert str(caught.value) == (
        f"{tmp_path / 'drafter'}: expected the 25 tensors of its config.json, found no layers.1.mlp.up_proj.weight, "
        "unexpected embed_tokens.weight, norm.weight (63,) for (64,). Take the weights and the config.json of one drafter"
    )
    prefixed = {f"model.{name}": tensor for name, tensor in weights.items()}
    save_file(prefixed, tmp_path / "drafter" / "model.safetensors")
    with pytest.raises(ValueError, match="found no fc.weight, .*, and 38 more. Take"):
        load_drafter(tmp_path / "drafter")
    save_file(weights, tmp_path / "drafter" / "model.safetensors")
    (tmp_path / "drafter" / "mask_embedding.pt").write_bytes(b"a row of its own")
    with pytest.raises(ValueError, match="takes the mask token's row of .*, found mask_embedding.pt, which vLLM"):
        load_drafter(tmp_path / "drafter")
    (tmp_path / "drafter" / "mask_embedding.pt").unlink()
    quantised = weights | {"fc.weight": weights["fc.weight"].to(torch.float8_e4m3fn)}
    save_file(quantised, tmp_path / "drafter" / "model.safetensors")
    with pytest.raises(ValueError, match="expected tensors in bf16, fp16 or fp32, found fc.weight torch.float8_e4m3fn"):
        load_drafter(tmp_path / "drafter")


def init_settings(data: Path, tmp_path: Path, drafter: Path) -> Settings:
    return run_settings(data, tmp_path / "run", f"model.init={drafter}")


def test_train_init_starts_from_the_drafter(tmp_path: Path) -> None:
    """The command's flag, a learning rate that moves nothing in bf16, and masters that are the drafter's own numbers."""
    data = training_dataset(tmp_path / "data", (40, 60))
    config = small_config(
        hidden_size=8, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=50,
        mask_token_id=49, target_layer_ids=(1, 3, 4), layer_types=(FULL,) * 5, sliding_window=None,
    )  # fmt: skip
    weights = saved(tmp_path / "released", config)
    changes = ("run.max_steps=1", "run.device=cpu", "optimizer.lr=1e-30", "buckets.lengths=128", f"data.path={data}")
    args = [word for change in (*changes, f"run.output={tmp_path / 'run'}") for word in ("--set", change)]
    assert run_command(cli, ["train", "--init", str(tmp_path / "released"), *args]) == 0
    found = checkpoint_tensors(tmp_path / "run", 1)
    assert_same_bits({name: found[f"master.{name}"].bfloat16() for name in weights}, weights)
    assert len(weights) == 58
    settings = load_settings(tmp_path / "run" / "settings.toml")
    assert settings.model.init == str(tmp_path / "released")


def test_a_speculators_drafter_to_start_from(tmp_path: Path) -> None:
    """One that does not say how many layers its target has, as speculators' own do not: the dataset says it."""
    from buffers.dataset import Dataset

    info = Dataset(training_dataset(tmp_path / "data", (40, 60))).info
    config = small_config(
        hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=50, mask_token_id=49,
        target_layer_ids=(1, 3, 4),
    )  # fmt: skip
    weights = saved(tmp_path / "released", config)
    export_drafter(tmp_path / "released", tmp_path / "other", layout="speculators", verifier="a/target")
    file = tmp_path / "other" / "config.json"
    written = json.loads(file.read_text())
    del written["transformer_layer_config"]["num_target_layers"]
    file.write_text(json.dumps(written))
    settings = init_settings(tmp_path / "data", tmp_path, tmp_path / "other")
    found = drafter_config(settings, info)
    assert found == config and found.num_target_layers == TARGET_CONFIG["num_hidden_layers"]
    assert_same_bits(initial_weights(settings, found), weights)
    with pytest.raises(ValueError, match="num_target_layers: expected an integer, found None"):
        load_drafter(tmp_path / "other")


@pytest.mark.parametrize(("word", "expected"), [("auto", (True, False)), ("yes", (True, True)), ("no", (False, False))])
def test_causality_comes_from_the_settings(word: str, expected: tuple[bool, ...], tmp_path: Path) -> None:
    from buffers.dataset import Dataset

    info = Dataset(training_dataset(tmp_path / "data", (40, 60))).info
    changes = ("model.num_hidden_layers=2", "model.layer_types=sliding,full", "model.sliding_window=16")
    settings = run_settings(
        tmp_path / "data", tmp_path / "run", *changes, f"model.causal={word}", "model.initializer_range=0.01"
    )
    config = drafter_config(settings, info)
    assert config.causal_layers == expected
    assert config.to_json().get("is_causal") == {"auto": None, "yes": True, "no": False}[word]
    assert config.to_json()["initializer_range"] == 0.01
