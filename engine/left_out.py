"""Samples and files that a run leaves out: how they are named, and left_out.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffers.dataset import SampleSource
from buffers.mixture import Mixture
from buffers.naming import naming


def named_samples(dataset: SampleSource, ids: Sequence[int]) -> list[Any]:
    """The ids; of a mixture (folder, id in it), each sample once whatever its copies."""
    if not isinstance(dataset, Mixture):
        return list(ids)
    return list(dict.fromkeys((str(folder), own) for folder, own in map(dataset.origin, ids)))


def named_lengths(dataset: SampleSource, samples: Sequence[tuple[int, int]]) -> list[tuple[Any, ...]]:
    """(id, tokens); of a mixture (folder, id in it, tokens), each sample once."""
    if not isinstance(dataset, Mixture):
        return list(samples)
    origins = ((dataset.origin(i), tokens) for i, tokens in samples)
    return list(dict.fromkeys((str(folder), own, tokens) for (folder, own), tokens in origins))


def spoken_samples(named: Sequence[Any]) -> str:
    """The first few of named_samples in a sentence."""
    return _first_few([f"{one[1]} of {one[0]}" if isinstance(one, tuple) else str(one) for one in named])


def spoken_lengths(named: Sequence[tuple[Any, ...]]) -> str:
    """The first few of named_lengths in a sentence."""
    return _first_few([" of ".join(map(str, reversed(where))) + f" ({tokens})" for *where, tokens in named])


def write_left_out(
    file: Path,
    *,
    too_long: str,
    training: Sequence[tuple[Any, ...]],
    held_out: Sequence[tuple[int, int]],
    not_finite: Sequence[Any],
    bad_files: dict[str, str],
) -> None:
    """left_out.json: every sample that is too long ([id, tokens]) or not finite (id), of a mixture with its folder before the
    id, what was done with it, and every file of another trainer's dataset that was of no use."""
    record = {
        "too_long": too_long,
        "training": training,
        "held_out": held_out,
        "not_finite": not_finite,
        "bad_files": bad_files,
    }
    with naming(file):
        file.write_text(json.dumps(record) + "\n")


def _first_few(items: Sequence[str]) -> str:
    return ", ".join(items[:5]) + (" ..." if len(items) > 5 else "")
