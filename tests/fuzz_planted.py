"""A target of the fuzzer whose reader has a fault for each letter."""

import os
from pathlib import Path
from random import Random

import torch

from bench.fuzz_case import Broken, Files, Target


def _damage(rng: Random, files: dict[str, bytes], seeds: object) -> Files:
    # The end of a process costs the start of another: once in the inputs of the test.
    return {"a.txt": b"g" if rng.random() < 0.02 else bytes([rng.choice(b"abcdefhij")])}


def _read_with_faults(folder: Path) -> None:
    match (folder / "a.txt").read_bytes():
        case b"b":
            raise KeyError("b")
        case b"c":
            raise ValueError("expected a, found c")
        case b"d":
            raise ValueError(f"{folder}/a.txt: expected a,\nfound d")
        case b"e":
            torch.ones(400 << 18)
        case b"f":
            raise Broken("it is an f")
        case b"g":
            os.abort()
        case b"h":
            raise ValueError(f"{folder}/a.txt: {'h' * 5000}")
        case b"i":
            raise ValueError(f"{folder}/a.txt: expected a, found i")


def planted() -> Target:
    """By its name importable, as the fuzzer's processes need it."""
    return Target("planted", [{"a.txt": b"a"}], _damage, _read_with_faults)
