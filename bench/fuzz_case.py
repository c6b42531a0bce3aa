"""What is fuzzed: a kind of files, how they are damaged and how they are read; and the verdict on one input."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch

from buffers.dataset import SampleSource

# File name -> its bytes; a path stands for a link that leads there.
Files = Mapping[str, bytes | Path]

MOST_CHARACTERS = 2000
# What a message may name in place of a file: a setting, wherever its value came from.
_SETTING = re.compile(r"\b(?:model|data|buckets|objective|optimizer|run)\b")


class Broken(Exception):
    """What was read without complaint is not what it says it is."""


@dataclass(frozen=True)
class Target:
    """seeds: folders that can be read. damage: another folder, from a generator, one of the seeds and all of them. read: reads
    a folder to the end and raises Broken where what it accepted is wrong; any other exception is its answer."""

    name: str
    seeds: Sequence[dict[str, bytes]]
    damage: Callable[[Random, dict[str, bytes], Sequence[dict[str, bytes]]], Files]
    read: Callable[[Path], None]
    settings: bool = False


def make_files(target: Target, seed: int, index: int) -> Files:
    """Input number `index`: the same whatever was made before it."""
    rng = Random(f"{target.name} {seed} {index}")
    return target.damage(rng, dict(rng.choice(target.seeds)), target.seeds)


def verdict(target: Target, folder: Path, files: Files) -> tuple[str, str]:
    """("accepted", ""), ("refused", the message) or ("fault", what is wrong)."""
    try:
        target.read(folder)
    except Broken as error:
        return "fault", f"accepted, but {error}"
    except (ValueError, OSError) as error:
        if wrong := _unclean(target, folder, files, error):
            return "fault", wrong
        return "refused", str(error).replace(str(folder), "FOLDER")
    except Exception as error:
        return "fault", f"{type(error).__name__}: {error}"
    return "accepted", ""


def _unclean(target: Target, folder: Path, files: Files, error: Exception) -> str:
    message = str(error)
    told = f"{type(error).__name__}: {message[:300]!r}"
    if not message.isprintable():
        return f"a message of more than one printable line: {told}"
    if len(message) > MOST_CHARACTERS:
        return f"a message of {len(message)} characters: {told}"
    names_setting = target.settings and _SETTING.search(message)
    if not (names_setting or str(folder) in message or any(name in message for name in files)):
        return f"a message that names no file: {told}"
    return ""


def check_samples(dataset: SampleSource) -> None:
    """Reads every sample. Raises Broken where one is not what the dataset says."""
    info = dataset.info
    if not len(dataset) or len(dataset.lengths) != len(dataset):
        raise Broken(f"{len(dataset)} samples and {len(dataset.lengths)} lengths")
    for index in range(len(dataset)):
        sample, length = dataset.sample(index), int(dataset.lengths[index])
        width = info.num_taps * info.hidden_size
        last = [info.hidden_size] if info.last_hidden_norm is not None else None
        shapes = [list(sample.input_ids.shape), list(sample.loss_mask.shape), list(sample.hidden_states.shape)]
        if shapes != [[length], [length], [length, width]] or length < 1:
            raise Broken(f"sample {index} of {length} tokens has shapes {shapes}")
        if (None if sample.last_hidden is None else list(sample.last_hidden.shape[1:])) != last:
            raise Broken(f"sample {index} has another last_hidden than {last}")
        types = (sample.input_ids.dtype, sample.loss_mask.dtype, sample.hidden_states.dtype)
        if types != (torch.int32, torch.uint8, torch.bfloat16):
            raise Broken(f"sample {index} has types {types}")
        ids, mask = sample.input_ids.numpy(), sample.loss_mask.numpy()
        if ids.min() < 0 or ids.max() >= info.vocab_size or mask.max() > 1:
            raise Broken(f"sample {index} has ids {ids.min()} to {ids.max()} and a mask of up to {mask.max()}")
        if int(mask.sum()) != dataset.supervised_counts[index]:
            raise Broken(f"sample {index} has {mask.sum()} supervised tokens, not {dataset.supervised_counts[index]}")
        if int((mask[:-1] & mask[1:]).sum()) != dataset.eligible_counts[index]:
            raise Broken(f"sample {index} has another number of places than {dataset.eligible_counts[index]}")
        # Every byte is touched: a mapping that is shorter than it says ends the process here and not later.
        for tensor in (sample.hidden_states, sample.last_hidden):
            if tensor is not None:
                np.bitwise_or.reduce(tensor.contiguous().view(torch.int16).numpy(), axis=None)
