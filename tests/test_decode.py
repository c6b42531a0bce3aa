"""Speculative decoding: z-lab's own drafts, and the target's own text whatever the drafter says."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from engine.acceptance import choose
from engine.decode import (
    Decoded,
    DraftCache,
    Drafter,
    block_mask,
    draft_block,
    drafter_for,
    speculative_generate,
)
from engine.drafter_config import FULL, SLIDING, DrafterConfig, load_drafter_config
from engine.target import Target, greedy_generate
from engine.target_config import TargetConfig
from tests.test_target import random_target

GOLDEN = Path(__file__).parent / "golden"


def golden_drafter(case: str) -> Drafter:
    folder = GOLDEN / case
    frozen = load_file(folder / "target.safetensors")
    weights = load_file(folder / "weights.safetensors")
    return Drafter(load_drafter_config(folder), weights, frozen["embed_tokens.weight"], frozen["lm_head.weight"])


def test_golden_blocks_with_a_growing_cache() -> None:
    drafter = golden_drafter("dflash-full")
    inputs = load_file(GOLDEN / "inference-cache" / "inputs.safetensors")
    outputs = load_file(GOLDEN / "inference-cache" / "outputs.safetensors")
    cache = DraftCache(drafter, capacity=64)
    for i, start in enumerate(inputs["starts"].tolist()):
        taps = inputs["hidden_states"][0, cache.length : start]
        hidden, logits = draft_block(drafter, cache, taps, int(inputs["input_ids"][0, start]), start)
        torch.testing.assert_close(hidden[None], outputs[f"step{i}.draft_hidden"], rtol=0, atol=1e-5)
        assert logits.argmax(-1).tolist() == outputs[f"step{i}.draft_ids"][0].tolist()


@pytest.mark.parametrize("case", ["dflash-full", "dflash-sliding"])
def test_golden_training_blocks(case: str) -> None:
    """A block decoded with the cache is the block of the training forward pass, sliding layers included."""
    drafter, K = golden_drafter(case), load_drafter_config(GOLDEN / case).block_size
    inputs, outputs = (load_file(GOLDEN / case / f"{name}.safetensors") for name in ("inputs", "outputs"))
    rows, slots = inputs["block_keep_mask"].nonzero(as_tuple=True)
    for b, n in zip(rows.tolist(), slots.tolist(), strict=True):
        start = int(inputs["anchor_positions"][b, n])
        taps, anchor = inputs["hidden_states"][b, :start], int(inputs["input_ids"][b, start])
        hidden, _ = draft_block(drafter, DraftCache(drafter, capacity=start), taps, anchor, start)
        torch.testing.assert_close(hidden, outputs["draft_hidden"][b, n * K : (n + 1) * K], rtol=1e-5, atol=1e-5)


def drafter_config(target: TargetConfig, **changes: object) -> DrafterConfig:
    config = DrafterConfig(
        block_size=5,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=(0, 2),
        num_target_layers=target.num_hidden_layers,
        hidden_size=target.hidden_size,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=target.vocab_size,
        layer_types=(SLIDING, FULL),
        sliding_window=6,
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def random_weights(config: DrafterConfig) -> dict[str, Tensor]:
    D, inner = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes: dict[str, tuple[int, ...]] = {"fc": (D, config.num_taps * D), "hidden_norm": (D,), "norm": (D,)}
    for i in range(config.num_hidden_layers):
        attention = {"q_proj": (queries, D), "k_proj": (keys, D), "v_proj": (keys, D), "o_proj": (D, queries)}
        attention |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}  # type: ignore[dict-item]
        shapes |= {f"layers.{i}.self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {
            f"layers.{i}.mlp.{name}": shape for name, shape in (("gate_proj", (inner, D)), ("up_proj", (inner, D)))
        }
        shapes |= {f"layers.{i}.mlp.down_proj": (D, inner)}
        shapes |= {f"layers.{i}.{name}": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"{name}.weight": torch.randn(shape) * 0.2 + (len(shape) == 1) for name, shape in shapes.items()}


def decode(target: Target, prompt: Tensor, count: int, **changes: object) -> Decoded:
    config = drafter_config(target.config, **changes)
    return speculative_generate(target, drafter_for(config, random_weights(config), target), prompt, count)


@pytest.mark.parametrize("prompt_length", [1, 7])
def test_text_is_the_targets_greedy_text_whatever_is_drafted(prompt_length: int) -> None:
    target = random_target()
    prompt = torch.randint(0, 49, (prompt_length,))
    decoded = decode(target, prompt, 60)
    assert list(decoded.tokens) == greedy_generate(target, prompt, 60) and decoded.near_ties == ()
    # The first token comes from the prompt; the last verification may run past the end.
    assert 59 <= sum(decoded.accept_lengths) < 59 + 5 and min(decoded.accept_lengths) >= 1


class Foretold:
    """Drafts the true text but for every third token, so prefixes of all lengths are accepted and rolled back."""

    def __init__(self, text: list[int], start: int) -> None:
        self.text, self.start = text, start

    def __call__(
        self, drafter: Drafter, cache: DraftCache, taps: Tensor, anchor: int, position: int
    ) -> tuple[Tensor, Tensor]:
        cache.length += taps.shape[0]
        assert cache.length == position, "taps of every accepted token, once"
        first = position - self.start + 1
        assert anchor == self.text[first - 1]
        drafts = [(t + 1) % 49 if (first + i) % 7 == 3 else t for i, t in enumerate(self.text[first : first + 4])]
        return taps, F.one_hot(torch.tensor(drafts), 50).float()


def test_partly_right_drafts_are_kept_up_to_the_first_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target()
    prompt = torch.randint(0, 49, (9,))
    text = greedy_generate(target, prompt, 80)
    monkeypatch.setattr("engine.decode.draft_block", Foretold(text, start=9))
    decoded = decode(target, prompt, 40)
    assert list(decoded.tokens) == text[:40]
    assert set(decoded.accept_lengths) >= {3, 5} and sum(decoded.accept_lengths) >= 39


def test_the_target_cache_after_a_rollback_holds_the_accepted_text(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target()
    prompt = torch.randint(0, 49, (9,))
    text = greedy_generate(target, prompt, 80)
    monkeypatch.setattr("engine.decode.draft_block", Foretold(text, start=9))
    caches = []
    new_cache = target.new_cache

    def watched(capacity: int) -> object:
        caches.append(new_cache(capacity))
        return caches[0]

    monkeypatch.setattr(target, "new_cache", watched)
    decode(target, prompt, 40)
    length = caches[0].length
    expected = new_cache(length)
    target(torch.tensor([prompt.tolist() + text])[:, :length], cache=expected)
    torch.testing.assert_close(caches[0].keys[..., :length, :], expected.keys, rtol=1e-4, atol=1e-4)


def test_end_of_text_stops_both_ways() -> None:
    target = random_target()
    prompt = torch.randint(0, 49, (5,))
    text = greedy_generate(target, prompt, 30)
    target.config = dataclasses.replace(target.config, eos_token_id=text[10])
    expected = text[: text.index(text[10]) + 1]
    assert greedy_generate(target, prompt, 30) == expected
    assert list(decode(target, prompt, 30).tokens) == expected


def test_near_ties_are_counted_and_argmax_decides() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0], [3.0, 1.0, 2.0], [1.0, 0.0, 1.00005], [1.0, 0.0, 1.0002]])
    assert choose(logits) == ([1, 0, 2, 2], [0, 2])


def test_block_mask_of_sliding_and_causal_layers() -> None:
    config = drafter_config(random_target().config, sliding_window=5)
    mask = block_mask(config, 0, 6, torch.device("cpu"))
    assert mask is not None
    for k in range(5):
        # Context >= a + k - (W - 1) with a = 6 and W = 5, then the block up to the slot itself.
        assert mask[k].nonzero().flatten().tolist() == [c for c in range(6) if c >= 2 + k] + [
            6 + j for j in range(k + 1)
        ]
    assert block_mask(config, 1, 6, torch.device("cpu")) is None
    free = dataclasses.replace(config, causal_layers=(False, True))
    assert bool(block_mask(free, 0, 6, torch.device("cpu"))[:, 6:].all())  # type: ignore[index]
    assert bool(block_mask(free, 1, 6, torch.device("cpu"))[:, :6].all())  # type: ignore[index]


def test_messages() -> None:
    target = random_target()
    config = drafter_config(target.config)
    weights = random_weights(config)
    with pytest.raises(
        ValueError, match=r"drafter: expected a target of hidden size, vocabulary and layers \(32, 50, 9\)"
    ):
        drafter_for(dataclasses.replace(config, num_target_layers=9), weights, target)
    drafter = drafter_for(config, weights, target)
    with pytest.raises(ValueError, match="draft cache: expected at most 3 positions, found 4"):
        draft_block(drafter, DraftCache(drafter, 3), torch.zeros(4, 64), 0, 4)
    with pytest.raises(ValueError, match="expected the anchor right after 2 context tokens, found position 3"):
        draft_block(drafter, DraftCache(drafter, 3), torch.zeros(2, 64), 0, 3)
