"""Folders of other trainers that are damaged, mixed or hostile: every bad file is named with its reason, and nothing runs."""

import gzip
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from buffers.foreign import ForeignDataset
from buffers.open_dataset import open_dataset
from tests.foreign_helpers import FIXTURES, archive, facts, specforge_values, truth, write_specforge, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def copied(name: str, tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / name, tmp_path / name)
    return tmp_path / name


class Code:
    """Pickled, it makes a folder as it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def changed(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in (specforge_values(truth()[4]) | values).items() if value is not None}


def damages(tmp_path: Path) -> dict[str, tuple[bytes, str]]:
    """Content of data_4.ckpt -> the reason that is given for it."""
    whole = (FIXTURES / "specforge" / "rows_4-8" / "data_4.ckpt").read_bytes()
    packed = gzip.compress(whole)
    T, hidden = 31, truth()[4]["hidden_states"]
    meta = torch.ones(T, 192, dtype=torch.bfloat16, device="meta")
    ids, mask = truth()[4]["input_ids"], truth()[4]["loss_mask"]
    return {
        "empty": (b"", "expected a file of torch.save, found an empty file"),
        "text": (b"hello", "expected a file of torch.save, found other content"),
        "truncated": (whole[: len(whole) // 2], "found a truncated or damaged one"),
        "truncated gz": (gzip.compress(whole)[:900], "expected a whole gzip file, found a damaged one"),
        # The deflate stream itself: zlib's own error, which gzip passes on.
        "damaged gz": (packed[:40] + bytes(40) + packed[80:], "expected a whole gzip file, found a damaged one"),
        "bomb": (gzip.compress(b"PK\x03\x04" + bytes(9_000_000)), "expected gzip data of at most"),
        "code": (archive({"input_ids": Code(tmp_path / "ran")}), "which could run code or take memory. It was not opened"),
        "code gz": (archive({"input_ids": Code(tmp_path / "ran")}, packed=True), "could run code"),
        "meta": (archive(changed(hidden_states=meta)), "asks for torch._utils._rebuild_meta_tensor_no_storage"),
        "sparse": (archive(changed(hidden_states=hidden.to_sparse())), "asks for torch._utils._rebuild_sparse_tensor"),
        "list": (archive([1, 2]), "expected a dictionary of tensors, found list"),
        "no mask": (archive(changed(loss_mask=None)), "found no loss_mask"),
        "no states": (archive(changed(hidden_states=None)), "found no hidden_states"),
        "short mask": (archive(changed(loss_mask=mask[1:].long())), f"expected {T} tokens in loss_mask as in input_ids"),
        "short states": (archive(changed(hidden_states=hidden[:-2])), f"expected {T} tokens in hidden_states as in input_ids"),
        "mask of 2": (archive(changed(loss_mask=mask.long() * 2)), "expected loss_mask values 0 and 1, found 2 at position"),
        "float ids": (archive(changed(input_ids=ids.float())), "expected input_ids as one of int32, int64, int16, found float32"),
        "int states": (archive(changed(hidden_states=hidden.int())), "as one of bfloat16, float16, float32, found int32"),
        "fp64 states": (archive(changed(hidden_states=hidden.double())), "found float64"),
        "two rows": (archive(changed(hidden_states=hidden[None].repeat(2, 1, 1))), "expected hidden_states with 2 axes"),
        "text ids": (archive(changed(input_ids="1 2 3")), "expected input_ids as a dense tensor, found str"),
        "no tokens": (archive({name: tensor[:0] for name, tensor in changed().items()}), "expected at least one token"),
        "grown": (archive(changed(hidden_states=hidden[:1, :1].expand(10**6, 192))), "expected hidden_states to fit the file's"),
        "eagle3": (archive(changed(aux_hidden_state=hidden)), "found EAGLE3's keys"),
        "other vocabulary": (archive(changed(input_ids=ids.long() + 500)), "another tokenizer's"),
        "other width": (archive(changed(hidden_states=hidden[:, :128])), "expected hidden states of 192 values a token"),
    }  # fmt: skip


def test_every_bad_file_is_named_with_its_reason(target: Path, tmp_path: Path) -> None:
    folder = copied("specforge", tmp_path)
    expected = {}
    for number, (content, reason) in enumerate(damages(tmp_path).values()):
        name = f"rows_4-8/data_{100 + number}.ckpt"
        (folder / name).write_bytes(content)
        expected[name] = reason
    with pytest.raises(
        ValueError, match=rf"{len(expected)} of {10 + len(expected)} samples cannot be used: rows_4-8/data_100.ckpt"
    ) as error:
        open_dataset(folder, facts(target))
    assert "and 21 more" in str(error.value) and "set data.on_bad_file to skip" in str(error.value)
    assert "\n" not in str(error.value)
    dataset = open_dataset(folder, facts(target, on_bad_file="skip"))
    assert len(dataset) == 10
    assert set(dataset.bad_files) == set(expected)
    for name, reason in expected.items():
        assert reason in dataset.bad_files[name], (name, dataset.bad_files[name])
    assert f"{len(expected)} files cannot be used and are left out" in dataset.notes[0]
    assert not (tmp_path / "ran").exists()


def test_the_pickle_that_was_refused_would_have_run(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(archive({"input_ids": Code(tmp_path / "ran")}))
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "ran").is_dir()


def test_nothing_usable(target: Path, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"found no file that can be used: a.ckpt: expected a file of torch.save"):
        open_dataset(tmp_path, facts(target))
    with pytest.raises(
        ValueError, match="expected a dataset with dataset.json in .*, found none, nor hidden states of SpecForge"
    ):
        open_dataset(target, facts(target))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("specforge", "modelopt", r"found Model-Optimizer \(conv-000.pt\) and SpecForge \(rows_0-4/data_0.ckpt\)"),
        (
            "specforge",
            "deepspec",
            r"found DeepSpec \(manifest.json\) and SpecForge or Model-Optimizer \(rows_0-4/data_0.ckpt\)",
        ),
        (
            "speculators",
            "modelopt",
            r"found speculators \(hidden_states/hs_0.safetensors\) and SpecForge or Model-Optimizer",
        ),
    ],
)
def test_two_formats_in_one_folder_are_refused(
    first: str, second: str, message: str, target: Path, tmp_path: Path
) -> None:
    folder = copied(first, tmp_path)
    shutil.copytree(FIXTURES / second, folder, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=f"expected the files of one format in .*, {message}"):
        open_dataset(folder, facts(target))


def test_ours_and_another_in_one_folder_are_refused(tmp_path: Path) -> None:
    from tests.run_helpers import training_dataset

    own = training_dataset(tmp_path / "own")
    shutil.copy(FIXTURES / "modelopt" / "conv-000.pt", own)
    with pytest.raises(
        ValueError, match=r"found dflash-engine \(dataset.json\) and SpecForge or Model-Optimizer \(conv-000.pt\)"
    ):
        open_dataset(own)


def test_links_out_of_the_folder_are_not_followed(target: Path, tmp_path: Path) -> None:
    folder = write_specforge(tmp_path / "x")
    (folder / "rows_0-2000" / "data_10.ckpt").symlink_to(FIXTURES / "specforge" / "rows_0-4" / "data_0.ckpt")
    (folder / "more").symlink_to(FIXTURES / "specforge")
    (folder / "rows_0-2000" / "data_11.ckpt").symlink_to("data_3.ckpt")
    dataset = open_dataset(folder, facts(target, on_bad_file="skip"))
    assert len(dataset) == 11
    assert dataset.bad_files == {
        "rows_0-2000/data_10.ckpt": "expected files inside the folder, found a link that leads out of it"
    }


def test_last_hidden_in_some_files_only(target: Path, tmp_path: Path) -> None:
    def change(values: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
        return values | ({} if len(sample["input_ids"]) == 31 else {"target_last_hidden_states": sample["last_hidden"]})

    folder = write_specforge(tmp_path / "x", change)
    dataset = open_dataset(folder, facts(target, on_bad_file="skip"))
    assert dataset.bad_files == {
        "rows_0-2000/data_4.ckpt": "expected a last hidden state as in the other files, found none"
    }
    assert len(open_dataset(folder, facts(target, last_hidden_norm="none"))) == 10


# speculators


def test_speculators_damage(target: Path, tmp_path: Path) -> None:
    folder = copied("speculators", tmp_path)
    states = folder / "hidden_states"
    (states / "hs_1.safetensors").unlink()
    whole = (states / "hs_2.safetensors").read_bytes()
    (states / "hs_2.safetensors").write_bytes(whole[:-100])
    (states / "hs_3.safetensors").write_bytes(b"")
    tensors = load_file(states / "hs_4.safetensors")
    save_file({"token_ids": tensors["token_ids"]}, str(states / "hs_4.safetensors"))
    shutil.copy(states / "hs_0.safetensors", states / "hs_7.safetensors")
    save_file(tensors | {"hidden_states": tensors["hidden_states"].flatten(1)}, str(states / "hs_6.safetensors"))
    shutil.copy(states / "hs_0.safetensors", states / "hs_12.safetensors")
    dataset = open_dataset(folder, facts(target, on_bad_file="skip"))
    assert isinstance(dataset, ForeignDataset)
    assert [dataset.name(i) for i in range(len(dataset))] == [f"hidden_states/hs_{i}.safetensors" for i in (0, 5, 8, 9)]
    reasons = {name.removeprefix("hidden_states/"): reason for name, reason in dataset.bad_files.items()}
    for name, reason in {
        "hs_1.safetensors (row 1)": "expected the hidden states of row 1 of the Arrow dataset, found no file",
        "hs_2.safetensors": "truncated or half-written",
        "hs_3.safetensors": "truncated or half-written",
        "hs_4.safetensors": "found no hidden_states",
        "hs_7.safetensors": "expected token_ids as input_ids of row 7 of the Arrow dataset, found others",
        "hs_6.safetensors": r"expected hidden_states [T, taps + 1, D], found shape [31, 256]",
        "hs_12.safetensors": "expected a row of the Arrow dataset, which has 10 rows, found none for it",
    }.items():
        assert reason in reasons.pop(name), name
    assert not reasons


def test_speculators_without_its_arrow_dataset(target: Path, tmp_path: Path) -> None:
    folder = copied("speculators", tmp_path)
    (arrow,) = folder.rglob("*.arrow")
    whole = arrow.read_bytes()
    arrow.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"data-00000-of-00001.arrow: expected an Arrow stream, found a damaged one"):
        open_dataset(folder, facts(target))
    arrow.unlink()
    with pytest.raises(ValueError, match="expected the Arrow dataset of the hidden states in .* found none. Put"):
        open_dataset(folder, facts(target))


def test_arrow_of_two_files_and_other_columns(target: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.ipc

    folder = copied("speculators", tmp_path)
    (arrow,) = folder.rglob("*.arrow")
    table = pyarrow.ipc.open_stream(arrow.read_bytes()).read_all()

    def write(name: str, rows: Any) -> None:
        with pyarrow.OSFile(str(arrow.with_name(name)), "wb") as sink, pyarrow.ipc.new_stream(sink, rows.schema) as out:
            for batch in rows.to_batches(max_chunksize=2):
                out.write_batch(batch)

    # state.json's order counts, not that of the names.
    write("z.arrow", table.slice(0, 3))
    write("a.arrow", table.slice(3))
    arrow.unlink()
    files = [{"filename": "z.arrow"}, {"filename": "a.arrow"}]
    (arrow.parent / "state.json").write_text(json.dumps({"_data_files": files}))
    dataset = open_dataset(folder, facts(target))
    assert [int(n) for n in dataset.lengths] == [len(sample["input_ids"]) for sample in truth()]
    (arrow.parent / "state.json").write_text(json.dumps({"_data_files": [*files, {"filename": "../../b.arrow"}]}))
    with pytest.raises(ValueError, match=r"expected its files beside it, found no Arrow file .*b.arrow"):
        open_dataset(folder, facts(target))
    (arrow.parent / "state.json").unlink()
    write("a.arrow", table.slice(3).drop_columns(["loss_mask"]))
    with pytest.raises(ValueError, match="input_ids and loss_mask as columns of lists, found no loss_mask"):
        open_dataset(folder, facts(target))


# DeepSpec


def rewrite_index(folder: Path, sample: int, field: int, value: int) -> None:
    record = struct.Struct("<QIIQQQQQ")
    content = bytearray((folder / "samples.idx").read_bytes())
    values = list(record.unpack_from(content, sample * record.size))
    values[field] = value
    record.pack_into(content, sample * record.size, *values)
    (folder / "samples.idx").write_bytes(content)


def test_a_deepspec_shard_that_is_cut_while_it_is_read(target: Path, tmp_path: Path) -> None:
    folder = copied("deepspec", tmp_path)
    dataset = open_dataset(folder, facts(target))
    os.truncate(folder / "shard-00000.bin", 100)
    with pytest.raises(ValueError, match="shard-00000.bin.*as when it was opened, found 100: it was cut"):
        dataset.sample(0)


def test_deepspec_damage(target: Path, tmp_path: Path) -> None:
    folder = copied("deepspec", tmp_path)
    shard = folder / "shard-00002.bin"  # sample 2
    shard.write_bytes(shard.read_bytes()[:-1])
    (folder / "shard-00005.bin").unlink()  # sample 6
    rewrite_index(folder, 0, 1, 99)
    rewrite_index(folder, 1, 6, 2**63)
    rewrite_index(folder, 5, 2, 2**32 - 1)
    rewrite_index(folder, 8, 2, 0)
    dataset = open_dataset(folder, facts(target, on_bad_file="skip"))
    assert len(dataset) == 4
    for name, reason in {
        "shard 99, sample 0": "expected one of 8 shards, found shard 99",
        "shard-00001.bin, sample 1": "expected hidden_states in bytes 9223372036854775808",
        "shard-00002.bin, sample 2": "found a shard of 24863: truncated",
        "shard-00004.bin, sample 5": "expected input_ids in bytes 0 to 17179869180",
        "shard-00005.bin, sample 6": "expected the shard's file, found none",
        "shard-00007.bin, sample 8": "expected at least one token",
    }.items():
        assert reason in dataset.bad_files[name], (name, dataset.bad_files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "manifest.json: expected version 2, found 3; this version is not read"),
        ({"hidden_dtype": "float8_e4m3fn"}, "expected hidden_dtype bfloat16, found 'float8_e4m3fn'"),
        ({"num_samples": 11}, "samples.idx: expected 11 records of 56 bytes as manifest.json says, found 560 bytes"),
        ({"hidden_size": "64"}, "expected DeepSpec's manifest, found a damaged one"),
        ({"shards": [{"file_name": "../x.bin", "shard_id": 0}]}, "expected shards inside the folder, found '../x.bin'"),
        ({"shards": [{"file_name": "shard-00000.bin", "shard_id": 1}]}, "of shards numbered from 0"),
    ],
)
def test_deepspec_manifest(change: dict[str, Any], message: str, target: Path, tmp_path: Path) -> None:
    folder = copied("deepspec", tmp_path)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        open_dataset(folder, facts(target))
