"""Training checkpoints: safetensors and JSON in a folder that appears whole or not at all.

checkpoints/step-00000500/ holds training.safetensors (fp32 masters and moments by parameter name, the device's step count,
metrics, the rows consumed in the epoch under way) and state.json (step, epoch, the data's size, metrics as last logged, the
drafter's config). best/ is a drafter in the servers' layout with best.json beside it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from buffers.filling import all_finite
from buffers.manifest import make_readable, write_safetensors
from engine.drafter_config import DrafterConfig
from engine.engine import Engine
from engine.metrics import MetricSums

TRAINING_FILE, STATE_FILE, WEIGHTS_FILE, CONFIG_FILE = (
    "training.safetensors",
    "state.json",
    "model.safetensors",
    "config.json",
)


@dataclass(frozen=True)
class DataIdentity:
    """What tells one dataset from another (digest: DatasetInfo.digest), and `longest`, the plan's longest document: split
    samples have pieces of it."""

    num_samples: int
    num_tokens: int
    digest: str
    longest: int


@dataclass(frozen=True)
class Position:
    """Where a run is. step: optimizer steps done. consumed: (sample id, piece) rows of `epoch` that those steps took.
    logged: the metrics' sums at the last line of metrics.jsonl, None before the first."""

    step: int
    epoch: int
    consumed: tuple[tuple[int, int], ...]
    data: DataIdentity
    logged: MetricSums | None = None


def save_checkpoint(root: Path, engine: Engine, position: Position, *, keep: int) -> Path:
    """Writes root/step-<step> and removes all but the newest `keep`. Waits for the device. Raises OSError, and
    ValueError when a weight or moment is not finite."""
    tensors = _training_tensors(engine)
    tensors["consumed"] = torch.tensor(position.consumed, dtype=torch.int64).reshape(-1, 2)
    state = {
        "format_version": 1,
        "step": position.step,
        "epoch": position.epoch,
        "data": asdict(position.data),
        "logged": None if position.logged is None else asdict(position.logged),
        "config": engine.config.to_json(),
    }
    folder = root / f"step-{position.step:08d}"

    def write(into: Path) -> None:
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        _refuse_nonfinite(folder, on_host)
        write_safetensors(into / TRAINING_FILE, on_host, {"format": "pt"})
        (into / STATE_FILE).write_text(json.dumps(state, indent=1))

    for unfinished in root.glob(".step-*"):
        shutil.rmtree(unfinished)
    publish_folder(folder, write)
    for old in checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return folder


def checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder for folder in root.glob("step-*") if (folder / STATE_FILE).is_file())


def saved_config(folder: Path) -> DrafterConfig:
    """The drafter config of a training checkpoint. Raises ValueError when it is damaged."""
    try:
        return DrafterConfig.from_json(_read_state(folder)["config"])
    except (KeyError, TypeError) as error:
        raise _damaged(folder, error) from error
    except ValueError as error:
        if str(error).startswith(str(folder)):
            raise
        raise _damaged(folder, error) from error


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """The drafter's fp32 weights in a training checkpoint. Raises ValueError when it is damaged."""
    prefix = "master."
    found = _read_tensors(folder)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}


def check_config(folder: Path, config: DrafterConfig) -> None:
    """Raises ValueError when a training checkpoint is damaged or was made for another drafter than `config`."""
    saved, ours = saved_config(folder).to_json(), config.to_json()
    # How the first weights were drawn no longer matters.
    compared = (ours.keys() | saved.keys()) - {"initializer_range"}
    changed = sorted(key for key in compared if ours.get(key) != saved.get(key))
    if changed:
        key = changed[0]
        raise ValueError(
            f"{folder}: the checkpoint's drafter has {key} {saved.get(key)!r}, the settings ask for {ours.get(key)!r}; "
            "set it back, or train into another run.output"
        )


def load_checkpoint(folder: Path, engine: Engine) -> Position:
    """Copies a checkpoint into the engine's arenas, addresses unchanged. Raises ValueError when it is damaged or was made
    for another drafter."""
    check_config(folder, engine.config)
    found = _read_tensors(folder)
    state = _read_state(folder)
    try:
        told = dict(state["data"])
        data = DataIdentity(digest=str(told.pop("digest")), **{name: _count(value) for name, value in told.items()})
        position = Position(
            _count(state["step"]),
            _count(state["epoch"]),
            _consumed(found.pop("consumed"), data.num_samples),
            data,
            None if state["logged"] is None else MetricSums(**state["logged"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from error
    expected = _training_tensors(engine)
    wrong = [name for name in expected if name not in found or found[name].shape != expected[name].shape]
    if wrong:
        raise _damaged(folder, f"no {wrong[0]} of shape {tuple(expected[wrong[0]].shape)}")
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(found[name])
        engine.params.refresh_weights()
    return position


def save_drafter(
    folder: Path,
    config: DrafterConfig,
    weights: dict[str, Tensor],
    beside: dict[str, Any] | None = None,
    describe: Callable[[dict[str, object]], dict[str, object]] | None = None,
) -> None:
    """A drafter as servers load it: config.json and model.safetensors in bf16 under z-lab's names. Replaces `folder` and
    all in it. beside: file name -> what it holds as JSON. describe: from z-lab's config.json to another layout's. Raises
    OSError, and ValueError for weights that are not finite or layers that the layout cannot say."""
    written = replace(config, dtype="bfloat16").to_json()
    written = written if describe is None else describe(written)

    def write(into: Path) -> None:
        # To the host first: a conversion on the device would allocate there, in the middle of training.
        tensors = {name: tensor.detach().cpu().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
        _refuse_nonfinite(folder, tensors)
        write_safetensors(into / WEIGHTS_FILE, tensors, {"format": "pt"})
        (into / CONFIG_FILE).write_text(json.dumps(written, indent=2) + "\n")
        for name, content in (beside or {}).items():
            (into / name).write_text(json.dumps(content, indent=1) + "\n")

    publish_folder(folder, write)


def publish_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """write(temporary folder), flush to disk, then rename: whoever looks finds the old content or the new, never a part."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    restore_folder(folder)
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        write(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for path in temporary.iterdir():
        make_readable(path)
        _flush(path)
    _flush(temporary)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_folder(folder: Path) -> None:
    """Undoes half a publish_folder: where a process died between its two renames, the old content is put back."""
    old = folder.with_name(f".{folder.name}.old")
    if old.is_dir() and not folder.exists():
        old.rename(folder)


def _training_tensors(engine: Engine) -> dict[str, Tensor]:
    """Everything a checkpoint restores, as views of the engine's memory."""
    assert engine.optimizer is not None, "an engine without an optimizer has nothing to check-point"
    params, state = engine.params, engine.optimizer.state()
    tensors = {f"master.{name}": tensor for name, tensor in params.state().items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        tensors |= {f"{kind}.{name}": tensor for name, tensor in params.named(state[kind])}
    return tensors | {
        "optimizer.step": state["step"],
        "optimizer.skipped": state["skipped"],
        "metrics.sums": engine.metrics.sums,
        "metrics.slots": engine.metrics.slots,
    }


def _refuse_nonfinite(where: Path, tensors: dict[str, Tensor]) -> None:
    wrong = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not all_finite(tensor)]
    if wrong:
        raise ValueError(
            f"{where}: expected finite weights, found NaN or infinity in {wrong[0]} and {len(wrong) - 1} more; nothing was "
            "written. Lower optimizer.lr, or go on from an earlier checkpoint"
        )


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(folder, error) from error
    if not isinstance(state, dict) or state.get("format_version") != 1:
        raise _damaged(folder, f"no {STATE_FILE} of format version 1")
    return state


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} where a count belongs")
    return value


def _consumed(tensor: Tensor, num_samples: int) -> tuple[tuple[int, int], ...]:
    if tensor.dtype != torch.int64 or tensor.dim() != 2 or tensor.shape[1] != 2:
        raise ValueError(f"consumed as {tensor.dtype}{list(tensor.shape)}")
    if len(tensor) and (int(tensor.min()) < 0 or int(tensor[:, 0].max()) >= num_samples):
        raise ValueError("consumed rows of samples that there are not")
    return tuple((sample, piece) for sample, piece in tensor.tolist())


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    try:
        with safe_open(folder / TRAINING_FILE, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
    except (OSError, SafetensorError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, found: object) -> ValueError:
    return ValueError(f"{folder}: expected a training checkpoint, found a damaged one ({found}); remove it to go on")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
