"""What a server computes from an exported drafter is what the engine trained: hidden states, block by block, and drafts."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from buffers.shapes import Bucket
from engine.checkpoint import save_drafter
from engine.decode import DraftCache, Drafter, draft_block
from engine.drafter_config import FULL, SLIDING, DrafterConfig
from engine.export import export_drafter, load_drafter
from engine.params import ParamArena
from engine.rope import RopeConfig
from tests.drafter_helpers import (
    CPU,
    make_batch,
    objective,
    random_sample,
    random_target,
    random_weights,
    small_config,
    step_with,
)

pytest.importorskip("transformers")
from tests.served_drafter import ServedDrafter

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = Path(__file__).parent / "golden"
YARN = RopeConfig(kind="yarn", theta=5000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=16.0)
KINDS: dict[str, dict[str, Any]] = {
    "full": {"layer_types": (FULL, FULL), "sliding_window": None},
    "sliding": {"layer_types": (SLIDING, SLIDING)},
    "mixed": {"layer_types": (SLIDING, FULL)},
    "full, causal": {"layer_types": (FULL, FULL), "sliding_window": None, "causal_layers": (True, True)},
    "sliding, not causal": {"layer_types": (SLIDING, SLIDING), "causal_layers": (False, False)},
    "mixed, not causal": {"layer_types": (SLIDING, FULL), "causal_layers": (False, False)},
    "window of one block": {"layer_types": (SLIDING, FULL), "sliding_window": 4},
    "yarn": {"layer_types": (SLIDING, FULL), "rope": YARN},
    "yarn with every number": {
        "layer_types": (FULL, FULL),
        "sliding_window": None,
        "rope": dataclasses.replace(YARN, attention_factor=0.9, beta_slow=2.0, truncate=False),
    },
}


def exported(config: DrafterConfig, folder: Path, layout: str = "z-lab") -> Path:
    """Random weights, saved as training saves them and exported."""
    save_drafter(folder / "saved", config, random_weights(config))
    verifier = "the-target" if layout == "speculators" else ""
    export_drafter(folder / "saved", folder / "served", layout=layout, verifier=verifier)
    return folder / "served"


def trained_blocks(
    config: DrafterConfig, weights: dict[str, Tensor], batch: dict[str, Tensor], bucket: Bucket
) -> Tensor:
    """Hidden states of slots 1..K-1 of every block in one training forward pass: [B, N, K - 1, D]."""
    params = ParamArena(config, CPU, dtype=torch.float32, grad_dtype=torch.float32)
    params.load_(weights)
    positions = bucket.S + bucket.K
    step = step_with(config, params, random_target(config), objective(), max_positions=positions)
    return step.parts.drafter(batch).detach()


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_blocks_of_training_are_the_servers(kind: str, layout: str, tmp_path: Path) -> None:
    """Two rows of a batch against two sequences that grow from anchor to anchor, each block drafted on the way."""
    config = small_config(**KINDS[kind])
    if layout == "speculators" and kind == "full, causal":
        with pytest.raises(ValueError, match="full layers that are not causal .* speculators cannot say that"):
            exported(config, tmp_path, layout)
        return
    folder = exported(config, tmp_path, layout)
    served, embedding = ServedDrafter(folder), random_target(config).embed_tokens
    bucket = Bucket(B=2, S=128, N=32, K=4)
    samples = [random_sample(config, length, seed) for seed, length in enumerate((61, 90))]
    batch = make_batch(config, bucket, samples)
    weights = {name: tensor.float() for name, tensor in load_drafter(folder)[1].items()}
    found = trained_blocks(config, weights, dict(batch), bucket)
    compared = 0
    for b, sample in enumerate(samples):
        served.forget()
        for n in batch["block_keep_mask"][b].nonzero().flatten().tolist():
            anchor = int(batch["anchor_positions"][b, n])
            served.accept(sample.hidden_states[served.length : anchor])
            hidden = served.draft(embedding[sample.input_ids[anchor]], embedding[config.mask_token_id])
            torch.testing.assert_close(found[b, n], hidden[1:], rtol=1e-5, atol=2e-5)
            compared += 1
    assert compared == 64


def test_one_call_for_the_whole_context_is_many_small_ones(tmp_path: Path) -> None:
    config = small_config()
    served, embedding = ServedDrafter(exported(config, tmp_path)), random_target(config).embed_tokens
    taps = random_sample(config, 50, seed=3).hidden_states
    served.accept(taps)
    at_once = served.draft(embedding[7], embedding[config.mask_token_id])
    served.forget()
    for part in taps.split([20, 1, 3, 1, 8, 17]):
        served.accept(part)
        served.draft(embedding[9], embedding[config.mask_token_id])
    torch.testing.assert_close(served.draft(embedding[7], embedding[config.mask_token_id]), at_once)


@pytest.mark.parametrize("kind", ["full", "mixed", "sliding, not causal", "yarn"])
def test_our_own_decoding_drafts_the_servers_tokens(kind: str, tmp_path: Path) -> None:
    config, target = small_config(**KINDS[kind]), random_target(small_config())
    folder = exported(config, tmp_path)
    served = ServedDrafter(folder)
    weights = {name: tensor.float() for name, tensor in load_drafter(folder)[1].items()}
    drafter = Drafter(config, weights, target.embed_tokens, target.lm_head)
    cache, sample = DraftCache(drafter, capacity=80), random_sample(config, 80, seed=5)
    for start in (17, 18, 22, 40, 41, 77):
        taps = sample.hidden_states[cache.length : start]
        hidden, _ = draft_block(drafter, cache, taps, int(sample.input_ids[start]), start)
        served.accept(taps)
        expected = served.draft(target.embed_tokens[sample.input_ids[start]], target.embed_tokens[config.mask_token_id])
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=2e-5)
        drafts, servers = ((states[1:] @ target.lm_head.T).argmax(-1) for states in (hidden, expected))
        assert drafts.tolist() == servers.tolist()


def test_the_reference_drafts_the_golden_blocks(tmp_path: Path) -> None:
    """z-lab's own model with a growing cache: the reference itself is held to it."""
    shutil.copy(GOLDEN / "dflash-full" / "config.json", tmp_path / "config.json")
    shutil.copy(GOLDEN / "dflash-full" / "weights.safetensors", tmp_path / "model.safetensors")
    served = ServedDrafter(tmp_path)
    frozen = load_file(GOLDEN / "dflash-full" / "target.safetensors")
    embedding, head = frozen["embed_tokens.weight"], frozen["lm_head.weight"]
    inputs = load_file(GOLDEN / "inference-cache" / "inputs.safetensors")
    outputs = load_file(GOLDEN / "inference-cache" / "outputs.safetensors")
    for i, start in enumerate(inputs["starts"].tolist()):
        served.accept(inputs["hidden_states"][0, served.length : start])
        hidden = served.draft(embedding[inputs["input_ids"][0, start]], embedding[served.mask_token_id])
        torch.testing.assert_close(hidden[None], outputs[f"step{i}.draft_hidden"], rtol=0, atol=1e-5)
        assert (hidden[1:] @ head.T).argmax(-1).tolist() == outputs[f"step{i}.draft_ids"][0].tolist()


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)])
def test_a_flag_that_is_not_there_would_be_noticed(layer_types: tuple[str, ...], tmp_path: Path) -> None:
    """The comparison sees what it is for: another causality changes the hidden states."""
    config = small_config(layer_types=layer_types, sliding_window=12 if SLIDING in layer_types else None)
    folder = exported(config, tmp_path)
    embedding = random_target(config).embed_tokens
    taps = random_sample(config, 30, seed=4).hidden_states
    drafts = []
    written = json.loads((folder / "config.json").read_text())
    for is_causal in (False, True):
        (folder / "config.json").write_text(json.dumps(written | {"is_causal": is_causal}))
        served = ServedDrafter(folder)
        served.accept(taps)
        drafts.append(served.draft(embedding[7], embedding[config.mask_token_id]))
    assert (drafts[0] - drafts[1])[1:].abs().max() > 0.01
