"""`dflash-engine data inspect`: what a dataset holds, and whether it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from buffers.dataset import Dataset
from engine.reports import make_console


def inspect_dataset(path: Path, *, verify: bool) -> dict[str, Any]:
    """Opens (which checks headers, sizes and tokens), prints a summary, returns it; verify compares every sha256."""
    dataset = Dataset(path)
    if verify:
        dataset.verify()
    info, lengths = dataset.info, dataset.lengths
    quantiles = np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1], method="nearest").astype(int).tolist()
    figures = {
        "target": info.target_name,
        "samples": len(dataset),
        "tokens": int(lengths.sum()),
        "shards": len(info.shards),
        "bytes": sum(shard.num_bytes for shard in info.shards),
        "hidden_size": info.hidden_size,
        "target_layer_ids": list(info.target_layer_ids),
        "vocab_size": info.vocab_size,
        "mask_token_id": info.mask_token_id,
        "last_hidden_norm": info.last_hidden_norm,
        "length_min_median_p90_p99_max": quantiles,
        "anchor_positions": int(dataset.eligible_counts.sum()),
        "samples_without_anchor": int((dataset.eligible_counts == 0).sum()),
        "verified": verify,
    }
    console = make_console()
    for name, value in figures.items():
        console.print(f"{name:32} {value}", markup=False, soft_wrap=True)
    return figures
