"""The step in plain torch against cases that an independent implementation computed."""

import pytest

from engine.kernels import reference_ops
from tests.golden_cases import CASES, check_case

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", CASES)
def test_step_equals_the_golden_case(name: str) -> None:
    check_case(name, reference_ops())
