"""The whole step on Triton kernels, fp32, against golden cases: every kernel, full and sliding layers, packed rows, D-PACE."""

import pytest

from engine.kernels import fused_ops
from tests.golden_cases import check_case

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("dflash-sliding", "triton"),
        ("dflash-packed", "triton"),
        ("dflash-dpace", "reference"),
        ("dflash-packed", "reference"),
    ],
)
def test_step_equals_the_golden_case(name: str, attention: str) -> None:
    check_case(name, fused_ops(attention))
