"""A dataset whose writer died is finished by the next one, shard for shard the same."""

from pathlib import Path

import pytest

from buffers.dataset import Dataset, DatasetWriter
from tests.dataset_helpers import random_sample, writer
from tests.run_helpers import files_under

LENGTHS = (100, 90, 80, 120, 60, 110, 40)


def add(out: DatasetWriter, stop: int = len(LENGTHS)) -> None:
    """Adds what is missing, as a caller does that goes on."""
    for index in range(out.num_samples, stop):
        sample = random_sample(LENGTHS[index], index)
        del sample["last_hidden"]
        out.add(**sample)


def written_at_once(path: Path) -> dict[str, bytes]:
    with writer(path, shard_tokens=200) as out:
        add(out)
    return files_under(path)


@pytest.mark.parametrize("died_after", [1, 3, 5, 7])
def test_a_writer_goes_on_where_another_died(tmp_path: Path, died_after: int) -> None:
    add(writer(tmp_path / "data", shard_tokens=200, resume=True, source="x"), died_after)
    out = writer(tmp_path / "data", shard_tokens=200, resume=True, source="x")
    assert out.num_samples == {1: 0, 3: 2, 5: 4, 7: 6}[died_after]
    with out:
        add(out)
    assert files_under(tmp_path / "data") == written_at_once(tmp_path / "once")
    Dataset(tmp_path / "data").verify()


def test_a_shard_that_was_not_listed_is_written_again(tmp_path: Path) -> None:
    add(writer(tmp_path / "data", shard_tokens=200), 5)
    (tmp_path / "data" / "shard-00002.safetensors").write_bytes(b"whole when the writer died")
    with writer(tmp_path / "data", shard_tokens=200, resume=True) as out:
        add(out)
    assert files_under(tmp_path / "data") == written_at_once(tmp_path / "once")


def test_only_the_same_work_is_gone_on_with(tmp_path: Path) -> None:
    add(writer(tmp_path / "data", shard_tokens=200, source="a"), 5)
    with pytest.raises(ValueError, match="of the same source and settings, found another source. Choose another"):
        writer(tmp_path / "data", resume=True, source="b")
    with pytest.raises(ValueError, match="found another target_name, mask_token_id. Choose"):
        writer(tmp_path / "data", resume=True, source="a", target_name="other", mask_token_id=3)
    with pytest.raises(ValueError, match=r"to hold no dataset, found shard-\*"):
        writer(tmp_path / "data", source="a")


def test_damaged_unfinished_work_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    add(writer(data, shard_tokens=200), 5)
    shard = data / "shard-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"expected {len(whole)} bytes in .*shard-00001.safetensors"):
        writer(data, resume=True)
    (data / "unfinished.json").write_text("[]")
    with pytest.raises(ValueError, match=r"expected the list of shards in .*unfinished.json, found a damaged one"):
        writer(data, resume=True)


def test_a_finished_dataset_is_not_gone_on_with(tmp_path: Path) -> None:
    written_at_once(tmp_path / "data")
    with pytest.raises(ValueError, match="to hold no dataset, found dataset.json"):
        writer(tmp_path / "data", resume=True)
