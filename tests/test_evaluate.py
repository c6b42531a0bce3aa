"""Evaluation of a saved drafter: the figures, what of the data they cover, and drafters that do not belong to it."""

from pathlib import Path

import pytest

from engine import demo
from engine.bytes_vocab import MASK_TOKEN_ID
from engine.checkpoint import save_drafter
from engine.corpus import corpus_files
from engine.drafter_config import DrafterConfig
from engine.evaluate import evaluate_drafter
from engine.extract import extract_corpus
from engine.params import initial_parameters
from engine.settings import load_settings
from engine.target import load_target
from tests.dataset_helpers import random_sample, writer
from tests.run_helpers import LENGTHS, metrics, run, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
CHANGES = ("run.device=cpu", "buckets.lengths=128,256", "buckets.num_anchors=32", "buckets.max_rows=1")
SETTINGS = load_settings(None, CHANGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data, held-out and a run over them."""
    folder = tmp_path_factory.mktemp("evaluated")
    data = training_dataset(folder / "data")
    held_out = training_dataset(folder / "held-out", (50, 100, 140), first_sample=100)
    run(data, folder / "run", f"data.eval_path={held_out}", "run.epochs=4", "run.eval_every=10")
    return folder


def test_figures_are_those_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = evaluate_drafter(folder / "run" / "drafter", folder / "held-out", SETTINGS, decode=False)
    last = metrics(folder / "run")[-1]
    # The run measured in fp32 what was saved in bf16.
    assert figures["loss"] == pytest.approx(last["eval_loss"], rel=1e-2)
    assert figures["tokens_per_verification"] == figures["accept_len"] + 1
    assert len(figures["accuracy_per_slot"]) == 3
    assert figures["samples"] == 3
    assert (figures["skipped_samples"], figures["too_long_samples"], figures["how"]) == ([], 0, "called")
    told = capsys.readouterr().out
    for name in figures:
        assert name in told


def test_training_shows(folder: Path) -> None:
    trained = evaluate_drafter(folder / "run" / "drafter", folder / "data", SETTINGS, decode=False)
    config = DrafterConfig(
        block_size=4,
        mask_token_id=49,
        target_layer_ids=(1, 3, 4),
        num_target_layers=6,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=50,
        layer_types=("full_attention",),
    )
    save_drafter(folder / "new", config, initial_parameters(config, seed=0))
    new = evaluate_drafter(folder / "new", folder / "data", SETTINGS, decode=False)
    assert trained["loss"] < 0.75 * new["loss"]
    assert trained["accept_len"] > new["accept_len"]


def test_it_is_the_same_each_time_and_neither_rows_nor_buckets_matter(folder: Path) -> None:
    drafter, data = folder / "run" / "drafter", folder / "held-out"
    once, again = (evaluate_drafter(drafter, data, SETTINGS, decode=False) for _ in range(2))
    assert once == again
    other = load_settings(None, [*CHANGES[:1], "buckets.num_anchors=32", "buckets.lengths=256"])
    third = evaluate_drafter(drafter, data, other, decode=False)
    for name in ("loss", "accuracy", "accept_len"):
        assert third[name] == pytest.approx(once[name], rel=1e-5)


def test_what_was_not_evaluated_is_told(folder: Path, tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", (40, 300, 60, 90), nonfinite=(2,))
    settings = load_settings(None, [*CHANGES, "data.on_nonfinite=skip", "run.eval_batches=0"])
    figures = evaluate_drafter(folder / "run" / "drafter", data, settings, decode=False)
    assert (figures["samples"], figures["skipped_samples"], figures["too_long_samples"]) == (2, [2], 1)
    few = load_settings(None, [*CHANGES, "run.eval_batches=4"])
    assert evaluate_drafter(folder / "run" / "drafter", folder / "data", few, decode=False)["samples"] == 4
    pieces = load_settings(None, [*CHANGES, "data.on_nonfinite=skip", "data.too_long=split"])
    assert evaluate_drafter(folder / "run" / "drafter", data, pieces, decode=False)["samples"] == 3


def test_soft_labels_are_measured_where_the_data_has_them(folder: Path, tmp_path: Path) -> None:
    data = training_dataset(tmp_path / "data", LENGTHS[:3], last_hidden_norm="pre")
    soft = load_settings(None, [*CHANGES, "objective.kl_weight=0.15"])
    plain, with_kl = (
        evaluate_drafter(folder / "run" / "drafter", data, settings, decode=False)["loss"]
        for settings in (SETTINGS, soft)
    )
    assert with_kl > plain
    with pytest.raises(ValueError, match=r"objective.kl_weight: soft labels need last_hidden, which .* does not have"):
        evaluate_drafter(folder / "run" / "drafter", folder / "data", soft, decode=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (0, 3, 4)}, r"has target_layer_ids \(1, 3, 4\), .* has \(0, 3, 4\)"),
        ({"vocab_size": 60}, "has vocab_size 50, .* has 60"),
    ],
)
def test_a_drafter_of_other_data_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with writer(tmp_path / "data", **changes) as out:
        sample = random_sample(20)
        del sample["last_hidden"]
        out.add(**sample)
    with pytest.raises(ValueError, match=f"drafter {message}; evaluate on the hidden states of its own target"):
        evaluate_drafter(folder / "run" / "drafter", tmp_path / "data", SETTINGS, decode=False)


def test_decoding_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPTS", 1)
    monkeypatch.setattr(demo, "PROMPT_TOKENS", 64)
    monkeypatch.setattr(demo, "NEW_TOKENS", 6)
    target = load_target(demo.EMBEDDED_TARGET)
    sizes = target.config
    taps = (1, 2)
    files = corpus_files("heldout")[:20]
    extract_corpus(target, files, tmp_path / "data", target_layer_ids=taps, max_length=96, max_tokens=400)
    config = DrafterConfig(
        block_size=4,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=taps,
        num_target_layers=sizes.num_hidden_layers,
        hidden_size=sizes.hidden_size,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=sizes.vocab_size,
        layer_types=("full_attention",),
    )
    save_drafter(tmp_path / "drafter", config, initial_parameters(config, seed=0))
    settings = load_settings(None, ["run.device=cpu", "buckets.num_anchors=32", "buckets.max_rows=1"])
    figures = evaluate_drafter(tmp_path / "drafter", tmp_path / "data", settings, decode=True)
    assert figures["decoding"].keys() == {
        "tokens_per_verification",
        "verifications",
        "differing_tokens",
        "near_ties",
    }
    assert figures["decoding"]["differing_tokens"] == 0
    assert figures["decoding"]["tokens_per_verification"] >= 1


def test_decoding_needs_the_embedded_target(folder: Path) -> None:
    with pytest.raises(ValueError, match="drafter: expected a target of hidden size, vocabulary and layers"):
        evaluate_drafter(folder / "run" / "drafter", folder / "held-out", SETTINGS, decode=True)
