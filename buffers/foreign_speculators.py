"""speculators' datasets: an Arrow dataset of tokens and masks, and `hs_{i}.safetensors` with the hidden states of row i.

A file holds token_ids int[T] and hidden_states [T, L + 1, D]; the last slice is the verifier's last layer before its final
norm, the others are the taps. The loss mask is in the Arrow dataset alone, so both are needed. Arrow is read from its
memory-mapped files; pyarrow is the extra `arrow`.
"""

import struct
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffers.manifest import read_tensors
from buffers.raw_sample import RawSample, raw_sample
from buffers.untrusted import one_line, parse_json, shown_names

SPECULATORS = "speculators"
_HEADER_BYTES = 1 << 20


class SpeculatorsReader:
    """A sample a row of the Arrow dataset in `arrow_files`; row i's hidden states are in the file states[i]."""

    target_layer_ids: tuple[int, ...] = ()
    hidden_size = 0
    target_name = ""

    def __init__(self, root: Path, arrow_files: list[str], states: dict[int, str], stamp: dict[str, str]) -> None:
        """stamp: of every file by name. Raises ValueError when pyarrow or a column is missing, or a file is damaged."""
        self.root = root
        self._rows = _ArrowRows(root, arrow_files)
        rows = range(len(self._rows))
        arrow_stamp = ",".join(stamp[name] for name in arrow_files)
        self.names = [states.get(row, f"hs_{row}.safetensors (row {row})") for row in rows]
        self.stamps = [f"{stamp.get(name, 'none')},{arrow_stamp}" for name in self.names]
        self._found = states
        # Files that no row speaks of.
        self.left_over = [name for row, name in sorted(states.items()) if row not in rows]
        self.arrow_rows = len(self._rows)

    def read(self, index: int) -> tuple[RawSample, str]:
        """The sample and its format's name. Raises ValueError without the file's name, and OSError."""
        if index not in self._found:
            raise ValueError(f"expected the hidden states of row {index} of the Arrow dataset, found no file for it")
        # An empty or cut file has no header that fits it: read_tensors says so.
        values: dict[str, Any] = dict(read_tensors(self.root / self.names[index], ("token_ids", "hidden_states")))
        row = self._rows.row(index)
        states = values.get("hidden_states")
        if isinstance(states, Tensor):
            if states.ndim != 3 or states.shape[1] < 2 or not states.shape[2]:
                raise ValueError(f"expected hidden_states [T, taps + 1, D], found shape {list(states.shape)}")
            length, slices, width = states.shape
            flat = states.reshape(length, slices * width)
            values["hidden_states"], values["last_hidden"] = flat[:, :-width], flat[:, -width:]
        sample = raw_sample(
            values | {"loss_mask": row["loss_mask"]},
            ids="token_ids",
            mask="loss_mask",
            hidden="hidden_states",
            last="last_hidden",
        )
        if not torch.equal(sample.input_ids.long(), row["input_ids"].long()):
            raise ValueError(f"expected token_ids as input_ids of row {index} of the Arrow dataset, found others")
        return sample, SPECULATORS


class _ArrowRows:
    """Rows of an Arrow dataset as `datasets.save_to_disk` writes it: one IPC stream a file."""

    def __init__(self, root: Path, files: list[str]) -> None:
        try:
            import pyarrow
            import pyarrow.ipc
        except ImportError as error:
            raise ValueError(
                f"{root}: reading speculators' datasets requires pyarrow, found none; pip install 'dflash-engine[arrow]'"
            ) from error
        self._batches: list[Any] = []
        self._first = [0]
        for name in files:
            try:
                _refuse_compressed(pyarrow, root / name)
                # The batches hold the mapping; of the columns as much is read as shows that every row lies within its buffers:
                # pyarrow itself believes what a file says of that, and ends the process or reads beyond it.
                batches = list(pyarrow.ipc.open_stream(pyarrow.memory_map(str(root / name))))
                for batch in batches:
                    for column in {"input_ids", "loss_mask"} & set(batch.schema.names):
                        batch.column(column).validate(full=True)
            except (pyarrow.ArrowException, OSError, ValueError, struct.error) as error:
                raise ValueError(
                    f"{root / name}: expected an Arrow stream, found a damaged one ({one_line(error)}); copy it again"
                ) from error
            for batch in batches:
                lists = {field.name for field in batch.schema if isinstance(field.type, _list_types(pyarrow))}
                missing = [column for column in ("input_ids", "loss_mask") if column not in lists]
                if missing:
                    raise ValueError(
                        f"{root / name}: expected input_ids and loss_mask as columns of lists, found no {', '.join(missing)}; "
                        "point to the dataset that speculators' prepare_data wrote"
                    )
                self._batches.append(batch)
                self._first.append(self._first[-1] + batch.num_rows)

    def __len__(self) -> int:
        return self._first[-1]

    def row(self, index: int) -> dict[str, Tensor]:
        batch = bisect_right(self._first, index) - 1
        found = {}
        for column in ("input_ids", "loss_mask"):
            cell = self._batches[batch].column(column)[index - self._first[batch]].values
            if cell is None or cell.null_count:
                raise ValueError(
                    f"expected a list of numbers as {column} of row {index} of the Arrow dataset, found a null"
                )
            # A copy: Arrow's memory is read-only, and short.
            found[column] = torch.from_numpy(np.array(cell.to_numpy(zero_copy_only=False)))
        return found


def _refuse_compressed(pyarrow: Any, file: Path) -> None:
    """Raises ValueError for compressed columns, of which a small file may hold any amount; `datasets` writes none."""
    for message in pyarrow.ipc.MessageReader.open_stream(pyarrow.memory_map(str(file))):
        if message.type == "record batch" and _is_compressed(message.metadata.to_pybytes()):
            raise ValueError("compressed columns")


def _is_compressed(metadata: bytes) -> bool:
    """Whether a record batch's header, a flatbuffer, has its fourth field (format/Message.fbs of Apache Arrow)."""

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        inside = 6 + 2 * number <= struct.unpack_from("<H", metadata, vtable)[0]
        offset = struct.unpack_from("<H", metadata, vtable + 4 + 2 * number)[0] if inside else 0
        return table + offset if offset else 0

    def table_at(place: int) -> int:
        return place + int(struct.unpack_from("<I", metadata, place)[0])

    return bool(field(table_at(field(table_at(0), 2)), 3))


def _list_types(pyarrow: Any) -> tuple[type, ...]:
    return (pyarrow.ListType, pyarrow.LargeListType, pyarrow.FixedSizeListType)


def holds_states(file: Path) -> bool:
    """Whether a safetensors file's header names speculators' tensors; False when there is no header to read."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = parse_json(stream.read(length)) if length <= _HEADER_BYTES else None
        except ValueError:
            return False
    return isinstance(header, dict) and "token_ids" in header and "hidden_states" in header


def in_order(root: Path, arrow_files: list[str]) -> list[str]:
    """The files of one Arrow dataset in the order of its rows, as state.json lists them; the names' order without it.

    Raises ValueError when they are of more than one dataset, or state.json names a file that is not there.
    """
    folders = sorted({str(Path(name).parent) for name in arrow_files})
    if len(folders) > 1:
        raise ValueError(f"{root}: expected one Arrow dataset, found {', '.join(folders)}; keep one below this folder")
    state = root / folders[0] / "state.json"
    if not state.is_file():
        return sorted(arrow_files)
    try:
        listed = [str(Path(folders[0]) / item["filename"]) for item in parse_json(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{state}: expected the list of _data_files, found a damaged file; copy it again") from error
    missing = [name for name in listed if name not in arrow_files]
    if missing:
        raise ValueError(
            f"{state}: expected its files beside it, found no Arrow file {shown_names(missing)}; copy it again"
        )
    return listed
