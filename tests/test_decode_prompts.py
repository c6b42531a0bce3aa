"""Decoding measured from the command line: any transformers model and the embedded one, their own text, and the figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from engine import demo
from engine.bytes_vocab import MASK_TOKEN_ID
from engine.checkpoint import save_drafter
from engine.decode import Decoded
from engine.decode_prompts import against_own_text
from engine.drafter_config import DrafterConfig
from engine.params import initial_parameters

pytestmark = pytest.mark.usefixtures("one_thread")


def save_new_drafter(folder: Path, **changes: Any) -> Path:
    sizes: dict[str, Any] = {
        "block_size": 4,
        "mask_token_id": 49,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 50,
        "layer_types": ("full_attention",),
    }
    config = DrafterConfig(**sizes | changes)
    save_drafter(folder, config, initial_parameters(config, seed=0))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from tests.test_hf_decoding import random_model

    folder = tmp_path_factory.mktemp("target")
    random_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [7]}\n')
    return path


def decoding(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    assert main(["eval", *map(str, args), "--set", "run.device=cpu", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_greedy_decoding_of_a_transformers_model(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = save_new_drafter(tmp_path / "drafter")
    picture = tmp_path / "out.png"
    options = ("--target", model, "--prompts", prompts, "--max-new-tokens", 24, "--plot", picture)
    figures = decoding(capsys, drafter, *options)
    found = figures["decoding"]
    assert (found["differing_tokens"], found["near_tie_differences"], found["near_ties"]) == (0, 0, 0)
    assert (found["prompts"], found["texts"], found["new_tokens"], found["target"]) == (2, 2, 48, str(model))
    histogram = found["acceptance_histogram"]
    assert len(histogram) == 4 and sum(histogram) == found["verifications"]
    accepted = sum((n + 1) * count for n, count in enumerate(histogram))
    assert found["tokens_per_verification"] == accepted / found["verifications"]
    # The first token of a text comes with its prompt; the last verification may run past the end.
    assert 2 * 23 <= accepted < 2 * (23 + 4)
    assert found["speedup"] > 0 and "tokens_per_s" not in found
    assert picture.read_bytes().startswith(b"\x89PNG") and figures["plot"] == str(picture)


def test_a_drafter_in_speculators_layout_decodes_the_same(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config.json may leave the target's layers unsaid: the target says."""
    drafter, other = save_new_drafter(tmp_path / "drafter"), tmp_path / "speculators"
    assert main(["export", str(drafter), str(other), "--layout", "speculators", "--verifier", str(model)]) == 0
    described = json.loads((other / "config.json").read_text())
    del described["transformer_layer_config"]["num_target_layers"]
    (other / "config.json").write_text(json.dumps(described))
    options = ("--target", model, "--prompts", prompts, "--max-new-tokens", 12)
    once, again = (decoding(capsys, folder, *options)["decoding"] for folder in (drafter, other))
    assert once["acceptance_histogram"] == again["acceptance_histogram"]


def test_sampled_decoding_draws_by_its_seed(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = save_new_drafter(tmp_path / "drafter")
    options = (drafter, "--target", model, "--prompts", prompts, "--max-new-tokens", 12, "--temperature", 1.5)
    once, again, other = (decoding(capsys, *options, "--samples", 3, "--seed", seed)["decoding"] for seed in (1, 1, 2))
    assert (once["texts"], once["prompts"], once["temperature"]) == (6, 2, 1.5)
    assert "differing_tokens" not in once
    assert once["acceptance_histogram"] == again["acceptance_histogram"] != other["acceptance_histogram"]


def test_the_embedded_target_has_prompts_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PROMPTS", 1)
    monkeypatch.setattr(demo, "PROMPT_TOKENS", 64)
    embedded = {"hidden_size": 192, "vocab_size": 264, "num_target_layers": 6, "mask_token_id": MASK_TOKEN_ID}
    drafter = save_new_drafter(tmp_path / "drafter", **embedded)
    (tmp_path / "prompts.txt").write_text("def main(\nimport os\n")
    held_out = decoding(capsys, drafter, "--target", "embedded", "--max-new-tokens", 6)["decoding"]
    own = decoding(
        capsys, drafter, "--target", "embedded", "--max-new-tokens", 6, "--prompts", tmp_path / "prompts.txt"
    )
    assert (held_out["texts"], own["decoding"]["texts"]) == (1, 2)
    assert held_out["differing_tokens"] == own["decoding"]["differing_tokens"] == 0
    assert held_out["tokens_per_verification"] >= 1


def test_the_embedded_target_is_the_same_through_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    embedded = {"hidden_size": 192, "vocab_size": 264, "num_target_layers": 6, "mask_token_id": MASK_TOKEN_ID}
    drafter = save_new_drafter(tmp_path / "drafter", **embedded)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"input_ids": list(b"    def __init__(self, name")}))
    options = ("--max-new-tokens", 16, "--prompts", tmp_path / "prompts.jsonl")
    ours, theirs = (decoding(capsys, drafter, "--target", t, *options) for t in ("embedded", demo.EMBEDDED_TARGET))
    for name in ("acceptance_histogram", "differing_tokens", "near_ties", "new_tokens"):
        assert ours["decoding"][name] == theirs["decoding"][name]


def test_differences_are_counted_up_to_a_tie_that_both_see() -> None:
    def text(tokens: str, *ties: int) -> Decoded:
        return Decoded(tuple(tokens.encode()), (), ties)

    own = [text("abcdef", 2), text("abcdef", 2), text("abcdef", 2), text("abc")]
    found = [text("abxxxx", 2), text("abxdef"), text("axcdex", 2), text("abcd", 3)]
    # Parted at a tie of both; a tie of one only; parted before the tie; a token too many, behind the end of the other.
    expected = {"differing_tokens": 0 + 1 + 2 + 1, "near_ties": 3, "near_tie_differences": 1}
    assert against_own_text(found, own) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 60}, "layers (32, 60, 4), found (32, 50, 4)"),
        ({"hidden_size": 16}, "layers (16, 50, 4), found (32, 50, 4)"),
        ({"num_target_layers": 9, "target_layer_ids": (0, 8)}, "layers (32, 50, 9), found (32, 50, 4)"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    changes: dict[str, Any],
    message: str,
    model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = save_new_drafter(tmp_path / "drafter", **changes)
    assert (
        main(["eval", str(drafter), "--target", str(model), "--prompts", str(prompts), "--set", "run.device=cpu"]) == 1
    )
    assert f"error: drafter: expected a target of hidden size, vocabulary and {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Expected DATA, --target or both, found neither"),
        (["--prompts", "p.txt"], "Expected --target with --prompts, found none"),
        (["--target", "somewhere"], "Expected --prompts with --target, found none"),
        (["--target", "embedded", "--samples", "2"], "Expected --temperature above 0 with --samples"),
        (["--target", "embedded", "--temperature", "-1"], "-1"),
    ],
)
def test_bad_usage(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "drafter", *args]) == 2
    assert message in capsys.readouterr().err
