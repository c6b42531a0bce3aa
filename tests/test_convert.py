"""`dflash-engine data convert`: the same tensors in our format, whatever happens on the way."""

import json
import weakref
from pathlib import Path

import pytest
import torch

from bench.cli import main
from buffers.dataset import Dataset, Sample, load_target_tensors
from buffers.dataset_writer import DatasetWriter
from buffers.foreign import ForeignDataset
from engine.run_folder import alone_in
from tests.foreign_helpers import FIXTURES, FORMATS, MASK, archive, truth, write_specforge, write_target
from tests.run_helpers import files_under

NO_NORM = {"modelopt": ["--last-hidden-norm", "pre"]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def arguments(source: Path, out: Path, target: Path, *more: str) -> list[str]:
    said = ["--target", str(target), "--target-layer-ids", "1,2,3", "--mask-token-id", str(MASK)]
    return ["data", "convert", str(source), str(out), *said, "--shard-tokens", "120", *more]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(FIXTURES / name, tmp_path / "out", target, "--json"), *NO_NORM.get(name, [])]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["samples"] == 10 and figures["tokens"] == 427 and figures["verified"] and figures["with_target"]
    dataset = Dataset(tmp_path / "out")
    dataset.verify()
    assert len(dataset.info.shards) == figures["shards"] > 3
    for i, expected in enumerate(truth()):
        sample = dataset.sample(i)
        for key, tensor in expected.items():
            found = getattr(sample, key)
            assert torch.equal(found, tensor) if found is not None else (key, name) == ("last_hidden", "specforge")
    ours, theirs = load_target_tensors(tmp_path / "out"), load_target_tensors(target)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert sorted(path.name for path in (tmp_path / "out").iterdir())[0] == "dataset.json"
    assert not (tmp_path / "out" / "unfinished.json").exists()


@pytest.mark.parametrize("samples", [0, 1, 4, 9])
def test_killed_and_gone_on_with(
    samples: int, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(FIXTURES / "deepspec", tmp_path / "once", target)) == 0
    add = DatasetWriter.add

    def dies(writer: DatasetWriter, *sample: torch.Tensor) -> int:
        if writer.num_samples == samples:
            raise KeyboardInterrupt
        return add(writer, *sample)

    with monkeypatch.context() as patch:
        patch.setattr(DatasetWriter, "add", dies)
        assert main(arguments(FIXTURES / "deepspec", tmp_path / "out", target)) == 130
    assert not (tmp_path / "out" / "dataset.json").exists()
    capsys.readouterr()
    assert main(arguments(FIXTURES / "deepspec", tmp_path / "out", target)) == 0
    kept = {0: 0, 1: 0, 4: 2, 9: 7}[samples]
    assert (f"going on after {kept} of 10 samples" in capsys.readouterr().err) == bool(kept)
    assert files_under(tmp_path / "out") == files_under(tmp_path / "once")


def test_only_its_own_dataset_is_taken_up(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(FIXTURES / "deepspec", tmp_path / "out", target)) == 0
    whole = files_under(tmp_path / "out")
    assert main(arguments(FIXTURES / "deepspec", tmp_path / "out", target)) == 0
    assert "out is whole already" in capsys.readouterr().err
    assert main(arguments(FIXTURES / "specforge", tmp_path / "out", target)) == 1
    assert "found a dataset of another target_name, last_hidden_norm. Choose another folder" in capsys.readouterr().err
    assert files_under(tmp_path / "out") == whole
    (tmp_path / "out" / "dataset.json").unlink()
    assert main(arguments(FIXTURES / "deepspec", tmp_path / "out", target)) == 1
    assert "to hold no dataset, found shard-*" in capsys.readouterr().err


def test_bad_files(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_specforge(tmp_path / "data")
    (data / "rows_0-2000" / "data_3.ckpt").write_bytes(archive([1]))
    assert main(arguments(data, tmp_path / "out", target)) == 1
    assert "data_3.ckpt: expected a dictionary of tensors, found list" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*arguments(data, tmp_path / "out", target, "--skip-bad"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["samples"] == 9 and list(figures["bad_files"]) == ["rows_0-2000/data_3.ckpt"]
    assert torch.equal(Dataset(tmp_path / "out").sample(3).hidden_states, truth()[4]["hidden_states"])


def test_gzipped_fp32(target: Path, tmp_path: Path) -> None:
    data = write_specforge(
        tmp_path / "data",
        lambda values, sample: values | {"hidden_states": values["hidden_states"].float() * 1.001},
        packed=True,
    )
    assert main(arguments(data, tmp_path / "out", target)) == 0
    expected = (truth()[5]["hidden_states"].float() * 1.001).bfloat16()
    assert torch.equal(Dataset(tmp_path / "out").sample(5).hidden_states, expected)


def test_hidden_states_in_memory_are_bounded_whatever_the_source(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are read, not more than two shards are held at a time."""
    data = write_specforge(tmp_path / "data", packed=True)
    held = most = 0
    read = ForeignDataset.sample

    def watched(self: ForeignDataset, i: int, start: int = 0, stop: int | None = None) -> Sample:
        nonlocal held, most
        sample = read(self, i, start, stop)
        tokens = len(sample.input_ids)
        held += tokens
        most = max(most, held)

        def forget() -> None:
            nonlocal held
            held -= tokens

        weakref.finalize(sample.hidden_states, forget)
        return sample

    monkeypatch.setattr(ForeignDataset, "sample", watched)
    assert main(arguments(data, tmp_path / "out", target)) == 0
    assert 60 < most <= 2 * 120 < int(Dataset(tmp_path / "out").lengths.sum()) and held == 0


def test_what_was_written_is_compared(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add = DatasetWriter.add

    def wrong(
        writer: DatasetWriter, ids: torch.Tensor, mask: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor | None
    ) -> int:
        return add(writer, ids, mask, -hidden if writer.num_samples == 6 else hidden, last)

    monkeypatch.setattr(DatasetWriter, "add", wrong)
    assert main(arguments(FIXTURES / "deepspec", tmp_path / "out", target)) == 1
    assert "expected sample 6 to be shard-00005.bin, sample 6, found another" in capsys.readouterr().err


def test_a_target_without_weights(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    assert main(arguments(FIXTURES / "deepspec", tmp_path / "out", tmp_path)) == 0
    assert "the dataset gets no target.safetensors, and training from it needs data.target" in capsys.readouterr().err


def test_one_at_a_time(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    args = arguments(FIXTURES / "specforge", out, target)
    with alone_in(out):
        assert main(args) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"error: OUT: another conversion is writing to {out}; wait for its end, or choose another folder"
    assert not list(out.iterdir())
    assert main(args) == 0


@pytest.mark.parametrize(
    ("out", "message"), [("data/x", "expected a folder outside"), ("data", "expected a folder outside")]
)
def test_not_into_the_source(
    out: str, message: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_specforge(tmp_path / "data")
    assert main(arguments(data, tmp_path / out, target)) == 1
    assert message in capsys.readouterr().err


def test_our_own_is_used_as_it_is(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(FIXTURES / "deepspec", tmp_path / "out", target)) == 0
    assert main(arguments(tmp_path / "out", tmp_path / "again", target)) == 1
    assert "found a dataset of ours. Use it as it is" in capsys.readouterr().err


def test_inspect_lists_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_specforge(tmp_path / "data")
    assert main(["data", "inspect", str(data), "--verify"]) == 0
    (data / "rows_0-2000" / "data_3.ckpt").write_bytes(b"")
    (data / "rows_0-2000" / "data_4.ckpt").write_bytes(archive({"input_ids": torch.ones(3)}))
    capsys.readouterr()
    assert main(["data", "inspect", str(data), "--json"]) == 1
    told = capsys.readouterr().out
    assert "bad_files: rows_0-2000/data_3.ckpt: expected a file of torch.save, found an empty file" in told
    figures = json.loads(told.splitlines()[-1])
    assert figures["samples"] == 8 and len(figures["bad_files"]) == 2 and len(figures["missing_settings"]) == 3
