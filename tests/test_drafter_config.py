"""DrafterConfig and rope: published configs are read, written back, and refused where the engine would differ."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from engine.drafter_config import FULL, SLIDING, DrafterConfig, default_target_layer_ids, load_drafter_config
from engine.rope import (
    RopeConfig,
    apply_rope,
    rope_attention_scaling,
    rope_cos_sin,
    rope_from_config,
    rope_inv_freq,
    rope_of_drafter,
    rope_to_config,
)

GOLDEN = Path(__file__).parent / "golden"


def published() -> dict[str, object]:
    config: dict[str, object] = json.loads((GOLDEN / "dflash-sliding" / "config.json").read_text())
    return config


@pytest.mark.parametrize("case", ["dflash-full", "dflash-sliding"])
def test_reads_the_golden_configs_and_writes_them_back(case: str) -> None:
    config = load_drafter_config(GOLDEN / case)
    assert config.block_size in (4, 8) and config.target_layer_ids == (1, 2, 3) and config.mask_token_id == 511
    assert config.num_hidden_layers == 2 and config.num_taps == 3 and config.rope == RopeConfig(theta=10000.0)
    assert DrafterConfig.from_json(config.to_json()) == config
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    for key, value in json.loads((GOLDEN / case / "config.json").read_text()).items():
        assert config.to_json()[key] == value


def test_causal_rule_and_window() -> None:
    config = DrafterConfig.from_json(published())
    assert [config.layer_causal(i) for i in (0, 1)] == [True, False]
    assert [config.layer_window(i) for i in (0, 1)] == [12, None]
    assert config.export_is_causal() is None and "is_causal" not in config.to_json()
    inner = {**published()["dflash_config"], "causal": False}  # type: ignore[dict-item]
    assert DrafterConfig.from_json({**published(), "dflash_config": inner}).causal_layers == (False, False)
    both = DrafterConfig.from_json({**published(), "dflash_config": inner, "is_causal": True})
    assert both.causal_layers == (True, True) and both.to_json()["is_causal"] is True
    assert load_drafter_config(GOLDEN / "dflash-full").to_json()["is_causal"] is False


def test_a_mix_that_no_server_can_read_is_refused_at_export() -> None:
    config = dataclasses.replace(DrafterConfig.from_json(published()), causal_layers=(False, True))
    with pytest.raises(ValueError, match="causal_layers: expected one value for all layers or the default mix"):
        config.to_json()


def test_layer_types_from_older_spellings() -> None:
    config = {key: value for key, value in published().items() if key != "layer_types"}
    assert DrafterConfig.from_json({**config, "max_window_layers": 1}).layer_types == (FULL, SLIDING)
    assert DrafterConfig.from_json({**config, "use_sliding_window": False}).layer_types == (FULL, FULL)
    inner = {**published()["dflash_config"], "use_swa": True, "swa_window_size": 9}  # type: ignore[dict-item]
    for layer_types in (None, [FULL, FULL]):
        swa = DrafterConfig.from_json({**config, "dflash_config": inner, "layer_types": layer_types})
        assert swa.layer_types == (SLIDING, SLIDING) and swa.sliding_window == 9
        assert swa.causal_layers == (False, False) and swa.to_json()["is_causal"] is False
    mixed = DrafterConfig.from_json({**published(), "dflash_config": inner})
    assert mixed.layer_types == (SLIDING, FULL) and mixed.sliding_window == 9
    assert mixed.causal_layers == (True, False)


def test_the_window_is_the_servers() -> None:
    with pytest.raises(ValueError, match="sliding_window: expected at least block_size 8, found 7: servers apply"):
        DrafterConfig.from_json({**published(), "sliding_window": 7})


def test_both_spellings_of_rope_say_the_same() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = dataclasses.replace(DrafterConfig.from_json(published()), rope=rope_from_config({"rope_scaling": yarn}))
    written = config.to_json()
    assert written["rope_scaling"] == yarn and written["rope_parameters"] == {"rope_theta": 10000.0, **yarn}
    for spelling in ("rope_scaling", "rope_parameters"):
        assert DrafterConfig.from_json({**written, spelling: None}) == config
    with pytest.raises(ValueError, match="rope_scaling: expected what rope_parameters says, found .*: servers differ"):
        DrafterConfig.from_json({**written, "rope_scaling": {**yarn, "factor": 2.0}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["DFlash2DraftModel"]},
            "architectures: expected .*DFlashDraftModel.*found .*DFlash2DraftModel",
        ),
        ({"attention_bias": True}, "attention_bias: expected False, found True"),
        ({"projector_type": "domino"}, "projector_type: expected 'dflash', found 'domino'"),
        ({"final_logit_softcapping": 20.0}, "final_logit_softcapping: .*not reproduced"),
        ({"input_embedding_scale": 8.0}, "input_embedding_scale: expected 1.0, found 8.0"),
        ({"sample_from_anchor": True}, "sample_from_anchor: expected False, found True"),
        ({"draft_vocab_size": 100}, "draft_vocab_size: expected vocab_size 512, found 100"),
        ({"sliding_window": None}, "sliding_window: expected a positive window"),
        ({"layer_types": [FULL]}, "layer_types: expected 2 entries"),
        ({"layer_types": [FULL, "chunked_attention"]}, "layer_types: expected full_attention or sliding_attention"),
        ({"dflash_config": {"mask_token_id": 512, "target_layer_ids": [1]}}, "mask_token_id: expected 0 to 511"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 8]}},
            "target_layer_ids: expected numbers in 0..7",
        ),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [2, 1]}}, "target_layer_ids: expected ascending"),
        ({"dflash_config": {"mask_token_id": 1}}, "target_layer_ids: expected a list"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [None]}}, "target_layer_ids: expected a list"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1.5]}}, "target_layer_ids: expected a list"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a number, found 'small'"),
        ({"initializer_range": float("nan")}, "initializer_range: expected a number, found nan"),
        ({"hidden_size": None}, "hidden_size: expected an integer, found None"),
        ({"block_size": 1}, "block_size: expected at least 2"),
        ({"num_attention_heads": 0, "head_dim": None}, "head_dim|num_attention_heads: expected a positive integer"),
        ({"block_size": 10**30}, "block_size: expected an integer, found 1000"),
        ({"num_key_value_heads": 3}, "num_attention_heads: expected a multiple of num_key_value_heads 3"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope kind: expected one of default, yarn, found 'llama3'",
        ),
    ],
)
def test_refusals(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_json({**published(), **change})


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="drafter config: expected the file .*config.json, found none"):
        load_drafter_config(tmp_path)


@pytest.mark.parametrize("text", ["null", "[]", "3", '"x"', "[" * 100_000])
def test_a_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="expected (an object|JSON) in .*config.json, found"):
        load_drafter_config(tmp_path)


def test_default_target_layers_are_the_published_ones() -> None:
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_target_layer_ids(24, 5) == (1, 6, 11, 16, 21)
    assert default_target_layer_ids(9, 1) == (4,)
    with pytest.raises(ValueError, match="expected 1 to 3 taps for a target of 6 layers, found 5"):
        default_target_layer_ids(6, 5)


YARN = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 0.9},
]


@pytest.mark.parametrize("scaling", [None, *YARN])
def test_rope_equals_hugging_face(scaling: dict[str, object] | None) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    keys = {"rope_theta": 5000.0, "rope_scaling": scaling, "max_position_embeddings": 4096}
    hf = transformers.Qwen3Config(**{**keys, "rope_scaling": dict(scaling) if scaling else None, "head_dim": 32})
    module = Qwen3RotaryEmbedding(hf)
    rope = rope_from_config(keys)
    torch.testing.assert_close(rope_inv_freq(rope, 32), module.inv_freq, rtol=1e-6, atol=0)
    assert rope_attention_scaling(rope) == pytest.approx(module.attention_scaling, rel=1e-12)
    cos, sin = rope_cos_sin(torch.arange(50)[None], rope_inv_freq(rope, 32), rope_attention_scaling(rope))
    expected_cos, expected_sin = module(torch.zeros(1), torch.arange(50)[None])
    torch.testing.assert_close(cos, expected_cos)
    torch.testing.assert_close(sin, expected_sin)
    assert rope_from_config({**rope_to_config(rope), "max_position_embeddings": 4096}) == rope


def test_rope_depends_on_distance_only() -> None:
    inv_freq = rope_inv_freq(RopeConfig(), 16)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    scores = [
        float(
            apply_rope(q, *rope_cos_sin(torch.tensor(at + 5), inv_freq))
            @ apply_rope(k, *rope_cos_sin(torch.tensor(at), inv_freq))
        )
        for at in (0, 40)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_a_drafter_rotates_the_whole_head_whatever_its_target_does(spelling: str) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    for scaling in ({"rope_type": "default"}, yarn):
        whole = {"rope_theta": 1e7, spelling: scaling}
        expected = rope_from_config(whole)
        assert rope_of_drafter(whole) == expected
        assert rope_of_drafter({**whole, "partial_rotary_factor": 0.25}) == expected
        assert rope_of_drafter({**whole, spelling: {**scaling, "partial_rotary_factor": 0.25}}) == expected
        assert "partial_rotary_factor" not in str(rope_to_config(expected))


def test_rope_refusals() -> None:
    with pytest.raises(ValueError, match="partial_rotary_factor: expected 1.0, found 0.5"):
        rope_from_config({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})
    with pytest.raises(ValueError, match="original_max_position_embeddings: expected a number, found None"):
        rope_from_config({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    with pytest.raises(ValueError, match="head_dim: expected an even number, found 5"):
        rope_inv_freq(RopeConfig(), 5)
