"""Datasets that can be trained on, runs of a tiny drafter over them, and what the runs left behind."""

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from buffers.batching import Batch
from buffers.dataset import Dataset
from engine.settings import Settings, load_settings
from engine.train import train
from tests.dataset_helpers import HIDDEN_SIZE, VOCAB, random_sample, writer

# The tiny target's config.json, as far as a drafter takes its sizes from it.
TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
}
# Half of them fit a bucket of 128 tokens, the other half needs one of 256.
LENGTHS = (40, 130, 60, 150, 90, 170, 50, 140, 80, 160)
# With one row a bucket's batch is one sample, so that epochs have many batches.
SETTINGS = (
    "model.num_hidden_layers=1",
    "model.block_size=4",
    "buckets.num_anchors=32",
    "buckets.max_rows=1",
    "buckets.lengths=128,256",
    "optimizer.lr=1e-2",
    "run.device=cpu",
    "run.epochs=2",
    "run.log_every=3",
    "run.save_every=4",
)


def training_dataset(
    path: Path,
    lengths: Sequence[int] = LENGTHS,
    *,
    last_hidden_norm: str | None = None,
    nonfinite: Sequence[int] = (),
    target_config: dict[str, Any] = TARGET_CONFIG,
    first_sample: int = 0,
    **changes: Any,
) -> Path:
    """A dataset of random samples with its target's tensors; the samples in `nonfinite` hold one NaN each."""
    out = writer(path, target_config=target_config, last_hidden_norm=last_hidden_norm, shard_tokens=2000, **changes)
    with out:
        generator = torch.Generator().manual_seed(7)
        embed, head = (torch.randn(VOCAB, HIDDEN_SIZE, generator=generator) for _ in range(2))
        out.write_target(embed, head, torch.rand(HIDDEN_SIZE, generator=generator) + 0.5)
        for index, length in enumerate(lengths):
            sample = random_sample(length, first_sample + index)
            # What follows a token is a matter of the token: there is something to learn in a few steps.
            sample["input_ids"] = torch.arange(length, dtype=torch.int32) % 7 + 1
            if last_hidden_norm is None:
                del sample["last_hidden"]
            if index in nonfinite:
                sample["hidden_states"][length // 2, 3] = float("nan")
            out.add(**sample)
    return path


def run_settings(data: Path, output: Path, *changes: str) -> Settings:
    """SETTINGS with these changes, for the command line's --set."""
    return load_settings(None, [*SETTINGS, f"data.path={data}", f"run.output={output}", *changes])


def run(data: Path, output: Path, *changes: str, resume: bool = True) -> dict[str, Any]:
    """Trains and returns the figures."""
    return train(run_settings(data, output, *changes), resume=resume)


def metrics(output: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without what depends on the clock and on how often the run was started."""
    clock = ("tokens_per_s", "machine")
    return [
        {k: v for k, v in record.items() if k not in clock} for record in records(output) if not comes_and_goes(record)
    ]


def records(output: Path) -> list[dict[str, Any]]:
    """All of metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def comes_and_goes(record: dict[str, Any]) -> bool:
    """Whether it says that a process took the run up or left it."""
    return record.get("event") in ("started", "ended")


def logged_steps(output: Path) -> list[int]:
    """The steps of the training lines."""
    return [record["step"] for record in metrics(output) if "loss" in record]


def checkpoint_tensors(output: Path, step: int) -> dict[str, Tensor]:
    """Everything in a checkpoint but its JSON."""
    return load_file(output / "checkpoints" / f"step-{step:08d}" / "training.safetensors")


def steps_of(output: Path) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    return sorted(int(folder.name.removeprefix("step-")) for folder in (output / "checkpoints").glob("step-*"))


def rows_of(data: Path) -> int:
    """Samples of a dataset."""
    return len(Dataset(data))


def files_under(folder: Path) -> dict[str, bytes]:
    """Every file with its content, to see that nothing was written over."""
    return {
        str(Path(root, name).relative_to(folder)): Path(root, name).read_bytes()
        for root, _, names in os.walk(folder)
        for name in names
    }


class Killed(Exception):
    """Stands for a process that dies: nobody catches it, nothing is saved."""


def kill() -> None:
    """Dies here."""
    raise Killed


def interrupt() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def tokens_of_epoch(steps: list[tuple[Batch, ...]], epoch: int) -> Counter[tuple[int, int]]:
    """How often each (sample, token) of an epoch was served."""
    return Counter(
        (document.sample_id, token)
        for step in steps
        for batch in step
        if batch.epoch == epoch
        for document in batch.documents
        for token in range(document.start, document.stop)
    )


def every_token(data: Path) -> set[tuple[int, int]]:
    """(sample, token) of a whole dataset."""
    return {(i, token) for i, length in enumerate(Dataset(data).lengths.tolist()) for token in range(length)}
