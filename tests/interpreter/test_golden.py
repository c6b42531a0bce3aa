"""The whole step on Triton kernels, fp32, against the golden cases."""

import pytest

from engine.kernels import fused_ops
from tests.golden_cases import CASES, check_case

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("attention", ["reference", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_step_equals_the_golden_case(name: str, attention: str) -> None:
    check_case(name, fused_ops(attention))
