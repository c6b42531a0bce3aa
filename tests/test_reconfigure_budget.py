"""Whether a new generation fits beside the old one, on a CUDA device that is none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.memory_budget import GIB
from engine.reconfigure import _budget
from engine.settings import load_settings

HELD, FREE, POOL = 30 * GIB, 5 * GIB, 12 * GIB


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run whose device has 5 GiB free, of which it holds 30 GiB itself, 12 of them the graphs' pool."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: HELD)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: HELD)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, 40 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    return SimpleNamespace(
        engine=SimpleNamespace(device=torch.device("cuda", 0)),
        intake=SimpleNamespace(plan=SimpleNamespace(memory=SimpleNamespace(pool=POOL))),
    )


def test_beside_the_old_generation_its_pool_is_not_to_be_had(under_way: Any) -> None:
    found = _budget(under_way, load_settings(None, ["run.regenerate=beside"]))
    assert found is not None and found.nbytes == FREE + HELD - POOL
    assert found.source == 'what a card has for it beside the old generation; run.regenerate = "after" frees that first'


def test_after_the_old_generation_its_pool_is(under_way: Any) -> None:
    found = _budget(under_way, load_settings(None, ["run.regenerate=after"]))
    assert found is not None and found.nbytes == FREE + HELD
    assert found.source == "what a card has for it"


def test_a_budget_that_is_set_holds(under_way: Any) -> None:
    found = _budget(under_way, load_settings(None, ["run.memory_budget_gib=3"]))
    assert found is not None and (found.nbytes, found.source) == (3 * GIB, "run.memory_budget_gib")
