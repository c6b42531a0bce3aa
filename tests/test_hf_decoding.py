"""transformers models as decoding targets: what they hand out, what their cache forgets, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.decode import drafter_for, plain_generate, speculative_generate
from engine.hf_decoding import HFDecodingTarget, load_decoding_target, refuse_uncroppable
from engine.hf_target import hf_target
from tests.test_decode import drafter_config, random_weights

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen3 with sliding layers": ("Qwen3", SLIDING),
    "mistral, all layers sliding": ("Mistral", {"sliding_window": 7}),
    "qwen3 mixture of experts": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}


def random_model(kind: str, **changes: Any) -> Any:
    name, own = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES | own | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in key else 0.0, std=0.3)
    return model


def decoding(model: Any) -> HFDecodingTarget:
    return HFDecodingTarget(hf_target(model, "tiny", model.config.to_dict()))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_and_rollbacks_equal_the_whole(kind: str) -> None:
    """Beyond the window of the sliding layers too, where a cache that drops what has left it could not go back."""
    model = random_model(kind)
    target = decoding(model)
    ids = torch.randint(0, 50, (30,))
    whole = model(ids[None], output_hidden_states=True)
    cache = target.new_cache(64)
    target.extend(ids[:12], cache)
    target.extend(49 - ids[12:20], cache)
    cache.rollback(13)
    cache.rollback(12)
    assert cache.length == 12
    first = target.extend(ids[12:17], cache, (0, 2))
    target.extend(49 - ids[17:22], cache)
    cache.rollback(17)
    second = target.extend(ids[17:], cache, (0, 2))
    logits = torch.cat((first.logits, second.logits), dim=1)
    torch.testing.assert_close(logits, whole.logits[:, 12:], rtol=1e-4, atol=1e-4)
    taps = torch.cat((first.taps, second.taps), dim=1)
    expected = torch.cat((whole.hidden_states[1], whole.hidden_states[3]), dim=-1)[:, 12:]
    torch.testing.assert_close(taps, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"cache rollback: expected a length in 0\.\.30, found 31"):
        cache.rollback(31)


def test_the_last_layers_tap_is_not_normed() -> None:
    model = random_model("qwen3")
    target = decoding(model)
    step = target.extend(torch.arange(5), target.new_cache(8), (3,), last_only=True)
    normed = model.model.norm(step.taps[:, -1:])
    torch.testing.assert_close(model.lm_head(normed), step.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_the_models_own(kind: str) -> None:
    model = random_model(kind)
    target = decoding(model)
    prompt = torch.randint(0, 49, (9,))
    config = drafter_config(SizesOf(target))  # type: ignore[arg-type]
    decoded = speculative_generate(target, drafter_for(config, random_weights(config), target), prompt, 40)
    # Without a mask, generate() takes tokens 0 of the prompt for padding.
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    own = model.generate(prompt[None], attention_mask=torch.ones(1, 9), **options)[0, 9:].tolist()
    assert list(decoded.tokens) == own and decoded.near_ties == ()
    assert plain_generate(target, prompt, 40).tokens == decoded.tokens


class SizesOf:
    """A target's sizes where a config is asked for."""

    def __init__(self, target: HFDecodingTarget) -> None:
        self.hidden_size, self.vocab_size, self.num_hidden_layers = target.sizes


def test_any_of_several_tokens_ends_the_text() -> None:
    model = random_model("qwen3")
    text = plain_generate(decoding(model), torch.arange(9), 30).tokens
    assert len(text) == 30
    model.generation_config.eos_token_id = [text[20], text[12]]
    ended = plain_generate(decoding(model), torch.arange(9), 30).tokens
    assert ended == text[: min(text.index(text[20]), text.index(text[12])) + 1]


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "FalconH1", "Qwen3Next", "Jamba", "MiniMax", "RecurrentGemma"])
def test_recurrent_state_is_refused_by_name_before_weights_are_read(name: str) -> None:
    config = getattr(transformers, f"{name}Config")()
    message = (
        f"target {config.model_type}: expected full or sliding attention, whose cache can be cropped .* found layers"
    )
    with pytest.raises(ValueError, match=message):
        refuse_uncroppable(config)


def test_a_stateful_class_is_refused_even_if_its_config_does_not_say() -> None:
    with pytest.raises(ValueError, match="target rwkv: .* found a recurrent state in RwkvForCausalLM. Train for"):
        refuse_uncroppable(transformers.RwkvConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))


def test_caches_of_other_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="target llama4_text: .* found layers of kind chunked_attention"):
        refuse_uncroppable(transformers.Llama4TextConfig(num_hidden_layers=4))
    with pytest.raises(ValueError, match="target gemma3n_text: .* found a cache of DummyLayer"):
        refuse_uncroppable(transformers.Gemma3nTextConfig())


def test_what_cannot_be_asked_of_a_target() -> None:
    target = decoding(random_model("qwen3"))
    with pytest.raises(
        ValueError, match=r"in 256 positions \(max_position_embeddings\), found 257. Shorten the prompt"
    ):
        target.new_cache(257)
    with pytest.raises(ValueError, match=r"target_layer_ids: expected numbers in 0\.\.3, found \[4\]"):
        target.extend(torch.arange(3), target.new_cache(8), (1, 4))


def test_a_saved_model_is_loaded_and_another_folder_is_not(tmp_path: Path) -> None:
    model = random_model("llama")
    model.save_pretrained(tmp_path / "model")
    target = load_decoding_target(str(tmp_path / "model"), torch.device("cpu"), torch.float32)
    assert target.sizes == (32, 50, 4) and torch.equal(target.embedding, model.get_input_embeddings().weight)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: expected a folder or hub id .* found no readable config.json"):
        load_decoding_target(str(tmp_path / "empty"), torch.device("cpu"), torch.float32)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model: expected a folder or hub id .* found none"):
        load_decoding_target(str(tmp_path / "model"), torch.device("cpu"), torch.float32)
