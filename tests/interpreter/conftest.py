"""What is here runs in Triton's interpreter, to be chosen before Triton is imported: see tests/test_interpreter.py."""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.skip(reason="runs in a process of its own, with TRITON_INTERPRET=1"))
