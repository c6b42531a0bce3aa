"""The kernels around the draft, in fp32 through the interpreter."""

import pytest
import torch

from tests.draft_cases import check_block_sums, check_draft_tokens, check_supervision

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = torch.device("cpu")


@pytest.mark.parametrize("K", [2, 7, 16])
def test_draft_tokens(K: int) -> None:
    check_draft_tokens(DEVICE, K)


@pytest.mark.parametrize("K", [2, 7, 16])
@pytest.mark.parametrize("has_gamma", [True, False])
def test_supervision(K: int, has_gamma: bool) -> None:
    check_supervision(DEVICE, K, has_gamma)


@pytest.mark.parametrize("K", [2, 7, 16])
@pytest.mark.parametrize("has_kl", [True, False])
def test_block_sums(K: int, has_kl: bool) -> None:
    check_block_sums(DEVICE, K, has_kl)
