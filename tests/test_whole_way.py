"""The whole way, by its commands: extract, train, export; then a server's decoding, written with transformers alone."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.bytes_vocab import BOS_TOKEN_ID, VOCAB_SIZE
from engine.cli import cli
from engine.cli import run as run_command
from engine.corpus import corpus_files
from engine.decode import drafter_for, speculative_generate
from engine.demo import EMBEDDED_TARGET
from engine.export import load_drafter
from engine.target import load_target

pytest.importorskip("transformers")
import transformers

from tests.served_drafter import ServedDrafter

pytestmark = pytest.mark.usefixtures("one_thread")

# A sample of 255 bytes and the token that opens a document fill a bucket of 256.
SAMPLE, SAMPLES, PROMPT, NEW_TOKENS = 255, 64, 120, 48


def command(*words: object) -> None:
    assert run_command(cli, [str(word) for word in words]) == 0


def texts(split: str, count: int, length: int) -> list[str]:
    """The beginnings of this many files of Python's library."""
    found = (path.read_bytes()[:length].decode("ascii", "ignore") for path in corpus_files(split))
    return [text for text in found if len(text) == length][:count]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of two layers, trained for a few steps on what `data extract` wrote, in the servers' layout."""
    folder = tmp_path_factory.mktemp("whole-way")
    for name, split, count in (("train", "train", SAMPLES), ("held-out", "heldout", 6)):
        lines = [json.dumps({"id": str(i), "text": text}) for i, text in enumerate(texts(split, count, SAMPLE))]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        options = ("--tokenizer", "bytes", "--num-taps", 3, "--device", "cpu")
        paths = ("--data", folder / f"{name}.jsonl", "--out", folder / name)
        command("data", "extract", "--target", EMBEDDED_TARGET, *paths, *options)
    changes = {
        "data.path": folder / "train",
        "data.eval_path": folder / "held-out",
        "model.num_hidden_layers": 2,
        "model.layer_types": "sliding,full",
        "model.sliding_window": 64,
        "model.block_size": 8,
        "buckets.num_anchors": 32,
        "buckets.max_rows": 4,
        "optimizer.lr": 2e-3,
        "run.output": folder / "run",
        "run.epochs": 100,
        "run.max_steps": 48,
        "run.device": "cpu",
        "run.eval_every": 24,
    }
    command("train", *(word for name, value in changes.items() for word in ("--set", f"{name}={value}")))
    command("export", folder / "run", folder / "served")
    return folder / "served"


def served_text(target: Any, served: ServedDrafter, prompt: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Greedy speculative decoding of `count` tokens: text, and what each verification accepted."""
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight

    def look(ids: Sequence[int]) -> tuple[list[int], Tensor]:
        """The target's next token after every token, and the taps: its hidden states behind the drafter's layers."""
        out = target(torch.tensor([ids]), output_hidden_states=True)
        taps = [out.hidden_states[i + 1][0] for i in served.target_layer_ids]
        return out.logits[0].argmax(-1).tolist(), torch.cat(taps, dim=-1)

    served.forget()
    wanted, taps = look(prompt)
    text, accepted = [*prompt, wanted[-1]], []
    while len(text) - len(prompt) < count:
        # The last token is the anchor: what the target thinks of it is not known yet.
        served.accept(taps[served.length : len(text) - 1])
        hidden = served.draft(embedding[text[-1]], embedding[served.mask_token_id])
        drafts = (hidden[1:] @ head.T).argmax(-1).tolist()
        wanted, taps = look([*text, *drafts])
        wanted = wanted[len(text) - 1 :]
        matches = next((i for i, draft in enumerate(drafts) if draft != wanted[i]), len(drafts))
        text += wanted[: matches + 1]
        accepted.append(matches + 1)
    return text[len(prompt) : len(prompt) + count], accepted


def test_extracted_trained_exported_and_decoded_losslessly(exported: Path) -> None:
    """The text is what transformers generates without a drafter, and our own decoding accepts what the server accepts."""
    target = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32).eval()
    served = ServedDrafter(exported)
    ours = load_target(EMBEDDED_TARGET, torch.device("cpu"), torch.float32)
    ours.config = dataclasses.replace(ours.config, eos_token_id=None)
    drafter = drafter_for(*load_drafter(exported), ours)
    verifications, tokens = 0, 0
    for prompt_text in texts("heldout", 3, PROMPT):
        prompt = [BOS_TOKEN_ID, *prompt_text.encode()]
        with torch.inference_mode():
            text, accepted = served_text(target, served, prompt, NEW_TOKENS)
            plain = target.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :]
        assert text == plain.tolist()
        decoded = speculative_generate(ours, drafter, torch.tensor(prompt), NEW_TOKENS)
        assert list(decoded.tokens) == text and list(decoded.accept_lengths) == accepted
        verifications += len(accepted)
        tokens += sum(accepted)
    # A few steps make a poor drafter, but not one that is always wrong.
    assert tokens > verifications


def test_the_drafter_learned(exported: Path) -> None:
    """The held-out loss is far below that of a guess among all tokens."""
    lines = [json.loads(line) for line in (exported.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert losses[-1] < 0.8 * math.log(VOCAB_SIZE)
