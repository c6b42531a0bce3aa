"""What is set in a process's environment before CUDA starts: settings of allocator and module loading that are worth it.

Decided by measuring, not by taste: HELPFUL is what `dflash-engine doctor` found on the GPU of the record
bench/results/h200-doctor.json to help in something and to hurt in nothing (engine/doctor_probe.py). What the user has set stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is torch's older name of the first
MODULE_LOADING = "CUDA_MODULE_LOADING"

HELPFUL: Mapping[str, str] = {}

_set: dict[str, str] = {}


def set_what_helps(env: MutableMapping[str, str] = os.environ) -> None:
    """For the beginning of a process: both are read once, the allocator's when torch is imported, so that afterwards nothing
    is set."""
    if "torch" in sys.modules:
        return
    for name, value in HELPFUL.items():
        if not any(other in env for other in _same(name)):
            env[name] = _set[name] = value


def set_by_us(name: str, value: str) -> bool:
    """Whether the variable has this value from set_what_helps()."""
    return name in _set and _set[name] == value


def told() -> str:
    """What was set, in words, or ""."""
    return ", ".join(f"{name}={value}" for name, value in _set.items())


def without(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with neither of the two set."""
    return {name: value for name, value in env.items() if name not in (*ALLOCATOR, MODULE_LOADING)}


def _same(name: str) -> tuple[str, ...]:
    return ALLOCATOR if name in ALLOCATOR else (name,)
