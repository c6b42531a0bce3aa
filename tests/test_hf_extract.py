"""`data extract`: the dataset it writes, what it reports, and going on after a kill."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.cli import main
from buffers.dataset import Dataset, load_target_tensors
from buffers.dataset_writer import DatasetWriter
from engine import extract_reader, extract_work, hf_target
from engine.extract_options import ExtractOptions
from engine.extract_reader import Progress
from engine.hf_extract import extract_dataset
from engine.length_batches import batches_of_like_length
from engine.target import load_target
from engine.window_states import BatchStates, run_batch
from tests.hf_helpers import (
    CHATML,
    MARKED,
    SIZES,
    chat,
    id_records,
    save_model,
    transformers,
    word_tokenizer,
    write_jsonl,
)
from tests.run_helpers import Killed, files_under, logged_steps, run

ROOT = Path(__file__).parent.parent
TAPS = (1, 4, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("chat"), tokenizer=word_tokenizer(CHATML))


def extract(target: Path, data: Path, out: Path, **options: Any) -> dict[str, Any]:
    defaults = {"layers": TAPS, "mask_token_id": SIZES["vocab_size"] - 1, "device": "cpu"}
    return extract_dataset(ExtractOptions(target=str(target), data=data, out=out, **{**defaults, **options}))


@pytest.mark.parametrize("last_hidden", ["pre", "post", "none"])
def test_samples_hold_what_a_plain_forward_pass_gives(last_hidden: str, model: Path, tmp_path: Path) -> None:
    records = id_records(10)
    data = write_jsonl(tmp_path / "data.jsonl", records)
    figures = extract(model, data, tmp_path / "out", last_hidden=last_hidden, shard_tokens=250)
    dataset = Dataset(tmp_path / "out")
    dataset.verify()
    info = dataset.info
    assert (len(dataset), figures["samples"], info.target_layer_ids) == (10, 10, TAPS)
    assert info.last_hidden_norm == (None if last_hidden == "none" else last_hidden)
    assert info.target_config["architectures"] == ["Qwen3ForCausalLM"] and info.target_name == str(model)
    assert len(info.shards) > 1 and sum(shard.num_tokens for shard in info.shards) == figures["tokens"]
    assert not list((tmp_path / "out").glob("unfinished*"))

    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    by_tokens = {tuple(record["input_ids"]): record for record in records}
    for i in range(10):
        sample = dataset.sample(i)
        record = by_tokens.pop(tuple(sample.input_ids.tolist()))
        assert sample.loss_mask.tolist() == record["loss_mask"]
        # Of transformers' own, the last layer's are normed: the input of the norm is what comes out of the layer.
        residual: list[torch.Tensor] = []
        hook = plain.model.norm.register_forward_pre_hook(lambda module, args, kept=residual: kept.append(args[0]))
        with torch.inference_mode():
            states = plain(torch.tensor([record["input_ids"]]), output_hidden_states=True).hidden_states
        hook.remove()
        expected = torch.cat([states[2][0], states[5][0], residual[0][0]], dim=-1)
        # Batched and padded, an fp32 sum may differ in its last bits, and bf16 then round the other way.
        torch.testing.assert_close(sample.hidden_states.float(), expected, rtol=2**-8, atol=1e-4)
        if last_hidden == "none":
            assert sample.last_hidden is None
            continue
        assert sample.last_hidden is not None
        last = residual[0][0] if last_hidden == "pre" else states[6][0]
        torch.testing.assert_close(sample.last_hidden.float(), last, rtol=2**-8, atol=1e-4)
    stored = load_target_tensors(tmp_path / "out")
    assert torch.equal(stored["embed_tokens.weight"].float(), plain.model.embed_tokens.weight)
    assert torch.equal(stored["lm_head.weight"].float(), plain.lm_head.weight)
    assert torch.equal(stored["norm.weight"].float(), plain.model.norm.weight)


def test_what_samples_run_with_does_not_matter(model: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", id_records(12))
    together = extract(model, data, tmp_path / "together", token_budget=100_000, shard_tokens=100_000)
    alone = extract(model, data, tmp_path / "alone", token_budget=1, shard_tokens=100_000)
    assert together["padding"] > alone["padding"] > 0 and together["tokens"] == alone["tokens"]
    one, other = Dataset(tmp_path / "together"), Dataset(tmp_path / "alone")
    for i in range(12):
        a, b = one.sample(i), other.sample(i)
        assert torch.equal(a.input_ids, b.input_ids)
        torch.testing.assert_close(a.hidden_states, b.hidden_states, rtol=2**-7, atol=1e-4)


def test_states_in_memory_are_bounded_whatever_the_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[weakref.ref[BatchStates]] = []
    held = 0

    def watched(*arguments: Any, **options: Any) -> BatchStates:
        nonlocal held
        states = run_batch(*arguments, **options)
        batches.append(weakref.ref(states))
        held = max(held, sum(each.num_tokens for ref in batches if (each := ref()) is not None))
        return states

    add = DatasetWriter.add

    def slow(self: DatasetWriter, *arguments: Any) -> int:
        # Slower than the target: states would pile up.
        time.sleep(0.02)
        return add(self, *arguments)

    monkeypatch.setattr(extract_work, "run_batch", watched)
    monkeypatch.setattr(DatasetWriter, "add", slow)
    data = write_jsonl(tmp_path / "data.jsonl", id_records(80))
    figures = extract(model, data, tmp_path / "out", token_budget=200, shard_tokens=600)
    # A shard's that wait, the batch at hand and the one that is written.
    assert 400 < held <= 600 + 2 * 200 < figures["tokens"] / 3


def test_batches_hold_like_lengths_within_the_budget() -> None:
    batches = list(batches_of_like_length([5, 40, 7, 38, 6, 100, 1], 80, step=8))
    assert batches == [([6, 0, 4, 2], 8), ([3, 1], 40), ([5], 104)]
    assert list(batches_of_like_length([], 80)) == []


def test_an_extracted_dataset_trains(tmp_path: Path, model: Path) -> None:
    records = [{"input_ids": [i % 7 for i in range(n)], "loss_mask": [1] * n} for n in (40, 130, 60, 150)]
    extract(model, write_jsonl(tmp_path / "data.jsonl", records), tmp_path / "data")
    figures = run(tmp_path / "data", tmp_path / "run", "objective.kl_weight=1", "run.max_steps=2", "run.log_every=1")
    assert figures["steps"] == 2 and logged_steps(tmp_path / "run") == [1, 2]


def test_the_embedded_target_gives_what_the_demo_trains_on(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": "def f(x):\n    return x\n"}, {"text": "import os"}])
    extract(ROOT / "engine" / "embedded", data, tmp_path / "out", tokenizer="bytes", layers=(1, 3), mask_token_id=None)
    dataset = Dataset(tmp_path / "out")
    assert dataset.info.mask_token_id == 256 and len(dataset) == 2
    target = load_target(ROOT / "engine" / "embedded")
    for i in range(2):
        sample = dataset.sample(i)
        own = target(sample.input_ids[None].long(), tap_layer_ids=(1, 3))
        assert int(sample.input_ids[0]) == 257 and sample.loss_mask.min() == 1
        torch.testing.assert_close(sample.hidden_states.float(), own.taps[0], rtol=2**-7, atol=1e-3)
        assert sample.last_hidden is not None
        torch.testing.assert_close(sample.last_hidden.float(), own.last_hidden[0], rtol=2**-7, atol=1e-3)


def test_every_record_is_accounted_for(chat_model: Path, tmp_path: Path) -> None:
    data = write_jsonl(
        tmp_path / "data.jsonl",
        [
            {"id": 1, "conversations": chat("hello", "how are you")},
            {"messages": chat("hello", "of course", "tell me", "one two three")},
            {"text": "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nfine thanks<|im_end|>\n"},
            {"input_ids": [5, 9, 10, 11], "loss_mask": [0, 0, 1, 1]},
            {"input_ids": [5, 9, 90, 95], "loss_mask": [0, 0, 1, 1]},
            {"input_ids": [5, 9, 10, 96], "loss_mask": [0, 0, 1, 1]},
            {"input_ids": [5, 9, 10, 11], "loss_mask": [0, 0, 0, 1]},
            {"conversations": chat("hello")},
            {"prompt": "hello"},
            "not JSON",
        ],
    )
    figures = extract(chat_model, data, tmp_path / "out")
    assert (figures["records"], figures["samples"]) == (10, 5)
    assert figures["loss_mask_from"] == {"beginnings of the text": 2, "markers of a turn": 1, "given": 2}
    assert figures["left_out"] == {
        "token ids outside the vocabulary": 1,
        "fewer than two supervised tokens": 2,
        "no conversation": 1,
        "no JSON": 1,
    }
    assert figures["left_out_examples"]["no conversation"][0].startswith("record 9: found only prompt")
    dataset = Dataset(tmp_path / "out")
    masks = [dataset.sample(i).loss_mask for i in range(5)]
    assert figures["supervised_share"] == sum(int(m.sum()) for m in masks) / sum(len(m) for m in masks)
    unmarked, beyond, mask, chance = figures["warnings"]
    assert unmarked.startswith("the chat template has no generation markers") and "in 2 samples" in unmarked
    assert beyond == f"2 of {figures['tokens']} token ids are beyond the tokenizer's 26: another tokenizer's?"
    assert mask == "the mask token 95 occurs in 1 of 5 samples"
    assert chance.startswith("the target's own loss on the supervised tokens is") and "a blind guess has 4.56" in chance
    assert json.loads((tmp_path / "out" / "extraction.json").read_text())["left_out"] == figures["left_out"]


def test_a_good_target_and_its_own_tokens_give_no_warning(tmp_path: Path) -> None:
    text = "def main():\n    import os\n    for name in os.listdir():\n        print(name)\n"
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": text}])
    embedded = ROOT / "engine" / "embedded"
    figures = extract(embedded, data, tmp_path / "out", tokenizer="bytes", mask_token_id=None)
    assert figures["warnings"] == [] and figures["target_loss_nats"] < 2
    # The same tokens, each the next one of the alphabet: another tokenizer's ids.
    moved = write_jsonl(tmp_path / "moved.jsonl", [{"text": "".join(chr(ord(c) * 7 % 128) for c in text)}])
    figures = extract(embedded, moved, tmp_path / "moved", tokenizer="bytes", mask_token_id=None)
    assert figures["target_loss_nats"] > 4 and "a blind guess has 5.58" in figures["warnings"][0]


def test_mask_token_is_the_tokenizers_own_or_an_unused_row(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"conversations": chat("hello", "how are you")}])
    for number, (special, words, expected, said) in enumerate(
        (
            ({"mask_token": "<mask>"}, (), 9, "the tokenizer's own"),
            ({}, (), 9, "the first of 87 rows of the embedding that the tokenizer does not use"),
        )
    ):
        folder = save_model(tmp_path / f"model-{number}", tokenizer=word_tokenizer(MARKED, words, **special))
        figures = extract(folder, data, tmp_path / f"out-{number}", mask_token_id=None)
        assert (figures["mask_token_id"], figures["mask_token_from"]) == (expected, said)
        assert not any("generation markers" in warning for warning in figures["warnings"])
    full = save_model(tmp_path / "full", tokenizer=word_tokenizer(MARKED, [f"w{i}" for i in range(90)]))
    with pytest.raises(ValueError, match="found 99 tokens for 96 rows of the embedding. Name a token"):
        extract(full, data, tmp_path / "none", mask_token_id=None)
    assert "the tokenizer has 99 tokens, the target's embedding 96 rows" in str(
        extract(full, data, tmp_path / "named", mask_token_id=7)["warnings"]
    )


@pytest.mark.parametrize("place", ["before the shard", "behind the shard", "before the manifest"])
def test_after_a_death_the_same_command_makes_the_same_folder(
    place: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [*id_records(9), "nonsense", *id_records(9, seed=1), {"a": 1}]
    # What is not finite is no sample, and is not taken for one of those that are written already.
    records[4:4] = [{"input_ids": [93] * n, "loss_mask": [1] * n} for n in (7, 60)]
    data = write_jsonl(tmp_path / "data.jsonl", records)
    # Windows of several shards, and shards of several batches.
    monkeypatch.setattr(extract_reader, "WINDOW_TOKENS", 600)
    options: dict[str, Any] = {"shard_tokens": 150, "token_budget": 100}
    target = with_nan_row(tmp_path / "target")
    whole = extract(target, data, tmp_path / "whole", **options)
    not_finite = 2 + sum(93 in record["input_ids"] for record in id_records(9) + id_records(9, seed=1))
    assert whole["shards"] >= 4 and whole["left_out"]["hidden states that are not finite"] == not_finite
    calls = 0
    note, end_shard = Progress.note, DatasetWriter.end_shard

    def counted_note(self: Progress, state: dict[str, Any]) -> None:
        nonlocal calls
        calls += 1
        note(self, state)
        if calls == 3 and place == "before the shard":
            raise Killed

    def counted_end(self: DatasetWriter) -> None:
        end_shard(self)
        if calls == 3 and place == "behind the shard":
            raise Killed

    def killed_close(self: DatasetWriter) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "note", counted_note)
        patch.setattr(DatasetWriter, "end_shard", counted_end)
        if place == "before the manifest":
            patch.setattr(DatasetWriter, "close", killed_close)
        with pytest.raises(Killed):
            extract(target, data, tmp_path / "out", **options)
    shards = len(list((tmp_path / "out").glob("shard-*.safetensors")))
    assert shards == {"before the shard": 2, "behind the shard": 3, "before the manifest": whole["shards"]}[place]
    with pytest.raises(ValueError, match="found another source. Choose"):
        extract(target, data, tmp_path / "out", **options, max_length=50)
    with pytest.raises(ValueError, match="found another source, mask_token_id"):
        extract(target, data, tmp_path / "out", **options, mask_token_id=4)

    figures = extract(target, data, tmp_path / "out", **options)
    kept = figures["samples_kept_from_before"]
    assert 0 < kept <= figures["samples"] and (kept == figures["samples"]) == (place == "before the manifest")
    resumed, straight = files_under(tmp_path / "out"), files_under(tmp_path / "whole")
    del resumed["extraction.json"], straight["extraction.json"]
    assert resumed == straight
    same = ("records", "samples", "tokens", "left_out", "supervised_share", "target_loss_nats", "loss_mask_from")
    assert {key: figures[key] for key in same} == {key: whole[key] for key in same}


def test_kill_9(model: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", id_records(10))
    arguments = [
        "data",
        "extract",
        "--target",
        str(model),
        "--data",
        str(data),
        "--layers",
        "1,3",
        "--mask-token-id",
        "95",
    ]
    arguments += ["--device", "cpu", "--shard-tokens", "300", "--out"]
    program = (
        "import os, signal, sys; from buffers import dataset_writer as w; from bench.cli import main; save = w._save\n"
        "def dying(file, tensors):\n"
        "    save(file, tensors)\n"
        "    if file.name.startswith('shard-00001'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "w._save = dying; sys.exit(main(sys.argv[1:]))"
    )
    died = subprocess.run(
        [sys.executable, "-c", program, *arguments, str(tmp_path / "out")], cwd=ROOT, capture_output=True
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert sorted(os.listdir(tmp_path / "out")) == [
        "shard-00000.safetensors",
        "shard-00001.safetensors",
        "target.safetensors",
        "unfinished-extraction.jsonl",
        "unfinished.json",
    ]
    assert main([*arguments, str(tmp_path / "out")]) == 0
    assert main([*arguments, str(tmp_path / "whole")]) == 0
    resumed, straight = files_under(tmp_path / "out"), files_under(tmp_path / "whole")
    del resumed["extraction.json"], straight["extraction.json"]
    assert resumed == straight


def with_nan_row(folder: Path) -> Path:
    """A model whose token 93 has NaN for an embedding. The probe at the start does not meet it: its tokens are 7919 apart."""
    assert 93 not in {i * 7919 % SIZES["vocab_size"] for i in range(hf_target.PROBE_TOKENS)}
    weights = save_model(folder) / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][93] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def test_states_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    records = [{"input_ids": [n] * 9, "loss_mask": [1] * 9} for n in (3, 93, 5)]
    data = write_jsonl(tmp_path / "data.jsonl", records)
    figures = extract(with_nan_row(tmp_path / "target"), data, tmp_path / "out")
    assert figures["samples"] == 2 and figures["left_out"] == {"hidden states that are not finite": 1}
    assert [int(Dataset(tmp_path / "out").sample(i).input_ids[0]) for i in range(2)] == [3, 5]
    assert math.isfinite(figures["target_loss_nats"])


def test_messages(model: Path, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = write_jsonl(tmp_path / "ids.jsonl", id_records(2))
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat("hello", "fine")}])
    bad = write_jsonl(tmp_path / "bad.jsonl", ["x", {"input_ids": [1], "loss_mask": [1]}])
    out, broken = tmp_path / "out", tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    for target, data, options, message in (
        (broken, ids, {}, "expected JSON in .*broken/config.json, found"),
        (model, tmp_path / "none.jsonl", {}, "expected conversations in .*none.jsonl, found no such file"),
        (tmp_path, ids, {}, "expected the target's config.json in .*, found none. Give a model's folder"),
        (
            Path("no/such/thing"),
            ids,
            {},
            "target no/such/thing: expected a folder or hub id of a causal language model",
        ),
        (model, ids, {"layers": (1, 6)}, r"--layers: expected numbers in 0..5, found \[6\]"),
        (model, ids, {"layers": (1, 3, 3)}, r"--layers: expected ascending numbers, each once, found \[1, 3, 3\]"),
        (model, ids, {"layers": ()}, "expected 1 to 3 taps for a target of 6 layers, found 5"),
        (model, ids, {"mask_token_id": 96}, r"--mask-token-id: expected a row of the embedding, 0..95, found 96"),
        (model, ids, {"mask_token_id": None}, "mask token: expected a tokenizer .* found no tokenizer. Name"),
        (model, chats, {}, "expected a tokenizer for the text in .*chats.jsonl, found none: .* has none. Give one"),
        (
            model,
            ids,
            {"tokenizer": str(tmp_path / "no")},
            "--tokenizer: expected a tokenizer that can be loaded, found",
        ),
        (chat_model, chats, {"tokenizer": "bytes"}, "expected records with text for the tokenizer bytes"),
        (model, bad, {}, "found none in 2 records: 1 left out, no JSON .*; 1 left out, fewer than two supervised"),
    ):
        with pytest.raises(ValueError, match=message):
            extract(target, data, out, **options)
        for file in out.glob("*"):
            file.unlink()
    extract(model, ids, out)
    with pytest.raises(ValueError, match="to hold no dataset, found dataset.json. Choose another folder"):
        extract(model, ids, out)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"expected the package transformers .* pip install 'dflash-engine\[hf\]'"):
        extract(model, ids, tmp_path / "other")


def test_command(chat_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": chat("hello", "how are you")}, "x"])
    (tmp_path / "marked.jinja").write_text(MARKED)
    arguments = ["data", "extract", "--target", str(chat_model), "--data", str(data), "--num-taps", "2", "--json"]
    template = ["--chat-template", str(tmp_path / "marked.jinja")]
    assert main([*arguments, *template, "--out", str(tmp_path / "out"), "--last-hidden", "none", "--all-tokens"]) == 0
    printed = capfd.readouterr()
    figures = json.loads(printed.out.splitlines()[-1])
    assert (figures["target_layer_ids"], figures["samples"], figures["supervised_share"]) == ([1, 3], 1, 1.0)
    assert "mask token: 26, the first of 70 rows" in printed.err and "1 left out, no JSON (record 2:" in printed.err
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert main([*arguments, "--out", str(tmp_path / "new"), "--layers", "1,x"]) == 2
    assert "--layers: expected numbers with commas between, found '1,x'" in capfd.readouterr().err
