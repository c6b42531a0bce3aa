"""The target: equal to transformers' Qwen3, cached equal to uncached, and strict about what it loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.target import Target, greedy_generate, load_target
from engine.target_config import TargetConfig


def small(tied: bool = True) -> TargetConfig:
    return TargetConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )


def random_target(tied: bool = True) -> Target:
    torch.manual_seed(0)
    target = Target(small(tied))
    for name, parameter in target.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return target.requires_grad_(False)


def save(target: Target, directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(target.config.to_json()))
    save_file(target.state_dict(), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("tied", [True, False])
def test_equals_transformers(tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    target = load_target(save(random_target(tied), tmp_path))
    hf = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**target.config.to_json())).float().eval()
    report = hf.load_state_dict(target.state_dict(), strict=False)
    assert not report.unexpected_keys and report.missing_keys == (["lm_head.weight"] if tied else [])
    hf.tie_weights()
    ids = torch.randint(0, 50, (2, 17))
    expected = hf(ids, output_hidden_states=True)
    found = target(ids, tap_layer_ids=(0, 1, 2))
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert found.logits.std() > 0.1
    # transformers' hidden_states[t + 1] is the residual stream after layer t.
    torch.testing.assert_close(found.taps, torch.cat(expected.hidden_states[1:4], dim=-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.model.norm(found.last_hidden), expected.hidden_states[-1], rtol=1e-4, atol=1e-4)


def test_cached_pieces_equal_the_whole() -> None:
    target = random_target()
    ids = torch.randint(0, 50, (3, 20))
    whole = target(ids, tap_layer_ids=(1, 3))
    cache = target.new_cache(20, batch=3)
    pieces = [target(part, cache=cache, tap_layer_ids=(1, 3)) for part in torch.split(ids, [5, 1, 4, 1, 9], dim=1)]
    assert cache.length == 20
    torch.testing.assert_close(torch.cat([p.logits for p in pieces], 1), whole.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([p.taps for p in pieces], 1), whole.taps, rtol=1e-4, atol=1e-4)


def test_rollback_forgets() -> None:
    target = random_target()
    ids = torch.randint(0, 50, (1, 12))
    cache = target.new_cache(12)
    target(ids[:, :6], cache=cache)
    target(49 - ids[:, 6:12], cache=cache)
    cache.rollback(6)
    again = target(ids[:, 6:], cache=cache).logits
    torch.testing.assert_close(again, target(ids).logits[:, 6:], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"cache rollback: expected a length in 0\.\.12, found 13"):
        cache.rollback(13)
    with pytest.raises(ValueError, match=r"target cache: expected at most 12 positions, found 12 \+ 1"):
        target(ids[:, :1], cache=cache)


def test_positions_can_be_given() -> None:
    target = random_target()
    ids = torch.randint(0, 50, (2, 6))
    shifted = target(ids, positions=torch.arange(6)[None].expand(2, 6) + 100).logits
    torch.testing.assert_close(shifted, target(ids).logits, rtol=1e-3, atol=1e-4)


def test_greedy_generation_equals_full_forward_passes() -> None:
    target = random_target()
    prompt = torch.tensor([3, 1, 4, 1, 5])
    text = prompt.tolist()
    for _ in range(12):
        text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
    assert greedy_generate(target, prompt, 12) == text[5:]


def test_taps_of_missing_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target_layer_ids: expected numbers in 0\.\.3, found \[4\]"):
        random_target()(torch.zeros(1, 2, dtype=torch.long), tap_layer_ids=(1, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"target architectures: expected \['Qwen3ForCausalLM'\], found"),
        ({"attention_bias": True}, "target attention_bias: expected False, found True, which is not reproduced here"),
        ({"use_sliding_window": True}, "target use_sliding_window: expected False, found True"),
        ({"layer_types": ["sliding_attention"]}, "target layer_types: expected full_attention only"),
        ({"hidden_act": "gelu"}, "target hidden_act: expected 'silu', found 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "target rope kind: expected default, found 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope kind: expected one of default, yarn, found 'llama3'"),
        ({"hidden_size": None}, "target hidden_size: expected an integer, found None"),
        ({"num_key_value_heads": 4}, "expected num_attention_heads to be a multiple of num_key_value_heads 4"),
    ],
)
def test_refused_configs(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_json({**small().to_json(), **change})


def test_loading_is_strict(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="target: expected the file .*config.json, found none"):
        load_target(tmp_path)
    save(random_target(), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({name: t for name, t in weights.items() if "layers.2.mlp.up" not in name}, file)
    with pytest.raises(
        ValueError, match=r"expected the tensor model.layers.2.mlp.up_proj.weight \(1 missing\), found none"
    ):
        load_target(tmp_path)
    save_file({**weights, "model.norm.weight": torch.ones(31)}, file)
    with pytest.raises(ValueError, match=r"expected model.norm.weight of shape \(32,\) by config.json, found \(31,\)"):
        load_target(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="target: expected the file .*model.safetensors, found none"):
        load_target(tmp_path)


def test_sharded_checkpoints_are_read(tmp_path: Path) -> None:
    target = random_target()
    save(target, tmp_path)
    weights = target.state_dict()
    (tmp_path / "model.safetensors").unlink()
    names = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for part in set(names.values()):
        save_file({name: weights[name] for name in weights if names[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    loaded = load_target(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded.inv_freq.dtype == torch.float32
    ids = torch.arange(8)[None]
    assert torch.allclose(loaded(ids).logits.float(), target(ids).logits, atol=0.5)
