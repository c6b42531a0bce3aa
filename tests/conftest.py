"""What all tests share: a fixed seed, and the same number of threads everywhere."""

import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from buffers.batching import Batch
from engine.data_feed import Progress

# Sums of floats depend on how many threads share them: fixed, so that a test sees the same bits on every machine. One where
# two workers share the cores (pytest -n 2).
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What opening remembers of other trainers' datasets stays out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of many tiny operations: on a busy machine threads wait for each other far longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, ...]]:
    """The batches of every step of every run of the test."""
    steps: list[tuple[Batch, ...]] = []
    took = Progress.took

    def note(self: Progress, batches: tuple[Batch, ...]) -> None:
        steps.append(batches)
        took(self, batches)

    monkeypatch.setattr(Progress, "took", note)
    return steps


@pytest.fixture
def after_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Has something happen right after one optimizer step, once."""

    def arrange(step: int, act: Callable[[], None]) -> None:
        took = Progress.took

        def took_then_act(self: Progress, batches: tuple[Batch, ...]) -> None:
            took(self, batches)
            if self.step == step:
                monkeypatch.setattr(Progress, "took", took)
                act()

        monkeypatch.setattr(Progress, "took", took_then_act)

    return arrange
