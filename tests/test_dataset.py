import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from buffers.anchors import eligible_positions
from buffers.dataset import Dataset, load_target_tensors
from tests.dataset_helpers import (
    HIDDEN_SIZE,
    TAPS,
    VOCAB,
    WIDTH,
    random_sample,
    rewrite_manifest,
    rewrite_shard,
    write_dataset,
    writer,
)

LENGTHS = [130, 1, 77, 256, 299, 2, 40]


@pytest.mark.parametrize("last_hidden", [False, True])
def test_what_was_written_is_read_back_across_shards(tmp_path: Path, last_hidden: bool) -> None:
    dataset = write_dataset(tmp_path, LENGTHS, last_hidden=last_hidden)
    assert len(dataset.info.shards) > 2
    assert len(dataset) == len(LENGTHS)
    assert dataset.lengths.tolist() == LENGTHS
    for index, length in enumerate(LENGTHS):
        written, sample = random_sample(length, index), dataset.sample(index)
        assert sample.sample_id == index
        for name in ("input_ids", "loss_mask", "hidden_states"):
            read = getattr(sample, name)
            assert read.dtype == written[name].dtype
            assert torch.equal(read, written[name])
        if last_hidden:
            assert sample.last_hidden is not None
            assert torch.equal(sample.last_hidden, written["last_hidden"])
        else:
            assert sample.last_hidden is None
        assert dataset.eligible_counts[index] == len(eligible_positions(written["loss_mask"].numpy()))
    dataset.verify()


def test_the_manifest_says_what_the_hidden_states_are(tmp_path: Path) -> None:
    info = write_dataset(tmp_path, [5], last_hidden=True).info
    assert (info.target_name, info.target_layer_ids, info.num_taps) == ("tiny", TAPS, 3)
    assert (info.vocab_size, info.mask_token_id, info.last_hidden_norm) == (VOCAB, VOCAB - 1, "post")
    assert info.target_config == {"hidden_size": HIDDEN_SIZE}


def test_a_part_of_a_sample_is_read_alone_and_where_it_is_wanted(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, LENGTHS, last_hidden=True)
    whole, part = dataset.sample(3), dataset.sample(3, 100, 250)
    assert torch.equal(part.hidden_states, whole.hidden_states[100:250])
    assert torch.equal(part.input_ids, whole.input_ids[100:250])
    memory = torch.zeros(152, WIDTH, dtype=torch.bfloat16)
    there = dataset.sample(3, 100, 250, {"hidden_states": memory[1:151]})
    assert there.hidden_states.data_ptr() == memory[1].data_ptr() and there.last_hidden is None
    assert torch.equal(memory[1:151], whole.hidden_states[100:250])
    assert not memory[0].any() and not memory[151].any()
    for other in (memory[:149], memory[:150].float(), memory[:150, 1:]):
        elsewhere = dataset.sample(3, 100, 250, {"hidden_states": other})
        assert torch.equal(elsewhere.hidden_states, whole.hidden_states[100:250])


@pytest.mark.parametrize(("start", "stop"), [(0, 78), (5, 5), (-1, 3)])
def test_a_part_outside_the_sample_is_refused(tmp_path: Path, start: int, stop: int) -> None:
    dataset = write_dataset(tmp_path, LENGTHS)
    with pytest.raises(ValueError, match=f"expected 0 <= start < stop <= 77 in sample 2, found {start}..{stop}"):
        dataset.sample(2, start, stop)
    with pytest.raises(IndexError, match=r"expected a sample in 0\.\.6, found 7"):
        dataset.sample(7)


def test_wider_float_types_are_stored_as_bf16(tmp_path: Path) -> None:
    hidden = torch.randn(4, WIDTH)
    with writer(tmp_path) as out:
        out.add([1, 2, 3, 4], np.ones(4, dtype=bool), hidden)
    assert torch.equal(Dataset(tmp_path).sample(0).hidden_states, hidden.bfloat16())


def test_a_folder_with_a_dataset_is_not_written_over(tmp_path: Path) -> None:
    write_dataset(tmp_path, [5])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"to hold no dataset, found dataset\.json\. Choose another folder"):
        writer(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_interrupted_write_is_no_dataset_and_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writer(tmp_path) as out:
        for index in range(5):
            sample = random_sample(200, index)
            del sample["last_hidden"]
            out.add(**sample)
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match=r"a folder of shards without it was not finished: write it again"):
        Dataset(tmp_path)
    with pytest.raises(ValueError, match="to hold no dataset, found shard-"):
        writer(tmp_path)


def test_a_dataset_without_samples_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least one sample for .*, found none"):
        writer(tmp_path).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"loss_mask": torch.ones(9, dtype=torch.uint8)},
            r"expected loss_mask of 10 values.* in sample 0, found shape",
        ),
        ({"loss_mask": torch.full((10,), 2)}, "expected loss_mask values 0 and 1 in sample 0, found 2 at position 0"),
        ({"input_ids": torch.arange(10) + 45}, r"token ids in 0\.\.49 in sample 0, found 50 at position 5"),
        ({"input_ids": torch.ones(2, 5, dtype=torch.int32)}, r"expected input_ids \[T\] .* found \[2, 5\]"),
        ({"hidden_states": torch.ones(9, WIDTH)}, r"hidden_states \[10, 24\].*, found \[9, 24\]"),
        ({"hidden_states": torch.ones(10, 16)}, r"3 target_layer_ids \[1, 3, 4\], hidden size 8\), found \[10, 16\]"),
        ({"last_hidden": torch.ones(10, 8)}, "found last_hidden_norm None and a last_hidden in sample 0"),
    ],
)
def test_samples_that_do_not_fit_the_dataset_are_refused(
    tmp_path: Path, change: dict[str, Tensor], message: str
) -> None:
    sample = random_sample(10)
    del sample["last_hidden"]
    with pytest.raises(ValueError, match=message):
        writer(tmp_path).add(**{**sample, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": VOCAB}, r"expected mask_token_id in 0\.\.49, found 50"),
        ({"target_layer_ids": ()}, "expected target_layer_ids and a positive hidden_size"),
        ({"last_hidden_norm": "maybe"}, "expected last_hidden_norm to be pre, post or null, found 'maybe'"),
        ({"shard_tokens": 0}, "expected a positive shard_tokens, found 0"),
        ({"target_config": {"dtype": torch.bfloat16}}, "expected plain values that JSON has .*Object of type dtype"),
        ({"hidden_size": 8.0}, "expected hidden_size to be a whole number, found 8.0"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        writer(tmp_path / "new", **change)
    assert not (tmp_path / "new").exists()


def first_shard(path: Path) -> Path:
    return path / "shard-00000.safetensors"


def cut_short(path: Path) -> None:
    file = first_shard(path)
    file.write_bytes(file.read_bytes()[:-100])


def cut_short_with_its_size_in_the_manifest(path: Path) -> None:
    cut_short(path)
    size = first_shard(path).stat().st_size
    rewrite_manifest(path, lambda values: values["shards"][0].update(num_bytes=size))


def never_written(path: Path) -> None:
    file = first_shard(path)
    file.write_bytes(bytes(file.stat().st_size))


def without_offsets(path: Path) -> None:
    def remove(tensors: dict[str, Tensor]) -> None:
        del tensors["offsets"]

    rewrite_shard(path, remove)


def set_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        rewrite_shard(path, lambda tensors: tensors.update({name: change(tensors[name])}))

    return damage


def set_value(name: str, position: int, value: int) -> Callable[[Path], None]:
    return set_tensor(name, lambda old: old.index_fill(0, torch.tensor([position]), value))


def set_manifest(**changes: Any) -> Callable[[Path], None]:
    return lambda path: rewrite_manifest(path, lambda values: values.update(changes))


# The shards of LENGTHS hold samples (130, 1, 77), (256), (299), (2, 40).
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "dataset.json").unlink(), r"expected a dataset with dataset\.json in .*, found none"),
        (lambda path: (path / "dataset.json").write_text("{"), r"expected dataset\.json to be JSON, found"),
        (lambda path: (path / "dataset.json").write_text("[]"), "expected the keys .* found .*vocab_size missing"),
        (set_manifest(format_version=2), "expected dataset format version 1, found 2"),
        (set_manifest(colour="red"), "found none missing and colour unknown"),
        (set_manifest(num_samples=0), "expected at least one sample in .*, found none"),
        (set_manifest(hidden_size="8"), "expected hidden_size of dataset.json to be a whole number.*, found '8'"),
        (set_manifest(hidden_size=None), "expected hidden_size of .* to be a whole number from 0 .*, found None"),
        (set_manifest(vocab_size=True), "expected vocab_size of dataset.json to be a whole number.*, found True"),
        (set_manifest(mask_token_id=2.5), "expected mask_token_id of .* to be a whole number.*, found 2.5"),
        (set_manifest(target_config=[]), r"expected target_config of .* to be an object, found \[\]"),
        (set_manifest(target_layer_ids=4), "expected target_layer_ids of dataset.json to be a list, found 4"),
        (set_manifest(target_layer_ids=[1, "3", 4]), "expected target_layer_ids of .* a whole number.*, found '3'"),
        (set_manifest(shards=None), "expected shards of dataset.json to be a list, found None"),
        (set_manifest(last_hidden_norm=1), "expected last_hidden_norm of .* to be text or null, found 1"),
        (
            lambda path: rewrite_manifest(path, lambda values: values["shards"][0].update(file=7)),
            "expected file of a shard of dataset.json to be text, found 7",
        ),
        (
            lambda path: rewrite_manifest(path, lambda values: values["shards"][0].update(num_samples=-3)),
            "expected num_samples of a shard of dataset.json to be a whole number from 0 .*, found -3",
        ),
        (lambda path: (path / "dataset.json").write_text("[" * 100_000), r"expected dataset\.json to be JSON, found"),
        (
            lambda path: (path / "dataset.json").write_bytes(b'{"a": "\xff"}'),
            r"expected dataset\.json to be JSON, found",
        ),
        (set_manifest(num_samples=8), "to add up to 8 samples, found 7"),
        (lambda path: first_shard(path).unlink(), r"expected shard .*shard-00000\.safetensors, found no such file"),
        (cut_short, r"expected \d+ bytes in .*shard-00000\.safetensors, found \d+: truncated or half-written"),
        (cut_short_with_its_size_in_the_manifest, "one that cannot be read: truncated or half-written"),
        (never_written, "one that cannot be read: truncated or half-written"),
        (
            lambda path: rewrite_manifest(path, lambda values: values["shards"][0].update(file="../elsewhere")),
            r"expected shards inside .*, found '\.\./elsewhere'",
        ),
        (
            without_offsets,
            r"expected .*offsets in .*shard-00000\.safetensors, found no offsets",
        ),
        (set_tensor("input_ids", Tensor.long), r"expected input_ids as int32 in .*, found int64"),
        (set_tensor("hidden_states", Tensor.float), "expected hidden_states as bfloat16 in .*, found float32"),
        (set_tensor("loss_mask", Tensor.bool), "expected loss_mask as uint8 in .*, found bool"),
        (
            set_tensor("loss_mask", lambda old: old[:-1].clone()),
            r"expected loss_mask of 208 values.*, found shape \[207\]",
        ),
        (set_tensor("input_ids", lambda old: old[:-1].clone()), r"input_ids of shape \[208\] in .*, found \[207\]"),
        (
            set_tensor("hidden_states", lambda old: old[:, :16].clone()),
            r"hidden_states \[208, 24\] \(3 target_layer_ids \[1, 3, 4\], hidden size 8\), found \[208, 16\]",
        ),
        (set_manifest(target_layer_ids=[1, 3]), r"\(2 target_layer_ids \[1, 3\], hidden size 8\), found \[208, 24\]"),
        (set_value("offsets", 1, 131), "expected offsets in shard-00000.safetensors to rise from 0 to 208"),
        (set_value("offsets", 3, 207), "expected offsets in shard-00000.safetensors to rise from 0 to 208"),
        (
            set_value("input_ids", 135, VOCAB),
            r"token ids in 0\.\.49 in shard-00000\.safetensors, sample 2, found 50 at position 4",
        ),
        (set_value("input_ids", 0, -1), r"token ids in 0\.\.49 in .*, sample 0, found -1 at position 0"),
        (set_value("loss_mask", 130, 7), "loss_mask values 0 and 1 in .*, sample 1, found 7 at position 0"),
    ],
)
def test_damage_is_found_at_open_and_named_in_one_line(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    write_dataset(tmp_path, LENGTHS)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        Dataset(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_fault_in_a_later_shard_names_the_sample_of_the_whole_dataset(tmp_path: Path) -> None:
    write_dataset(tmp_path, LENGTHS)
    rewrite_shard(tmp_path, lambda tensors: tensors["input_ids"].__setitem__(4, 99), shard=3)
    with pytest.raises(ValueError, match=r"shard-00003\.safetensors, sample 6, found 99 at position 2"):
        Dataset(tmp_path)


def test_bytes_that_changed_are_found_by_verify(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, LENGTHS)
    file = tmp_path / "shard-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected the sha256 of dataset\.json, found another for shard-00001"):
        dataset.verify()


def target_tensors() -> dict[str, Tensor]:
    return {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN_SIZE),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN_SIZE),
        "norm.weight": torch.randn(HIDDEN_SIZE),
    }


def test_a_shard_that_was_cut_is_named(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [40, 60])
    shard = tmp_path / "shard-00000.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, 1000)
    with pytest.raises(
        ValueError, match=f"expected {size} bytes in {shard} as when it was opened, found 1000: it was cut"
    ):
        dataset.sample(1)


def test_a_shard_that_is_cut_in_the_middle_of_a_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = write_dataset(tmp_path, [40, 60])
    shard, read = tmp_path / "shard-00000.safetensors", os.preadv

    def cut_first(descriptor: int, memory: list[memoryview], offset: int) -> int:
        os.truncate(shard, min(offset + 8, shard.stat().st_size))
        return read(descriptor, memory, offset)

    monkeypatch.setattr(os, "preadv", cut_first)
    with pytest.raises(ValueError, match=rf"bytes in {shard} as when it was opened, found \d+: it was cut or is being"):
        dataset.sample(1)


def test_a_shard_that_was_removed_or_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = write_dataset(tmp_path, [40, 60])
    shard = tmp_path / "shard-00000.safetensors"
    open_files = len(os.listdir("/proc/self/fd"))

    def broken(descriptor: int, memory: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=f"Input/output error: '{shard}'"):
        patch.setattr(os, "preadv", broken)
        dataset.sample(1)
    shard.unlink()
    with pytest.raises(ValueError, match=f"expected {shard} as when it was opened, found no such file: it was removed"):
        dataset.sample(1)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_the_targets_tensors_travel_with_the_dataset(tmp_path: Path) -> None:
    tensors = target_tensors()
    writer(tmp_path).write_target(*tensors.values())
    for path in (tmp_path, tmp_path / "target.safetensors"):
        loaded = load_target_tensors(path)
        assert {name: torch.equal(loaded[name], tensor) for name, tensor in tensors.items()} == dict.fromkeys(
            tensors, True
        )


def test_a_tied_head_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    embed, _, norm = target_tensors().values()
    writer(tmp_path).write_target(embed, embed, norm)
    loaded = load_target_tensors(tmp_path)
    assert loaded["lm_head.weight"] is loaded["embed_tokens.weight"]
    assert torch.equal(loaded["embed_tokens.weight"], embed)


def test_a_targets_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    embed, head, norm = target_tensors().values()
    with pytest.raises(ValueError, match=r"expected lm_head\.weight \[50, 8\], found \[49, 8\]"):
        writer(tmp_path).write_target(embed, head[:-1], norm)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_checkpoint_gives_the_same_three(tmp_path: Path, sharded: bool, tied: bool) -> None:
    tensors = target_tensors()
    stored = {
        "model.embed_tokens.weight": tensors["embed_tokens.weight"],
        "model.norm.weight": tensors["norm.weight"],
        "model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2),
    }
    if not tied:
        stored["lm_head.weight"] = tensors["lm_head.weight"]
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    if sharded:
        names = {name: f"model-{index}.safetensors" for index, name in enumerate(stored)}
        for name, file in names.items():
            save_file({name: stored[name]}, str(tmp_path / file))
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        save_file(stored, str(tmp_path / "model.safetensors"))
    loaded = load_target_tensors(tmp_path)
    assert set(loaded) == set(tensors)
    head = "embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(loaded["lm_head.weight"], tensors[head])


def test_a_missing_head_is_named_unless_it_is_tied(tmp_path: Path) -> None:
    embed, _, norm = target_tensors().values()
    save_file({"model.embed_tokens.weight": embed, "model.norm.weight": norm}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    with pytest.raises(ValueError, match=re.escape("found no lm_head.weight. Give the target's own checkpoint")):
        load_target_tensors(tmp_path)


def test_a_folder_without_a_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected the target's tensors in .*model\.safetensors, found no such file"):
        load_target_tensors(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model.safetensors.index.json", "{", "expected JSON in .*index.json, found .* Copy the file again"),
        ("model.safetensors.index.json", "{}", "expected a weight_map of file names in .*index.json, found none"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"lm_head.weight": 3}}',
            "expected a weight_map of file names",
        ),
        ("config.json", "[]", r"expected an object in .*config.json, found \[\]. Copy the file again"),
    ],
)
def test_a_damaged_file_beside_the_targets_tensors_is_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    embed, head, norm = target_tensors().values()
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    save_file(dict(zip(names, (embed, head, norm), strict=True)), str(tmp_path / "model.safetensors"))
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_target_tensors(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_name": None}, "expected target_name to be text, found None"),
        ({"target_config": "config.json"}, r"expected target_config to be an object, found 'config.json'.*to_dict\(\)"),
        ({"mask_token_id": None}, "expected mask_token_id to be a whole number, found None"),
        ({"vocab_size": 0}, "expected vocab_size to be at least 1, found 0"),
        ({"target_layer_ids": "0,1,2"}, "expected target_layer_ids to be ascending layer numbers"),
        ({"target_layer_ids": (0, 2, 1)}, r"ascending layer numbers from 0 on, each once, found \[0, 2, 1\]"),
        ({"target_layer_ids": (0, 1, 1)}, "ascending layer numbers from 0 on, each once"),
        ({"target_layer_ids": (-1, 0, 1)}, "ascending layer numbers from 0 on"),
        (
            {"target_layer_ids": (1, 2, 3), "target_config": {"text_config": {"num_hidden_layers": 3}}},
            r"expected target_layer_ids in 0\.\.2 \(num_hidden_layers 3 of target_config\), found \[1, 2, 3\]",
        ),
    ],
)
def test_a_description_that_training_would_refuse_is_refused_by_the_writer(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        writer(tmp_path / "data", **change)
    assert not (tmp_path / "data").exists()


def test_hidden_states_in_another_shape_or_type_are_told_what_to_do(tmp_path: Path) -> None:
    out, sample = writer(tmp_path), random_sample(40)
    ids, mask, states = sample["input_ids"], sample["loss_mask"], sample["hidden_states"]
    with pytest.raises(ValueError, match=r"found \[40, 3, 8\]. Flatten them: a row a token, its taps side by side"):
        out.add(ids, mask, states.view(40, len(TAPS), HIDDEN_SIZE))
    with pytest.raises(ValueError, match=r"found \[39, 24\]. Give a row for every token"):
        out.add(ids, mask, states[1:])
    with pytest.raises(ValueError, match=r"found \[40, 16\]. Correct target_layer_ids"):
        out.add(ids, mask, states[:, :16])
    with pytest.raises(ValueError, match="expected hidden_states of a float type in sample 0, found torch.int64"):
        out.add(ids, mask, states.long())


def test_hidden_states_of_numpy_and_of_more_bits_are_rounded(tmp_path: Path) -> None:
    sample = random_sample(40)
    states = sample["hidden_states"].float() + 1e-4
    with writer(tmp_path) as out:
        out.add(sample["input_ids"].numpy(), sample["loss_mask"].numpy(), states.numpy())
        out.add(sample["input_ids"], sample["loss_mask"], states)
    read = Dataset(tmp_path)
    for index in range(2):
        assert torch.equal(read.sample(index).hidden_states, states.bfloat16())


def test_a_head_is_wanted_of_a_target_that_has_one_of_its_own(tmp_path: Path) -> None:
    embed, head, norm = target_tensors().values()
    out = writer(tmp_path, target_config={"tie_word_embeddings": False})
    with pytest.raises(
        ValueError, match=r"expected lm_head \[V, D\], found None although .* tie_word_embeddings false"
    ):
        out.write_target(embed, None, norm)
    out.write_target(embed, head, norm)
    with pytest.raises(ValueError, match=r"expected norm.weight \[8\], found NoneType"):
        out.write_target(embed, head, None)  # type: ignore[arg-type]
