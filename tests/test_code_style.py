"""ruff and mypy over the whole repository, as pyproject.toml has them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def passes(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff() -> None:
    pytest.importorskip("ruff")
    passes("ruff", "check", ".")


def test_mypy() -> None:
    pytest.importorskip("mypy")
    pinned = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    checked = dict(line.split("==") for line in pinned)["torch"]
    if torch.__version__.split("+")[0] != checked:
        pytest.skip(f"torch's own annotations differ between versions: types are checked with {checked}")
    passes("mypy")
