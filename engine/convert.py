"""`dflash-engine data convert`: another trainer's hidden states into a dataset of ours, shard by shard."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from buffers.dataset import Dataset, load_target_tensors
from buffers.dataset_writer import SHARD_TOKENS, DatasetWriter
from buffers.foreign import ForeignDataset
from buffers.manifest import MANIFEST, TARGET_FILE, UNFINISHED, DatasetInfo
from buffers.raw_sample import RawSample, measure
from engine.data_source import open_data
from engine.reports import make_console, print_fields
from engine.run_folder import alone_in
from engine.sample_progress import SampleProgress
from engine.settings import Settings


def convert_dataset(source: Path, out: Path, settings: Settings, *, shard_tokens: int = SHARD_TOKENS) -> dict[str, Any]:
    """Writes the dataset `out` from the foreign folder `source`, compares it with the source, and returns the figures.

    Memory: one shard of `shard_tokens` tokens, twice while it is written. Killed at any moment, the same call goes on behind the
    last whole shard. Raises ValueError for a source that cannot be opened, for an `out` that holds something else, and when what
    was written is not what was read.
    """
    if out.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"expected a folder outside {source} for the dataset, found {out}. Choose another.")
    began = time.monotonic()
    dataset = open_data(source, settings)
    if not isinstance(dataset, ForeignDataset):
        raise ValueError(
            f"{source}: expected another trainer's hidden states, found a dataset of ours. Use it as it is."
        )
    console = make_console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out, "OUT", "conversion"):
        kept, has_target = _write(dataset, out, settings, shard_tokens)
        console.print("reading it back")
        written = Dataset(out)
        _compare(dataset, written)
    figures = {
        "source": str(source),
        "format": dataset.format,
        "dataset": str(out),
        "samples": len(written),
        "tokens": int(written.lengths.sum()),
        "shards": len(written.info.shards),
        "bytes": sum(shard.num_bytes for shard in written.info.shards),
        "samples_kept": kept,
        "with_target": has_target,
        "bad_files": dataset.bad_files,
        "seconds": time.monotonic() - began,
        "verified": True,
    }
    print_fields(make_console(), figures | {"bad_files": len(dataset.bad_files)})
    return figures


def _write(dataset: ForeignDataset, out: Path, settings: Settings, shard_tokens: int) -> tuple[int, bool]:
    """Writes what `out` lacks. Returns the samples that it had already, and whether it has the target's tensors."""
    info, console = dataset.info, make_console(stderr=True)
    if (out / MANIFEST).is_file():
        _refuse_another(Dataset(out).info, dataset, out)
        (out / UNFINISHED).unlink(missing_ok=True)
        console.print(f"{out} is whole already")
        return len(dataset), (out / TARGET_FILE).is_file()
    writer = DatasetWriter(
        out,
        target_name=info.target_name,
        target_config=info.target_config,
        hidden_size=info.hidden_size,
        target_layer_ids=info.target_layer_ids,
        vocab_size=info.vocab_size,
        mask_token_id=info.mask_token_id,
        last_hidden_norm=info.last_hidden_norm,
        shard_tokens=shard_tokens,
        resume=True,
        source=f"{dataset.format} {dataset.digest}",
    )
    kept = writer.num_samples
    if kept:
        console.print(f"going on after {kept} of {len(dataset)} samples that {out} has in whole shards")
    has_target = _write_target(Path(settings.data.target), out, writer)
    with SampleProgress(len(dataset), kept, "converting") as progress:
        for i in range(kept, len(dataset)):
            sample = dataset.sample(i)
            writer.add(sample.input_ids, sample.loss_mask, sample.hidden_states, sample.last_hidden)
            progress.advance()
    writer.close()
    return kept, has_target


def _refuse_another(found: DatasetInfo, dataset: ForeignDataset, out: Path) -> None:
    """Raises ValueError when a finished dataset is of another description than the source's."""
    names = [
        name
        for name in (field.name for field in fields(DatasetInfo))
        if name != "shards" and getattr(found, name) != getattr(dataset.info, name)
    ]
    if names:
        raise ValueError(
            f"expected {out} to be new or this conversion's, found a dataset of another {', '.join(names)}. Choose "
            "another folder."
        )


def _write_target(folder: Path, out: Path, writer: DatasetWriter) -> bool:
    """The target's embedding, head and norm beside the shards, so that the dataset stands alone; False when there are none."""
    if (out / TARGET_FILE).is_file():
        return True
    if not any(folder.glob("*.safetensors")):
        make_console(stderr=True).print(
            f"{folder} has no *.safetensors: the dataset gets no {TARGET_FILE}, and training from it needs data.target",
            markup=False,
            soft_wrap=True,
        )
        return False
    tensors = load_target_tensors(folder)
    writer.write_target(tensors["embed_tokens.weight"], tensors["lm_head.weight"], tensors["norm.weight"])
    return True


def _compare(source: ForeignDataset, written: Dataset) -> None:
    """Every byte against the manifest's sha256; every sample's tokens, mask and first and last hidden states against the
    source's. Raises ValueError."""
    written.verify()
    if len(written) != len(source) or (written.lengths != source.lengths).any():
        raise ValueError(
            f"{written.path}: expected {len(source)} samples with {int(source.lengths.sum())} tokens, found {len(written)} with "
            f"{int(written.lengths.sum())}. Remove it and convert again."
        )
    for i in range(len(written)):
        sample = written.sample(i)
        raw = RawSample(sample.input_ids, sample.loss_mask, sample.hidden_states, sample.last_hidden)
        if measure(raw, "").digest != source.sample_digest(i):
            raise ValueError(
                f"{written.path}: expected sample {i} to be {source.name(i)}, found another. Remove it and convert again."
            )
