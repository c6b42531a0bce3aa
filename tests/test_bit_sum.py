"""One number for all bits of some tensors: what changes it, and what does not."""

import pytest
import torch

from graphs.bit_sum import bit_sum

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_anywhere_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = (torch.randn(37, 29) * 50).to(dtype)
    before = bit_sum([tensor])
    assert bit_sum([tensor.clone()]) == before
    for place in (0, 1, 500, tensor.numel() - 1):
        for bit in (1, 128):
            other = tensor.clone()
            other.view(-1)[place : place + 1].view(torch.uint8)[-1] ^= bit
            assert bit_sum([other]) != before, (place, bit)


def test_places_and_order_count() -> None:
    a, b = torch.arange(12.0).reshape(3, 4), torch.ones(5)
    assert len({bit_sum([a, b]), bit_sum([b, a]), bit_sum([a.flip(0), b]), bit_sum([a.T.contiguous(), b])}) == 4
    assert bit_sum([torch.tensor(0.0)]) != bit_sum([torch.tensor(-0.0)]), "bits, not numbers"
    assert bit_sum([torch.tensor(torch.nan)]) == bit_sum([torch.tensor(torch.nan)])


def test_a_view_counts_as_what_it_shows() -> None:
    base = torch.arange(40, dtype=torch.uint8)
    for start, end in ((0, 16), (3, 19), (8, 13)):
        assert bit_sum([base[start:end]]) == bit_sum([base[start:end].clone()])
    assert bit_sum([]) == 0


def test_long_tensors_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphs.bit_sum._WORDS", 64)
    tensor = torch.randn(1000)
    swapped = tensor.clone()
    swapped[:128], swapped[128:256] = tensor[128:256], tensor[:128]  # two whole parts
    assert bit_sum([tensor]) != bit_sum([swapped])
