"""Other trainers' hidden states: read as they wrote them, tensor for tensor, whatever the variant."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from buffers.dataset import SampleSource
from buffers.open_dataset import open_dataset
from buffers.raw_sample import Measured
from tests.foreign_helpers import (
    COUNT,
    FIXTURES,
    FORMATS,
    TAPS,
    D,
    archive,
    facts,
    truth,
    write_specforge,
    write_target,
)

NORMS = {"specforge": None, "speculators": "pre", "modelopt": "pre", "deepspec": "post"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def same_as_truth(dataset: SampleSource) -> None:
    assert len(dataset) == COUNT
    for index, expected in enumerate(truth()):
        sample = dataset.sample(index)
        for name, tensor in expected.items():
            found = getattr(sample, name)
            if name == "last_hidden" and dataset.info.last_hidden_norm is None:
                assert found is None
                continue
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), (index, name)
        mask = expected["loss_mask"].tolist()
        assert dataset.lengths[index] == len(mask)
        assert dataset.supervised_counts[index] == sum(mask)
        assert dataset.eligible_counts[index] == sum(a and b for a, b in zip(mask, mask[1:], strict=False))


@pytest.mark.parametrize("name", FORMATS)
def test_fixture(name: str, target: Path) -> None:
    said = facts(target, last_hidden_norm="pre" if name == "modelopt" else "auto")
    dataset = open_dataset(FIXTURES / name, said)
    same_as_truth(dataset)
    assert dataset.info.last_hidden_norm == NORMS[name]
    assert dataset.info.target_layer_ids == TAPS and dataset.info.hidden_size == D
    assert not dataset.notes and not dataset.bad_files
    part, whole = dataset.sample(3, 5, 9), truth()[3]
    assert torch.equal(part.hidden_states, whole["hidden_states"][5:9])
    assert torch.equal(part.input_ids, whole["input_ids"][5:9])


@pytest.mark.parametrize("name", FORMATS)
def test_content_is_recognised_whatever_the_names(name: str, target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(FIXTURES / name, folder)
    if name in ("specforge", "modelopt"):
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                file.rename(file.with_name(file.stem + ".states"))
    if name == "speculators":
        (folder / "data").rename(folder / "tokens")
        (folder / "hidden_states").rename(folder / "h")
    (folder / "README.md").write_text("what this is")
    (folder / "log.json").write_text("{}")
    (folder / "dataset.json").write_text('[{"conversations": []}]')
    same_as_truth(open_dataset(folder, facts(target, last_hidden_norm="none")))


def unsqueezed(values: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor[None] for name, tensor in values.items()} | {"target_last_hidden_states": None}


def with_last_hidden(values: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    return values | {"target_last_hidden_states": sample["last_hidden"][None]}


def dspark(values: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    states = {"target_hidden_states": values.pop("hidden_states")}
    return with_last_hidden(values | states, sample) | {"seq_len": torch.tensor([5])}


def bool_mask(values: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    return values | {"loss_mask": values["loss_mask"].bool(), "input_ids": values["input_ids"].int()}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("change", [unsqueezed, with_last_hidden, dspark, bool_mask])
def test_specforge_variants(change: Any, packed: bool, target: Path, tmp_path: Path) -> None:
    folder = write_specforge(tmp_path / "x", change, packed=packed, suffix=".ckpt.gz" if packed else ".ckpt")
    dataset = open_dataset(folder, facts(target))
    same_as_truth(dataset)
    assert dataset.info.last_hidden_norm == ("post" if change in (with_last_hidden, dspark) else None)
    assert [("gzipped" in note) for note in dataset.notes] == [True] * packed


def test_a_dataset_is_the_same_to_a_checkpoint_plain_or_gzipped(target: Path, tmp_path: Path) -> None:
    digests = {open_dataset(FIXTURES / "specforge", facts(target)).digest}
    digests.add(open_dataset(write_specforge(tmp_path / "gz", packed=True), facts(target)).digest)
    assert len(digests) == 1
    changed = write_specforge(tmp_path / "other", lambda v, s: v | {"loss_mask": torch.ones_like(v["loss_mask"])})
    digests.add(open_dataset(changed, facts(target)).digest)
    reordered = write_specforge(tmp_path / "reordered")
    (reordered / "rows_0-2000" / "data_0.ckpt").rename(reordered / "rows_0-2000" / "data_99.ckpt")
    digests.add(open_dataset(reordered, facts(target)).digest)
    assert len(digests) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_wider_hidden_states_are_rounded_and_said(dtype: torch.dtype, target: Path, tmp_path: Path) -> None:
    folder = write_specforge(tmp_path / "x", lambda v, s: v | {"hidden_states": v["hidden_states"].to(dtype) * 1.001})
    dataset = open_dataset(folder, facts(target))
    (note,) = dataset.notes
    assert f"10 samples have {str(dtype)[6:]} hidden states; they are rounded to bf16" in note
    expected = (truth()[2]["hidden_states"].to(dtype) * 1.001).bfloat16()
    assert torch.equal(dataset.sample(2).hidden_states, expected)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("specforge", ["data.target ", "data.target_layer_ids", "data.mask_token_id"]),
        ("speculators", ["data.target ", "data.target_layer_ids", "data.mask_token_id"]),
        ("modelopt", ["data.target ", "data.target_layer_ids", "data.mask_token_id", "data.last_hidden_norm"]),
        ("deepspec", ["data.target ", "data.mask_token_id"]),
    ],
)
def test_one_error_names_all_that_is_missing(name: str, missing: list[str]) -> None:
    with pytest.raises(ValueError, match=f"expected {len(missing)} more settings") as error:
        open_dataset(FIXTURES / name)
    assert [word in str(error.value) for word in missing] == [True] * len(missing)
    assert str(error.value).count(" data.") == len(missing)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepspec", {"target_layer_ids": (2, 3, 4)}, r"data.target_layer_ids to be \[1, 2, 3\] as the dataset says"),
        ("specforge", {"target_layer_ids": (1, 2, 5)}, r"different layers of 0..4 .* found \[1, 2, 5\]"),
        ("specforge", {"target_layer_ids": (1, 2, 2)}, r"different layers of 0..4"),
        ("specforge", {"target_layer_ids": (1, 2)}, r"expected hidden states of 128 values a token .* found 192"),
        ("specforge", {"mask_token_id": 512}, r"data.mask_token_id in 0..511"),
        ("specforge", {"target": "nowhere"}, r"data.target: expected the target's checkpoint with nowhere/config.json"),
    ],
)
def test_facts_that_cannot_be(name: str, changes: dict[str, Any], message: str, target: Path) -> None:
    with pytest.raises(ValueError, match=message):
        open_dataset(FIXTURES / name, facts(target, **changes))


def test_sizes_come_from_the_target(tmp_path: Path) -> None:
    nested = write_target(
        tmp_path / "nested", text_config={"hidden_size": D, "vocab_size": 512, "num_hidden_layers": 5}
    )
    same_as_truth(open_dataset(FIXTURES / "specforge", facts(nested)))
    other = write_target(tmp_path / "other", hidden_size=32)
    with pytest.raises(ValueError, match="the hidden size of data.target to be 64 as the dataset says, found 32"):
        open_dataset(FIXTURES / "deepspec", facts(other))
    with pytest.raises(ValueError, match=r"expected hidden_size in .*config.json, found None"):
        open_dataset(FIXTURES / "specforge", facts(write_target(tmp_path / "none", hidden_size=None)))


def test_only_files_that_changed_are_read_again(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_specforge(tmp_path / "x", packed=True)
    first = open_dataset(folder, facts(target))
    read: list[int] = []

    def counted(reader: Any, index: int) -> Measured:
        read.append(index)
        return original(reader, index)

    import buffers.foreign_scan

    original = buffers.foreign_scan._read
    monkeypatch.setattr(buffers.foreign_scan, "_read", counted)
    again = open_dataset(folder, facts(target))
    assert read == [] and again.digest == first.digest and (again.lengths == first.lengths).all()
    short = {name: tensor[:4] for name, tensor in truth()[7].items() if name != "last_hidden"}
    (folder / "rows_0-2000" / "data_7.ckpt").write_bytes(archive(short))
    assert open_dataset(folder, facts(target)).lengths[7] == 4
    assert read == [7]


def test_a_file_that_changes_while_it_is_open_is_named(target: Path, tmp_path: Path) -> None:
    folder = write_specforge(tmp_path / "x")
    dataset = open_dataset(folder, facts(target))
    file = folder / "rows_0-2000" / "data_7.ckpt"
    file.unlink()
    file.write_bytes((folder / "rows_0-2000" / "data_3.ckpt").read_bytes())
    with pytest.raises(ValueError, match="data_7.ckpt: expected what it held when the dataset was opened"):
        dataset.sample(7)
    file.unlink()
    with pytest.raises(ValueError, match="data_7.ckpt: .*it could be read when the dataset was opened"):
        dataset.sample(7)


def test_our_own_dataset_says_everything_itself(target: Path, tmp_path: Path) -> None:
    from tests.run_helpers import training_dataset

    own = training_dataset(tmp_path / "own", last_hidden_norm="pre")
    assert open_dataset(own).info.target_layer_ids == (1, 3, 4)
    with pytest.raises(
        ValueError, match=r"data.target_layer_ids to be \(1, 3, 4\) as .* has recorded, found \(1, 2, 3\)"
    ):
        open_dataset(own, facts(target))
    with pytest.raises(ValueError, match=r"data.last_hidden_norm to be pre"):
        open_dataset(own, facts(target, target_layer_ids=(), mask_token_id=-1, last_hidden_norm="post"))
