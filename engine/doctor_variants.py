"""Which settings of allocator and module loading help or hurt here: a small captured step under each, in processes of their own,
because both are settled when a process first touches the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from engine.process_settings import ALLOCATOR, MODULE_LOADING, without

BASE = "neither set"
_AS_IT_IS = "as it is"
_VARIANTS: dict[str, dict[str, str]] = {
    f"{name}={value}": {name: value}
    for name, value in (
        (MODULE_LOADING, "LAZY"),
        (MODULE_LOADING, "EAGER"),
        (ALLOCATOR[0], "expandable_segments:True"),
    )
}
_PATIENCE_S = 120.0
# (figure, in words, what it must differ by at least, and that part of the other): less is noise between two processes.
_COMPARED = (
    ("start_s", "start", 1.0, 0.20),
    ("build_s", "capture", 0.3, 0.25),
    ("memory_mib", "memory", 64.0, 0.05),
    ("replay_ms", "replay", 0.0, 0.05),
)
PROBE = (sys.executable, "-m", "engine.doctor_probe")


def measure_variants(
    command: Sequence[str] = PROBE, env: Mapping[str, str] = os.environ, *, rounds: int = 2
) -> list[dict[str, Any]]:
    """The probe's figures under each setting, alone, against neither being set: name, env, the figures of the best of `rounds`
    processes, `helps` and `hurts` (in what), told (in words). The first is neither set, the last the user's own setting where
    there is one. With one round the first has to read torch from the disk for all. Needs a GPU."""
    variants: dict[str, dict[str, str]] = {BASE: {}, **_VARIANTS}
    own = {name: value for name, value in env.items() if name not in without(env)}
    if own:
        variants[_AS_IT_IS] = own
    tried: dict[str, list[dict[str, Any] | str]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, changes in variants.items():
            tried[name].append(_probe(command, without(env) | changes))
    found: list[dict[str, Any]] = []
    for name, changes in variants.items():
        line: dict[str, Any] = {"name": name, "env": changes, "helps": [], "hurts": []}
        failed = [one for one in tried[name] if isinstance(one, str)]
        if failed:
            found.append(line | {"told": failed[0]})
            continue
        figures = best_of([one for one in tried[name] if not isinstance(one, str)])
        line |= figures
        if name != BASE and "replay_ms" in found[0]:
            line["helps"], line["hurts"] = compared(figures, found[0])
        found.append(line | {"told": _told(line, name != BASE and "replay_ms" in found[0])})
    return found


def worth_setting(measured: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of what was measured the settings that help in something and hurt in nothing: what process_settings.HELPFUL is to be."""
    chosen: dict[str, str] = {}
    for variant in measured:
        if variant["name"] in _VARIANTS and variant["helps"] and not variant["hurts"]:
            chosen |= variant["env"]
    return chosen


def best_of(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The shortest times, the largest memory, and whether all were equal."""
    return {
        key: all(one[key] for one in figures)
        if key == "equal"
        else (max if key.endswith("_mib") else min)(one[key] for one in figures)
        for key in figures[0]
    }


def compared(figures: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """In what these figures are better than the base's, and in what worse, beyond the noise."""
    helps: list[str] = []
    hurts: list[str] = [] if figures["equal"] else ["replay differs from the eager step"]
    for key, words, least, part in _COMPARED:
        apart = figures[key] - base[key]
        if abs(apart) > max(least, part * base[key]):
            (helps if apart < 0 else hurts).append(words)
    return helps, hurts


def _told(line: Mapping[str, Any], against_base: bool) -> str:
    told = (
        f"start {line['start_s']:.1f} s, capture {line['build_s']:.2f} s, {line['memory_mib']:,.0f} MiB "
        f"({line['outside_mib']:,.0f} of them beside torch's), replay {line['replay_ms']:.3f} ms"
    )
    if not line["equal"]:
        told += ", REPLAY DIFFERS FROM THE EAGER STEP"
    words = [f"{verb} {', '.join(line[verb])}" for verb in ("helps", "hurts") if line[verb]]
    return f"{told}: {'; '.join(words) or 'no difference'}" if against_base else told


def _probe(command: Sequence[str], env: Mapping[str, str]) -> dict[str, Any] | str:
    """The figures, or why there are none."""
    try:
        done = subprocess.run(
            list(command), env=dict(env), capture_output=True, text=True, timeout=_PATIENCE_S, check=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        return f"does not work: {' '.join(error.stderr.split())[-300:]}"
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return f"could not be measured: {error}"
