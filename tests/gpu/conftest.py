"""Everything in this folder is marked gpu, and is skipped where there is no CUDA device."""

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


# First, so that `-m gpu` and `-m "not gpu"` see the mark.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
