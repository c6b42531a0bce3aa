"""Another trainer's folder of hidden states as a dataset: scanned once, read sample by sample, rounded to bf16."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers.dataset import Sample, check_range
from buffers.foreign_facts import Target
from buffers.foreign_recognise import Found, two_formats
from buffers.foreign_scan import Reader, scan
from buffers.manifest import FORMAT_VERSION, DatasetInfo
from buffers.raw_sample import Measured, RawSample, measure
from buffers.untrusted import printable

# A list of bad files in an error shows this many; `data inspect` shows all.
_SHOWN = 5


@dataclass(frozen=True)
class ForeignFolder:
    """A folder after its scan, before anything is known of the target. `left_over`: files of no sample -> why."""

    root: Path
    format: str
    reader: Reader
    measured: list[Measured]
    left_over: dict[str, str]

    @property
    def has_last_hidden(self) -> bool:
        """Whether any sample has last_hidden; the others are then bad files."""
        return any(m.last_width for m in self.measured if not m.reason)

    def bad_files(self, target: Target | None = None) -> dict[str, str]:
        """Every file (or place in one) that cannot be used -> why; with the target, those that do not fit it too."""
        found = dict(self.left_over)
        needs_last = self.has_last_hidden if target is None else target.last_hidden_norm is not None
        for name, measured in zip(self.reader.names, self.measured, strict=True):
            reason = measured.reason or _misfit(measured, target, needs_last)
            if reason:
                found[name] = reason
        return found


def scan_folder(root: Path, found: Found, progress: Callable[[int, int], None] | None = None) -> ForeignFolder:
    """Reads what opening must know. Raises ValueError for files of two formats, or when no file can be used."""
    measured = scan(found.reader, progress)
    first: dict[str, str] = {}
    for name, record in zip(found.reader.names, measured, strict=True):
        if record.format and not record.reason:
            first.setdefault(record.format, name)
    if len(first) > 1:
        raise two_formats(root, first)
    if not first:
        reasons = {name: m.reason for name, m in zip(found.reader.names, measured, strict=True)}
        raise ValueError(f"expected hidden states in {root}, found no file that can be used: {list_bad(reasons)}")
    return ForeignFolder(root, next(iter(first)), found.reader, measured, found.left_over)


class ForeignDataset:
    """What `buffers.dataset.Dataset` is, for another trainer's folder. Nothing of it is written; samples are those of the usable
    files, in natural order of their names (DeepSpec: of its index; speculators: of the rows).

    `bad_files` were left out, with their reasons; `notes` says what is done to the values. Raises ValueError when a file
    cannot be used and `on_bad_file` is "refuse", or when none can.
    """

    def __init__(self, folder: ForeignFolder, target: Target, on_bad_file: str) -> None:
        self.path, self.format = folder.root, folder.format
        self.folders: tuple[Path, ...] = (self.path,)
        self.bad_files = folder.bad_files(target)
        names = folder.reader.names
        self._indices = [index for index, name in enumerate(names) if name not in self.bad_files]
        if self.bad_files and (on_bad_file == "refuse" or not self._indices):
            how = "; mend or remove them, or set data.on_bad_file to skip" if self._indices else ""
            raise ValueError(
                f"{self.path}: {len(self.bad_files)} of {len(names)} samples cannot be used: {list_bad(self.bad_files)}{how}"
            )
        self._reader = folder.reader
        used = [folder.measured[index] for index in self._indices]
        self.lengths = _column([m.length for m in used])
        self.eligible_counts = _column([m.eligible for m in used])
        self.supervised_counts = _column([m.supervised for m in used])
        self.info = DatasetInfo(
            FORMAT_VERSION,
            target.name,
            target.config,
            target.hidden_size,
            target.layer_ids,
            target.vocab_size,
            target.mask_token_id,
            target.last_hidden_norm,
            len(used),
            (),
        )
        self.notes = tuple(_notes(self.path, used, [names[index] for index in self._indices], len(self.bad_files)))
        self._measured = used

    @property
    def digest(self) -> str:
        """sha256 over every sample's tokens, mask and first and last hidden states, in order."""
        return hashlib.sha256("".join(m.digest for m in self._measured).encode()).hexdigest()

    def sample_digest(self, i: int) -> str:
        """`Measured.digest` of sample i as `sample` gives it: in bf16, and without what is left unread."""
        measured = self._measured[i]
        if measured.dtype == "bfloat16" and bool(measured.last_width) == (self.info.last_hidden_norm is not None):
            return measured.digest
        sample = self.sample(i)
        raw = RawSample(sample.input_ids, sample.loss_mask, sample.hidden_states, sample.last_hidden)
        return measure(raw, self.format).digest

    def __len__(self) -> int:
        return len(self._indices)

    def name(self, i: int) -> str:
        """The file of sample i."""
        return self._reader.names[self._indices[i]]

    def sample(
        self, i: int, start: int = 0, stop: int | None = None, into: Mapping[str, Tensor] | None = None
    ) -> Sample:
        """Tokens [start, stop) of sample i; hidden states in bf16, views of the mapped file where it has them so. into: of no
        use here."""
        stop = check_range(i, start, stop, self.lengths)
        index = self._indices[i]
        try:
            raw, _ = self._reader.read(index)
        except (ValueError, OSError, RuntimeError) as error:
            raise ValueError(
                f"{self.path / self.name(i)}: {error}; it could be read when the dataset was opened"
            ) from error
        L, D = self.info.num_taps, self.info.hidden_size
        with_last = self.info.last_hidden_norm is not None
        last = raw.last_hidden if with_last else None
        if (
            len(raw.input_ids) != self.lengths[i]
            or raw.hidden_states.shape[1] != L * D
            or with_last != (last is not None and last.shape[1] == D)
        ):
            raise ValueError(
                f"{self.path / self.name(i)}: expected what it held when the dataset was opened, found other sizes; start again"
            )
        return Sample(
            i,
            raw.input_ids[start:stop].to(torch.int32),
            raw.loss_mask[start:stop].to(torch.uint8),
            raw.hidden_states[start:stop].to(torch.bfloat16),
            None if last is None else last[start:stop].to(torch.bfloat16),
        )


def list_bad(reasons: dict[str, str]) -> str:
    """The first few files with their reasons, for an error of one line."""
    shown = [f"{printable(name, 300)}: {reason}" for name, reason in list(reasons.items())[:_SHOWN]]
    more = len(reasons) - len(shown)
    return "; ".join(shown) + (f"; and {more} more (`dflash-engine data inspect` lists all)" if more else "")


def _misfit(measured: Measured, target: Target | None, needs_last: bool) -> str:
    if needs_last and not measured.last_width:
        return "expected a last hidden state as in the other files, found none"
    if target is None:
        return ""
    if measured.lowest_id < 0 or measured.highest_id >= target.vocab_size:
        worst = measured.lowest_id if measured.lowest_id < 0 else measured.highest_id
        return f"expected token ids in 0..{target.vocab_size - 1}, found {worst}: another tokenizer's"
    L, D = len(target.layer_ids), target.hidden_size
    if measured.width != L * D:
        return (
            f"expected hidden states of {L * D} values a token ({L} target_layer_ids {list(target.layer_ids)}, hidden size {D}), "
            f"found {measured.width}"
        )
    if needs_last and measured.last_width != D:
        return f"expected a last hidden state of {D} values a token, found {measured.last_width}"
    return ""


def _notes(root: Path, used: list[Measured], names: list[str], bad: int) -> list[str]:
    notes = []
    for dtype in ("float16", "float32"):
        count = sum(m.dtype == dtype for m in used)
        if count:
            notes.append(
                f"{root}: {count} samples have {dtype} hidden states; they are rounded to bf16 as they are read"
            )
    gzipped = sum(name.endswith(".gz") for name in names)
    if gzipped:
        notes.append(
            f"{root}: {gzipped} files are gzipped; each is decompressed every time it is read. `dflash-engine data convert` "
            "does it once"
        )
    if bad:
        notes.append(f"{root}: {bad} files cannot be used and are left out; `dflash-engine data inspect` lists them")
    return notes


def _column(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
