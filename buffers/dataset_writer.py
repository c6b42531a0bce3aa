"""Writing our dataset format: shards as they fill, the manifest last."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    TARGET_FILE,
    UNFINISHED,
    DatasetInfo,
    ShardInfo,
    check_tokens,
    mask_length_error,
    publish,
    sha256,
    shard_of,
    write_safetensors,
    wrong_width_error,
)
from buffers.untrusted import one_line, parse_json
from buffers.writer_checks import check_description, of_config

# At 40 KB of hidden states a token (5 taps of 4096 in bf16) a shard is 1.3 GB, which the writer holds in memory.
SHARD_TOKENS = 32768


class DatasetWriter:
    """Writes a dataset: shards as they fill, `dataset.json` last, so an unfinished folder is never taken for a dataset.

    Every file is written under a temporary name, fsynced and renamed. As a context manager it closes on success and
    leaves the manifest unwritten on an exception. Raises ValueError for a folder that already holds a dataset.

    `unfinished.json` lists the whole shards while the dataset grows. With `resume` a writer keeps those of an earlier
    one that died and goes on behind them: `num_samples` says how many samples are there, and the caller adds from the
    next one on. `source` names what the samples are made from; both writers must have the same, and the same
    description of the dataset, or ValueError is raised.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        target_name: str,
        target_config: dict[str, Any],
        hidden_size: int,
        target_layer_ids: Sequence[int],
        vocab_size: int,
        mask_token_id: int,
        last_hidden_norm: str | None = None,
        shard_tokens: int = SHARD_TOKENS,
        resume: bool = False,
        source: str = "",
    ) -> None:
        self.path = Path(path)
        description = {
            "target_name": target_name,
            "target_config": target_config,
            "hidden_size": hidden_size,
            "target_layer_ids": target_layer_ids,
            "vocab_size": vocab_size,
            "mask_token_id": mask_token_id,
        }
        check_description(description)
        self._info = DatasetInfo(
            FORMAT_VERSION,
            target_name,
            target_config,
            hidden_size,
            tuple(target_layer_ids),
            vocab_size,
            mask_token_id,
            last_hidden_norm,
            0,
            (),
        )
        # What cannot be written at the end is found before the work.
        try:
            DatasetInfo.from_json(self._info.to_json())
        except TypeError as error:
            raise ValueError(
                f"expected plain values that JSON has in the manifest, found one that it has not ({error}). Convert it: "
                "config.to_dict(), int(size)."
            ) from error
        if shard_tokens <= 0:
            raise ValueError(f"expected a positive shard_tokens, found {shard_tokens}. Set it to at least 1.")
        self._source = source
        going_on = resume and (self.path / UNFINISHED).is_file()
        self._shards = self._shards_to_keep() if going_on else []
        # A shard that unfinished.json does not list was whole just when the writer died: it is written again.
        for found in (MANIFEST,) if going_on else (MANIFEST, "shard-*.safetensors"):
            if any(self.path.glob(found)):
                raise ValueError(
                    f"expected {self.path} to hold no dataset, found {found}. Choose another folder or remove it."
                )
        self.path.mkdir(parents=True, exist_ok=True)
        self._shard_tokens = shard_tokens
        self._num_samples = sum(shard.num_samples for shard in self._shards)
        self._pending: list[dict[str, Tensor]] = []
        self._pending_tokens = 0

    @property
    def num_samples(self) -> int:
        """Samples so far, those of an earlier writer included."""
        return self._num_samples

    def add(
        self,
        input_ids: Tensor | NDArray[np.integer] | Sequence[int],
        loss_mask: Tensor | NDArray[np.integer] | Sequence[int],
        hidden_states: Tensor | NDArray[np.floating],
        last_hidden: Tensor | NDArray[np.floating] | None = None,
    ) -> int:
        """Add a sample of T tokens and return its id: hidden_states [T, L*D] in any float type, rounded to bf16.

        Raises ValueError when lengths, widths, token ids or mask values do not match the dataset.
        """
        info = self._info
        sample_id = self._num_samples
        ids = torch.as_tensor(input_ids).cpu()
        mask = torch.as_tensor(loss_mask).cpu()
        where = f"sample {sample_id}"
        if ids.ndim != 1 or not len(ids):
            raise ValueError(
                f"expected input_ids [T] of at least one token in {where}, found {list(ids.shape)}. Add one sample at a time."
            )
        if mask.shape != ids.shape:
            raise ValueError(mask_length_error(where, len(ids), list(mask.shape)))
        check_tokens(ids.numpy(), mask.numpy(), info.vocab_size, where)
        tensors = {"input_ids": ids.to(torch.int32), "loss_mask": mask.to(torch.uint8)}
        if (last_hidden is None) != (info.last_hidden_norm is None):
            raise ValueError(
                f"expected last_hidden exactly when last_hidden_norm is set, found last_hidden_norm "
                f"{info.last_hidden_norm} and {'no' if last_hidden is None else 'a'} last_hidden in {where}. "
                "Set last_hidden_norm to pre or post to store it."
            )
        hidden = {"hidden_states": (hidden_states, info.num_taps * info.hidden_size)}
        if last_hidden is not None:
            hidden["last_hidden"] = (last_hidden, info.hidden_size)
        for name, (given, width) in hidden.items():
            values = torch.as_tensor(given)
            if not values.is_floating_point():
                raise ValueError(
                    f"expected {name} of a float type in {where}, found {values.dtype}. Give them as computed."
                )
            if values.shape != (len(ids), width):
                raise ValueError(wrong_width_error(f"{where}: {name}", [len(ids), width], list(values.shape), info))
            tensors[name] = values.detach().to("cpu", torch.bfloat16, copy=True)
        if self._pending and self._pending_tokens + len(ids) > self._shard_tokens:
            self._flush()
        self._pending.append(tensors)
        self._pending_tokens += len(ids)
        self._num_samples += 1
        return sample_id

    def write_target(self, embed_tokens: Tensor, lm_head: Tensor | None, norm: Tensor) -> None:
        """Write the target's embedding [V, D], head [V, D] (None when tied to the embedding) and final norm [D].

        A tied head is left out of the file; `load_target_tensors` gives the embedding for it.
        """
        D = self._info.hidden_size
        if lm_head is None and of_config(self._info.target_config, "tie_word_embeddings") is False:
            raise ValueError(
                "expected lm_head [V, D], found None although target_config has tie_word_embeddings false. Give the target's "
                "own head."
            )
        tensors = {"embed_tokens.weight": embed_tokens, "norm.weight": norm}
        if lm_head is not None and lm_head.data_ptr() != embed_tokens.data_ptr():
            tensors["lm_head.weight"] = lm_head
        for name, tensor in tensors.items():
            expected = [D] if name == "norm.weight" else [self._info.vocab_size, D]
            if not isinstance(tensor, Tensor) or list(tensor.shape) != expected:
                told = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"expected {name} {expected}, found {told}. Give the target's own tensor.")
        _save(self.path / TARGET_FILE, {name: tensor.detach().cpu() for name, tensor in tensors.items()})

    def end_shard(self) -> None:
        """Write what was added since the last shard as one of its own, whatever its size."""
        if self._pending:
            self._flush()

    def close(self) -> DatasetInfo:
        """Write the last shard and then the manifest. Raises ValueError when no sample was added."""
        if not self._num_samples:
            raise ValueError(f"expected at least one sample for {self.path}, found none. Add samples before close.")
        if self._pending:
            self._flush()
        info = replace(self._info, num_samples=self._num_samples, shards=tuple(self._shards))
        _write_text(self.path / MANIFEST, info.to_json())
        (self.path / UNFINISHED).unlink(missing_ok=True)
        return info

    def _flush(self) -> None:
        lengths = [len(tensors["input_ids"]) for tensors in self._pending]
        shard = {name: torch.cat([tensors[name] for tensors in self._pending]) for name in self._pending[0]}
        shard["offsets"] = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        if not self._shards:
            self._list_shards()
        file = self.path / _shard_name(len(self._shards))
        _save(file, shard)
        self._shards.append(ShardInfo(file.name, len(lengths), sum(lengths), file.stat().st_size, sha256(file)))
        self._pending, self._pending_tokens = [], 0
        self._list_shards()

    def _list_shards(self) -> None:
        state = self._state() | {"shards": [asdict(shard) for shard in self._shards]}
        _write_text(self.path / UNFINISHED, json.dumps(state) + "\n")

    def _state(self) -> dict[str, Any]:
        """What two writers of one dataset have in common."""
        return {"dataset": json.loads(self._info.to_json()), "source": self._source}

    def _shards_to_keep(self) -> list[ShardInfo]:
        """The whole shards of an earlier writer. Raises ValueError when it wrote another dataset or a shard is not its own."""
        file = self.path / UNFINISHED
        try:
            state = parse_json(file.read_bytes())
            shards = [shard_of(shard, str(file)) for shard in state.pop("shards")]
            if [shard.file for shard in shards] != [_shard_name(number) for number in range(len(shards))]:
                raise ValueError("shards of other names")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"expected the list of shards in {file}, found a damaged one ({one_line(error)}). Remove "
                f"{self.path} and start again."
            ) from error
        expected = self._state()
        if state != expected:
            # What differs, by name: most likely a setting, or the source has changed since.
            theirs, ours = ({"source": s.get("source"), **s.get("dataset", {})} for s in (state, expected))
            names = ", ".join(name for name in ours if theirs.get(name) != ours[name])
            raise ValueError(
                f"expected {self.path} to be unfinished work of the same source and settings, found another {names}. "
                "Choose another folder or remove it."
            )
        for shard in shards:
            path = self.path / shard.file
            if not path.is_file() or path.stat().st_size != shard.num_bytes:
                raise ValueError(
                    f"expected {shard.num_bytes} bytes in {path}, found another file or none. Remove {self.path} and start again."
                )
        return shards

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _save(file: Path, tensors: dict[str, Tensor]) -> None:
    temporary = file.with_name(file.name + ".tmp")
    write_safetensors(temporary, {name: tensor.contiguous() for name, tensor in tensors.items()})
    publish(temporary, file)


def _write_text(file: Path, text: str) -> None:
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text)
    publish(temporary, file)
