"""Datasets of random samples on disk, for measurements that read from disk as training does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.workloads import Workload
from buffers.dataset_writer import DatasetWriter

# Of hidden states on disk, for one measurement.
MOST_BYTES = 2**31


def samples_that_fit(workload: Workload, most: int = 24) -> int:
    """Full rows of a workload within MOST_BYTES; at least 4, at most `most`."""
    row_bytes = workload.S * workload.config().num_taps * workload.hidden_size * 2
    return max(4, min(most, MOST_BYTES // row_bytes))


def write_samples(
    folder: Path, workload: Workload, lengths: Sequence[int], device: torch.device, *, with_target: bool = False
) -> Path:
    """A dataset of one random sample a length, every token supervised, drawn on `device`; seed 0. Returns the folder.

    with_target: the target's random embedding, head and norm too, for what opens the dataset as a training run does.
    """
    config, generator = workload.config(), torch.Generator(device).manual_seed(0)
    with DatasetWriter(
        folder,
        target_name=f"random, {workload.name}",
        target_config=workload.target_config(),
        hidden_size=workload.hidden_size,
        target_layer_ids=config.target_layer_ids,
        vocab_size=workload.vocab_size,
        mask_token_id=config.mask_token_id,
    ) as writer:
        if with_target:
            target = workload.target(device, torch.bfloat16)
            writer.write_target(target.embed_tokens, target.lm_head, target.norm)
        for length in lengths:
            width = config.num_taps * workload.hidden_size
            hidden = torch.randn(length, width, device=device, generator=generator).bfloat16()
            ids = torch.randint(workload.vocab_size - 1, (length,), device=device, generator=generator)
            writer.add(ids, torch.ones(length, dtype=torch.uint8), hidden)
    return folder


@contextmanager
def temporary_samples(
    workload: Workload, lengths: Sequence[int], device: torch.device, *, with_target: bool = False
) -> Iterator[Path]:
    """write_samples into a folder that is gone afterwards; TMPDIR says where."""
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        yield write_samples(Path(folder) / "data", workload, lengths, device, with_target=with_target)
