"""On the CPU a step is called, not replayed, and takes what this machine takes: only ratios mean something."""

from __future__ import annotations

from typing import Any

CPU_NOTE = "CPU: steps are called, not replayed; ratios only"
_TIMES_AND_RATES = ("ms", "rate", "seconds")
_SETTINGS = ("switch_interval_ms",)
_ABSOLUTE = ("_ms", "_s", "_spread", "tflops", "_gib", "gb_per_s")


def without_speeds(value: Any) -> Any:
    """The record with None for what is a time, a rate or the device's memory; ratios, counts and words stay."""
    if isinstance(value, dict):
        return {key: None if _is_speed(key) else without_speeds(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_speeds(item) for item in value]
    return value


def _is_speed(key: str) -> bool:
    return key not in _SETTINGS and (key in _TIMES_AND_RATES or key.endswith(_ABSOLUTE))
