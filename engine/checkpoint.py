"""What a training checkpoint holds, and reading it; checkpoint_writer.py writes it.

checkpoints/step-00000500/ holds training.safetensors (fp32 masters, of which parameters in bf16 are the rounding, and moments by
parameter name, the device's step count, metrics, the rows consumed in the epoch under way) and state.json: step, epoch, the
data's size, metrics as last logged, the drafter's config, the schedule, the seed, all settings, the graphs' fingerprints, and the
size and SHA-256 of the other file and of itself. Every random number is drawn from (seed, epoch, sample id), so the seed and the
place in the data are all that there is to restore of randomness. Checkpoints without checksums, of earlier versions, are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buffers.filling import all_finite
from buffers.manifest import read_tensors, sha256, write_safetensors
from buffers.untrusted import one_line, parse_json, shown
from engine.drafter_config import DrafterConfig
from engine.engine import Engine
from engine.metrics import MetricSums
from engine.publish import publish_folder
from engine.snapshot import training_tensors

FORMAT_VERSION = 1
TRAINING_FILE, STATE_FILE, WEIGHTS_FILE, CONFIG_FILE = (
    "training.safetensors",
    "state.json",
    "model.safetensors",
    "config.json",
)


class DamagedCheckpoint(ValueError):
    """why: what is wrong with the checkpoint, without its name."""

    def __init__(self, folder: Path, why: object) -> None:
        super().__init__(
            f"{folder}: expected a training checkpoint, found a damaged one ({one_line(why, 300)}); remove it to go on"
        )
        self.why = one_line(why, 300)


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


def checkpoints(root: Path) -> list[Path]:
    """The folders of checkpoints, oldest first; whether they are whole is not looked at."""
    found = (folder for folder in root.glob("step-*") if folder.name.removeprefix("step-").isdecimal())
    return sorted((folder for folder in found if folder.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def checkpoint_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step-{step:08d}"


def saved_config(folder: Path) -> DrafterConfig:
    """The drafter config of a training checkpoint. Raises ValueError when it is damaged."""
    state = read_state(folder)
    try:
        return DrafterConfig.from_json(state["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(folder, error) from error


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
            f"{folder}: the checkpoint's drafter has {key} {shown(saved.get(key))}, the settings ask for "
            f"{shown(ours.get(key))}; set it back, or train into another run.output"
        )


def check_whole(folder: Path) -> None:
    """Reads all of a training checkpoint. Raises DamagedCheckpoint when a file is missing, cut off, of another format, has other
    bytes than were written, or makes no sense."""
    state = read_state(folder)
    file = folder / TRAINING_FILE
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DamagedCheckpoint(folder, f"no {TRAINING_FILE} to read: {error.strerror}") from error
    if "files" in state:
        try:
            told = state["files"][TRAINING_FILE]
            num_bytes, digest = _count(told["num_bytes"]), str(told["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(folder, error) from error
        if size != num_bytes:
            raise DamagedCheckpoint(folder, f"{TRAINING_FILE} is cut off or grown: {size} bytes of {num_bytes}")
        try:
            same = sha256(file) == digest
        except OSError as error:  # of the disk: the size is told by its folder, the bytes may be gone
            raise DamagedCheckpoint(folder, f"{TRAINING_FILE} cannot be read: {error.strerror}") from error
        if not same:
            raise DamagedCheckpoint(folder, f"{TRAINING_FILE} has other bytes than were written: its SHA-256 differs")
    saved_config(folder)
    _position(folder, state, _read_tensors(folder, ("consumed",)).get("consumed"))


def load_checkpoint(folder: Path, engine: Engine) -> Position:
    """Copies a checkpoint into the engine's arenas, addresses unchanged. Raises ValueError when it is damaged or was made
    for another drafter."""
    check_config(folder, engine.config)
    found = _read_tensors(folder)
    position = _position(folder, read_state(folder), found.pop("consumed", None))
    expected = training_tensors(engine)
    for name, tensor in expected.items():
        if name not in found or (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype):
            raise DamagedCheckpoint(folder, f"no {name} of shape {tuple(tensor.shape)}, {tensor.dtype}")
        # None is written; of a checkpoint without checksums nothing else would show it.
        if tensor.is_floating_point() and not all_finite(found[name]):
            raise DamagedCheckpoint(folder, f"NaN or infinity in {name}")
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(found[name])
        engine.params.refresh_weights()
    return position


def seal(state: dict[str, Any]) -> str:
    """state.json's text, with the SHA-256 of its content in it."""
    return json.dumps(state | {"sha256": _digest(state)}, indent=1)


def read_state(folder: Path) -> dict[str, Any]:
    """state.json. Raises DamagedCheckpoint when there is none, or another than was written."""
    try:
        state = parse_json((folder / STATE_FILE).read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(folder, f"no {STATE_FILE} to read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedCheckpoint(folder, f"{STATE_FILE}: {error}") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(folder, f"no {STATE_FILE} of format version {FORMAT_VERSION}")
    version = state.get("format_version")
    if version != FORMAT_VERSION:
        raise DamagedCheckpoint(
            folder, f"{STATE_FILE} of format version {shown(version)}, this version reads {FORMAT_VERSION}"
        )
    told = state.pop("sha256", None)
    if (told is not None or "files" in state) and told != _digest(state):
        raise DamagedCheckpoint(folder, f"{STATE_FILE} has another content than was written: its SHA-256 differs")
    return state


def nonfinite_error(where: Path, names: list[str]) -> ValueError:
    """What is said of weights that are not written; names: of the tensors, at least one."""
    return ValueError(
        f"{where}: expected finite weights, found NaN or infinity in {names[0]} and {len(names) - 1} more; nothing was "
        "written. Lower optimizer.lr, or go on from an earlier checkpoint"
    )


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
        wrong = [name for name, tensor in tensors.items() if not all_finite(tensor)]
        if wrong:
            raise nonfinite_error(folder, wrong)
        write_safetensors(into / WEIGHTS_FILE, tensors, {"format": "pt"})
        (into / CONFIG_FILE).write_text(json.dumps(written, indent=2) + "\n")
        for name, content in (beside or {}).items():
            (into / name).write_text(json.dumps(content, indent=1) + "\n")

    publish_folder(folder, write)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{shown(value)} where a count belongs")
    return value


def _consumed(tensor: Tensor, num_samples: int) -> tuple[tuple[int, int], ...]:
    if tensor.dtype != torch.int64 or tensor.dim() != 2 or tensor.shape[1] != 2:
        raise ValueError(f"consumed as {tensor.dtype}{list(tensor.shape)}")
    if len(tensor) and (int(tensor.min()) < 0 or int(tensor[:, 0].max()) >= num_samples):
        raise ValueError("consumed rows of samples that there are not")
    return tuple((sample, piece) for sample, piece in tensor.tolist())


def _position(folder: Path, state: dict[str, Any], consumed: Tensor | None) -> Position:
    try:
        if consumed is None:
            raise ValueError("no consumed rows")
        told = dict(state["data"])
        data = DataIdentity(digest=str(told.pop("digest")), **{name: _count(value) for name, value in told.items()})
        return Position(
            _count(state["step"]),
            _count(state["epoch"]),
            _consumed(consumed, data.num_samples),
            data,
            None if state["logged"] is None else MetricSums(**state["logged"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(folder, error) from error


def _read_tensors(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    try:
        return read_tensors(folder / TRAINING_FILE, names)
    except ValueError as error:
        raise DamagedCheckpoint(folder, error) from error


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
