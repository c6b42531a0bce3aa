"""From a run or a checkpoint to the folder that vLLM, SGLang and llama.cpp load: z-lab's layout, or speculators' for vLLM."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buffers.dataset import load_target_tensors
from buffers.filling import all_finite
from buffers.untrusted import one_line, parse_json
from engine.checkpoint import TRAINING_FILE, check_whole, save_drafter, saved_config, saved_weights
from engine.checkpoint_choice import newest_whole
from engine.drafter_config import DrafterConfig, load_drafter_config, read_drafter_json
from engine.drafter_files import INDEX_FILE, WEIGHTS_FILE, read_tensors
from engine.params import check_tensors, parameter_shapes
from engine.reports import make_console
from engine.speculators_layout import NOT_THE_DRAFTERS, is_speculators, to_speculators

LAYOUTS = ("z-lab", "speculators")
MASK_EMBEDDING = "mask_embedding.pt"
_READ = (torch.bfloat16, torch.float16, torch.float32)


def load_drafter(folder: Path, num_target_layers: int | None = None) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and tensors (as stored: bf16, fp16 or fp32) of a drafter in z-lab's layout or speculators'; names, shapes and
    types checked. num_target_layers: see load_drafter_config. Raises ValueError."""
    config = load_drafter_config(folder, num_target_layers)
    if (folder / MASK_EMBEDDING).exists():
        raise ValueError(
            f"{folder}: expected a drafter that takes the mask token's row of the target's embedding, found {MASK_EMBEDDING}, "
            "which vLLM puts in its place and we do not. Use another drafter"
        )
    weights = read_tensors(folder)
    if is_speculators(read_drafter_json(folder)):
        weights = {name: tensor for name, tensor in weights.items() if name not in NOT_THE_DRAFTERS}
    check_tensors(str(folder), parameter_shapes(config), weights)
    others = [f"{name} {tensor.dtype}" for name, tensor in weights.items() if tensor.dtype not in _READ]
    if others:
        raise ValueError(
            f"{folder}: expected tensors in bf16, fp16 or fp32, found {', '.join(others[:3])}; use weights that are not "
            "quantised"
        )
    wrong = next((name for name, tensor in weights.items() if not all_finite(tensor)), None)
    if wrong is not None:
        raise ValueError(f"{folder}: expected finite weights, found NaN or infinity in {wrong}; use another drafter")
    return config, weights


def export_drafter(
    source: Path, out: Path, *, layout: str = "z-lab", verifier: str = "", with_head: bool = False
) -> dict[str, Any]:
    """source: a run's folder (its best drafter, else its last checkpoint), a training checkpoint or a drafter's folder.

    Writes config.json and model.safetensors (bf16) to `out`, a new or empty folder. layout "speculators" needs `verifier`,
    the target's name or folder; with_head adds the target's embedding and head from that folder. Raises ValueError.
    """
    out = out.resolve()
    _refuse_occupied(out)
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, found {layout!r}; choose one")
    if (layout == "speculators") != bool(verifier):
        raise ValueError(
            f"verifier: expected the target's name or folder with layout speculators and none otherwise, found "
            f"{verifier!r} with {layout}"
        )
    if with_head and layout != "speculators":
        raise ValueError(
            "with head: expected layout speculators, found z-lab, whose loaders take the target's own head"
        )
    chosen, config, weights = load_trained(source)
    describe = partial(to_speculators, verifier=verifier, verifier_architectures=_architectures(verifier))
    if with_head:
        weights = _with_head(config, weights, verifier)
    save_drafter(out, config, weights, describe=describe if layout == "speculators" else None)
    load_drafter(out)
    make_console().print(
        f"{out}: {len(weights)} tensors from {chosen}, blocks of {config.block_size}, {layout} layout",
        markup=False,
        soft_wrap=True,
    )
    return {
        "source": str(chosen),
        "out": str(out),
        "layout": layout,
        "tensors": len(weights),
        "block_size": config.block_size,
    }


def _architectures(verifier: str) -> list[str]:
    """What a local target's config.json names; nothing for a target that is known by name only."""
    described = Path(verifier) / "config.json"
    if not described.is_file():
        return []
    try:
        names = parse_json(described.read_bytes()).get("architectures") or []
        return [str(name) for name in names]
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{described}: expected the target's config.json, found {one_line(error)}; name its folder"
        ) from error


def _with_head(config: DrafterConfig, weights: dict[str, Tensor], verifier: str) -> dict[str, Tensor]:
    target = load_target_tensors(verifier)
    sizes = dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (config.vocab_size, config.hidden_size))
    weights = weights | {name: target[name] for name in sizes}
    check_tensors(verifier, parameter_shapes(config) | sizes, weights)
    return weights


def _refuse_occupied(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: expected a new or empty folder, found a file; choose another name")
    if out.exists() and any(out.iterdir()):
        holds = "a model already" if (out / WEIGHTS_FILE).exists() else "something already"
        raise ValueError(f"{out}: expected a new or empty folder, found that it holds {holds}; choose another folder")
    # Not ours to clear away: they bear the names that the writing uses.
    for beside in (out.with_name(f".{out.name}.writing"), out.with_name(f".{out.name}.old")):
        if beside.exists():
            raise ValueError(f"{out}: expected no {beside.name} beside it, found one; remove it or choose another name")


def load_trained(source: Path, num_target_layers: int | None = None) -> tuple[Path, DrafterConfig, dict[str, Tensor]]:
    """The drafter of a run's folder (its best, else its last checkpoint's), of a training checkpoint or of a drafter's folder,
    and the folder it was found in; of a run under way, which replaces them, what is there in the end. num_target_layers: see
    load_drafter_config. Raises ValueError."""
    while True:
        chosen = find_trained(source)
        folder = _inode(chosen)
        try:
            return chosen, *_load(chosen, num_target_layers)
        except (ValueError, OSError):
            if chosen == source or folder is not None and _inode(chosen) == folder:
                raise


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _load(chosen: Path, num_target_layers: int | None) -> tuple[DrafterConfig, dict[str, Tensor]]:
    if (chosen / TRAINING_FILE).is_file():
        check_whole(chosen)
        config, weights = saved_config(chosen), saved_weights(chosen)
        check_tensors(str(chosen / TRAINING_FILE), parameter_shapes(config), weights)
    else:
        config, weights = load_drafter(chosen, num_target_layers)
    return config, weights


def find_trained(source: Path) -> Path:
    """The folder that load_trained reads. Raises ValueError when there is none."""
    for folder in (source, source / "best"):
        if any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE, TRAINING_FILE)):
            return folder
    found = newest_whole(source / "checkpoints")
    if found is not None:
        return found.folder
    raise ValueError(
        f"{source}: expected a run's folder, a checkpoint or a drafter, found none of best/{WEIGHTS_FILE}, "
        f"checkpoints/step-*/{TRAINING_FILE}, {WEIGHTS_FILE}"
    )
