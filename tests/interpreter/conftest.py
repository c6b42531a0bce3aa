"""What is here runs in Triton's interpreter, to be chosen before Triton is imported: see tests/test_interpreter.py. Fresh memory
holds NaN, as a graph's pool does under train --check: what reads it before it is written is found out."""

import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path

import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.skip(reason="runs in a process of its own, with TRITON_INTERPRET=1"))


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same with NaN in it, and -1 in integers."""

    @wraps(allocate)
    def fresh(*args: object, **options: object) -> Tensor:
        tensor = allocate(*args, **options)
        with torch.no_grad():
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    return fresh


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        patch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
        yield
