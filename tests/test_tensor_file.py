"""Files of tensors written in pieces: what the library reads back, their checksum, and what stops them."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine import tensor_file
from engine.tensor_file import NonFinite, write_tensors
from tests.drafter_helpers import assert_same_bits


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 64)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.randn(7, 13),
        "one": torch.tensor(3),
        "none": torch.zeros(0, 2, dtype=torch.int64),
        "wide": torch.randn(5, dtype=torch.float64),
        "view": torch.randn(4, 50)[1:3],
    }


def test_the_library_reads_what_was_written_and_the_checksum_is_the_files(tmp_path: Path) -> None:
    file, expected = tmp_path / "a.safetensors", tensors()
    written = write_tensors(file, expected)
    found = load_file(file)
    assert_same_bits(found, expected)
    assert all(found[name].shape == tensor.shape for name, tensor in expected.items())
    assert written.num_bytes == file.stat().st_size
    assert written.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_tensor_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    wrong = tensors()
    wrong["matrix"][6, 12] = wrong["wide"][0] = value
    with pytest.raises(NonFinite) as error:
        write_tensors(tmp_path / "a.safetensors", wrong)
    assert sorted(error.value.names) == ["matrix", "wide"]


def test_writing_ends_between_two_pieces(tmp_path: Path) -> None:
    pieces = iter(range(4))

    def between() -> None:
        if next(pieces, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "a.safetensors", tensors(), between)
    assert (tmp_path / "a.safetensors").stat().st_size < 7 * 13 * 4 + 600


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="could not write .*nowhere/a.safetensors: .* Make room or choose another folder"):
        write_tensors(tmp_path / "nowhere" / "a.safetensors", tensors())
