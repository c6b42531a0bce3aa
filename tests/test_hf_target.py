"""Models of transformers as targets: their residual stream, and what is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.hf_target import HfTarget, hf_target
from tests.hf_helpers import SIZES, tiny_model

KINDS = ("qwen3", "llama", "qwen3-moe", "qwen3-next", "falcon-h1")


def target_of(model: Any) -> HfTarget:
    return hf_target(model, "tiny", model.config.to_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_are_those_of_a_plain_forward_pass(kind: str) -> None:
    model = tiny_model(kind)
    target = target_of(model)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 30), generator=torch.Generator().manual_seed(1))
    layer_ids = [4, 0, 5]
    found = target.residuals(ids, None, layer_ids)
    with torch.inference_mode():
        plain = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    for layer, states in zip(layer_ids[:2], found[:2], strict=True):
        assert torch.equal(states, plain.hidden_states[layer + 1])
    # transformers hands out the last layer's states normed: ours are not, and become them through the norm.
    assert not torch.allclose(found[2], plain.hidden_states[6], atol=0.1)
    assert torch.equal(target.norm(found[2]), plain.hidden_states[6])
    # What a drafter is given of the target makes the target's own logits.
    embed, head, factor = target.stored_tensors()
    eps = target.config.get("rms_norm_eps", 1e-6)
    normed = found[2] * torch.rsqrt(found[2].square().mean(-1, keepdim=True) + eps) * factor
    torch.testing.assert_close(normed @ (embed if head is None else head).T, plain.logits, rtol=1e-4, atol=1e-4)
    assert (head is None) == (kind == "llama")


@pytest.mark.parametrize("kind", KINDS)
def test_padding_never_matters(kind: str) -> None:
    target = target_of(tiny_model(kind))
    ids = torch.randint(0, SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    first, other = ids.clone(), ids.clone()
    first[1, 17:], other[1, 17:] = 0, 5
    found = [target.residuals(rows, mask, [2, 5]) for rows in (first, other)]
    alone = target.residuals(ids[1:, :17], None, [2, 5])
    for a, b, c in zip(*found, alone, strict=True):
        assert torch.equal(a[1, :17], b[1, :17])
        torch.testing.assert_close(a[1, :17], c[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gemma", "model_type gemma scales its embedding"),
        ("gemma2", "model_type gemma2 scales its embedding; final_logit_softcapping 30.0"),
        ("gemma3", "model_type gemma3_text scales its embedding"),
        ("granite", "embedding_multiplier 3.0"),
        ("gpt-neox", "tiny: expected a final RMSNorm with factor w or 1 \\+ w and eps 1e-06, found LayerNorm"),
    ],
)
def test_what_is_not_reproduced_is_refused_by_name(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        target_of(tiny_model(kind))


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 4


def scale_embedding(model: Any) -> None:
    scaled = Scaled(*model.model.embed_tokens.weight.shape)
    scaled.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = scaled


def cap_logits(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output.tanh())


def other_eps(model: Any) -> None:
    model.model.norm.variance_epsilon = 1e-5


def add_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.zeros(SIZES["vocab_size"]))


def two_norms(model: Any) -> None:
    model.model.other_norm = nn.RMSNorm(SIZES["hidden_size"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scale_embedding, "expected the first layer to see the embedding's rows, found something 4 times as large"),
        (cap_logits, "expected logits of the final norm and the head alone"),
        (other_eps, "eps 1e-06, found Qwen3RMSNorm, which differs"),
        (add_bias, "expected a head without bias, found one in Qwen3ForCausalLM"),
        (two_norms, "one final norm, embedding and head, found embed_tokens, layers, norm, rotary_emb, other_norm"),
    ],
)
def test_a_model_that_does_otherwise_than_its_config_says_is_found_out(
    change: Callable[[Any], None], message: str
) -> None:
    model = tiny_model("qwen3")
    config = model.config.to_dict()
    change(model)
    with pytest.raises(ValueError, match=message):
        hf_target(model, "tiny", config)


def test_sizes_that_the_config_leaves_out_are_filled_in() -> None:
    model = tiny_model("qwen3")
    raw = {
        key: value for key, value in model.config.to_dict().items() if key not in ("head_dim", "num_key_value_heads")
    }
    config = hf_target(model, "tiny", raw).config
    assert (config["head_dim"], config["num_key_value_heads"]) == (8, 1)
    nested = hf_target(model, "tiny", {"model_type": "outer", "text_config": raw}).config
    assert nested["text_config"]["head_dim"] == 8 and "head_dim" not in nested
