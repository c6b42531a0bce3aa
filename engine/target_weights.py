"""Telling one target's weights from another's of the same sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from buffers.manifest import TARGET_FILE

# Rows of embedding and head that tell one target from another; a checkpoint of any size is compared in a moment.
_ROWS = 64


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The first digits of a sha256 over some rows of each tensor, rounded to bf16."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        some = tensor[:: max(1, len(tensor) // _ROWS)].to(torch.bfloat16).contiguous()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def with_target(folders: Sequence[Path]) -> list[Path]:
    """Those of a dataset's folders that hold the target's tensors."""
    return [folder for folder in folders if (folder / TARGET_FILE).is_file()]
