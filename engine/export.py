"""From a run or a checkpoint to the folder that vLLM, SGLang and llama.cpp load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.checkpoint import (
    TRAINING_FILE,
    WEIGHTS_FILE,
    checkpoints,
    save_drafter,
    saved_config,
    saved_weights,
)
from engine.drafter_config import DrafterConfig, load_drafter_config
from engine.params import parameter_shapes
from engine.reports import make_console


def load_drafter(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and tensors of a drafter in the servers' layout; names and shapes checked. Raises ValueError."""
    config = load_drafter_config(folder)
    try:
        weights = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}: expected a readable {WEIGHTS_FILE}, found: {error}") from error
    _check_shapes(folder / WEIGHTS_FILE, config, weights)
    return config, weights


def _check_shapes(file: Path, config: DrafterConfig, weights: dict[str, Tensor]) -> None:
    shapes = parameter_shapes(config)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{file}: {name}: expected shape {shapes.get(name, 'none: no such tensor')}, found "
            f"{found.get(name, 'none')}; {len(wrong)} tensors do not fit the config"
        )


def export_drafter(source: Path, out: Path) -> dict[str, Any]:
    """source: a run's folder (its best drafter, else its last checkpoint), a training checkpoint or a drafter's folder.

    Writes config.json and model.safetensors (bf16) to `out`, a new or empty folder. Raises ValueError.
    """
    out = out.resolve()
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: expected a new or empty folder, found a file; choose another name")
    if out.exists() and any(out.iterdir()):
        holds = "a model already" if (out / WEIGHTS_FILE).exists() else "something already"
        raise ValueError(f"{out}: expected a new or empty folder, found that it holds {holds}; choose another folder")
    # Not ours to clear away: they bear the names that the writing uses.
    for beside in (out.with_name(f".{out.name}.writing"), out.with_name(f".{out.name}.old")):
        if beside.exists():
            raise ValueError(f"{out}: expected no {beside.name} beside it, found one; remove it or choose another name")
    chosen = _choose(source)
    if (chosen / TRAINING_FILE).is_file():
        config, weights = saved_config(chosen), saved_weights(chosen)
        _check_shapes(chosen / TRAINING_FILE, config, weights)
    else:
        config, weights = load_drafter(chosen)
    save_drafter(out, config, weights)
    load_drafter(out)
    make_console().print(
        f"{out}: {len(weights)} tensors from {chosen}, blocks of {config.block_size}", markup=False, soft_wrap=True
    )
    return {"source": str(chosen), "out": str(out), "tensors": len(weights), "block_size": config.block_size}


def _choose(source: Path) -> Path:
    best, saved = source / "best", checkpoints(source / "checkpoints")
    for folder in (source, best, *reversed(saved[-1:])):
        if (folder / WEIGHTS_FILE).is_file() or (folder / TRAINING_FILE).is_file():
            return folder
    raise ValueError(
        f"{source}: expected a run's folder, a checkpoint or a drafter, found none of best/{WEIGHTS_FILE}, "
        f"checkpoints/step-*/{TRAINING_FILE}, {WEIGHTS_FILE}"
    )
