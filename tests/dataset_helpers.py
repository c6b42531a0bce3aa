"""Small datasets for the tests of buffers: random, reproducible, and damaged on demand."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from buffers.dataset import Dataset, DatasetWriter

HIDDEN_SIZE = 8
TAPS = (1, 3, 4)
VOCAB = 50
WIDTH = len(TAPS) * HIDDEN_SIZE


def writer(path: Path, **changes: Any) -> DatasetWriter:
    """A writer with small defaults."""
    settings: dict[str, Any] = {
        "target_name": "tiny",
        "target_config": {"hidden_size": HIDDEN_SIZE},
        "hidden_size": HIDDEN_SIZE,
        "target_layer_ids": TAPS,
        "vocab_size": VOCAB,
        "mask_token_id": VOCAB - 1,
        "shard_tokens": 300,
    }
    return DatasetWriter(path, **{**settings, **changes})


def random_sample(length: int, index: int = 0) -> dict[str, Tensor]:
    """What `DatasetWriter.add` takes, drawn from the index alone. No value of the hidden states is zero."""
    generator = torch.Generator().manual_seed(index)
    return {
        "input_ids": torch.randint(1, VOCAB, (length,), generator=generator, dtype=torch.int32),
        "loss_mask": (torch.rand(length, generator=generator) < 0.7).to(torch.uint8),
        "hidden_states": (torch.rand(length, WIDTH, generator=generator) + 0.5).bfloat16(),
        "last_hidden": (torch.rand(length, HIDDEN_SIZE, generator=generator) + 0.5).bfloat16(),
    }


def write_dataset(
    path: Path,
    lengths: Sequence[int],
    *,
    last_hidden: bool = False,
    nonfinite: Sequence[int] = (),
    shard_tokens: int = 300,
) -> Dataset:
    """Write and open a dataset of random samples; those in `nonfinite` hold one NaN."""
    with writer(path, last_hidden_norm="post" if last_hidden else None, shard_tokens=shard_tokens) as out:
        for index, length in enumerate(lengths):
            sample = random_sample(length, index)
            if not last_hidden:
                del sample["last_hidden"]
            if index in nonfinite:
                sample["hidden_states"][length // 2, 3] = float("nan")
            out.add(**sample)
    return Dataset(path)


def rewrite_shard(path: Path, change: Callable[[dict[str, Tensor]], None], shard: int = 0) -> None:
    """Change a shard's tensors and let the manifest's size and hash follow, so that only the content is at fault."""
    file = path / f"shard-{shard:05d}.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, str(file))
    rewrite_manifest(
        path,
        lambda values: values["shards"][shard].update(
            num_bytes=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest()
        ),
    )


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change dataset.json."""
    manifest = path / "dataset.json"
    values = json.loads(manifest.read_text())
    change(values)
    manifest.write_text(json.dumps(values))
