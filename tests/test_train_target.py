"""Training the embedded target: the measure, the schedule, a tiny run, and what a run left in the repository."""

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from bench.train_target import TrainTargetConfig, bits_per_byte, is_loop, learning_rate, main, target_config
from engine.bytes_vocab import MASK_TOKEN_ID, VOCAB_SIZE, encode_bytes, encode_document
from engine.corpus import corpus_files, read_documents
from engine.target import Target, greedy_generate, load_target

EMBEDDED = Path(__file__).parent.parent / "engine" / "embedded"


def tiny() -> Target:
    return Target(target_config(TrainTargetConfig(hidden_size=16, layers=1)))


def test_bits_per_byte_counts_every_byte_once() -> None:
    target = tiny().requires_grad_(False)
    torch.nn.init.zeros_(target.model.embed_tokens.weight)
    documents = [bytes(range(200)), b"x", b""]
    for context in (7, 50, 1000):
        assert bits_per_byte(target, documents, context) == pytest.approx(math.log2(VOCAB_SIZE), rel=1e-5)
    # One window holds all of the only document: the mean of the model's own costs.
    torch.nn.init.normal_(target.model.embed_tokens.weight)
    tokens = encode_document(documents[0]).long()
    costs = torch.nn.functional.cross_entropy(target(tokens[None, :-1]).logits[0], tokens[1:])
    assert bits_per_byte(target, documents[:1], 1000) == pytest.approx(float(costs) / math.log(2), rel=1e-5)


def test_schedule_warms_up_and_ends_at_zero() -> None:
    settings = TrainTargetConfig(learning_rate=1.0, warmup_fraction=0.1)
    rates = [learning_rate(settings, step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[10] == 1.0 and rates[100] == pytest.approx(0.0)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_a_tiny_run_writes_a_loadable_target(tmp_path: Path) -> None:
    sizes = ["--hidden-size", "16", "--layers", "1", "--context", "32", "--windows", "4", "--max-files", "1"]
    result = CliRunner().invoke(main, ["--out", str(tmp_path), "--steps", "40", *sizes])
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] == 40 and record["tokens"] == 40 * 4 * 32 and record["settings"]["layers"] == 1
    assert record["curve"][-1]["training"] < record["curve"][0]["training"]
    assert str(tmp_path) not in (tmp_path / "training.json").read_text()
    target = load_target(tmp_path)
    held = read_documents(corpus_files("heldout")[:1])
    assert record["heldout_bits_per_byte"] == pytest.approx(bits_per_byte(target, held, 32), abs=1e-3)
    # So small a model may end the document at once; that is said, and the weights are there.
    assert result.exit_code == 0 or "greedy sample: expected a held-out prompt" in str(result.exception)


def test_loops_are_told_from_text() -> None:
    assert is_loop(list(b"of the name of the name of the name of the name of the name of the name"))
    assert not is_loop(list(b"def main(out: Path, max_files: int, **values: float) -> None: return load_target(out)"))


@pytest.mark.skipif(not EMBEDDED.is_dir(), reason="no embedded target")
def test_the_embedded_target_is_what_its_record_says() -> None:
    record = json.loads((EMBEDDED / "training.json").read_text())
    file = EMBEDDED / "model.safetensors"
    assert file.stat().st_size == record["file_bytes"] <= 4_000_000
    with safe_open(file, "pt") as handle:
        assert {handle.get_tensor(name).dtype for name in handle.keys()} == {torch.bfloat16}  # noqa: SIM118
    target = load_target(EMBEDDED)
    assert target.config.vocab_size > MASK_TOKEN_ID and target.config.num_hidden_layers >= 6
    prompt = encode_bytes(record["greedy_prompt"]["text"].encode()).long()
    assert bytes(greedy_generate(target, prompt, 200)) == (EMBEDDED / "greedy.txt").read_bytes()
    assert record["heldout_bits_per_byte"] <= 1.8
    # A part of this interpreter's held-out text: every eighth file, its first 2 KB.
    held = [text[:2048] for text in read_documents(corpus_files("heldout"))[::8]]
    assert bits_per_byte(target, held, target.config.max_position_embeddings) <= 1.8
