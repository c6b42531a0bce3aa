"""Which trainer wrote a folder of hidden states: told by what the files hold, not by what they are called."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from buffers import foreign_deepspec as deepspec
from buffers import foreign_speculators as speculators
from buffers.foreign_archives import ArchiveReader
from buffers.foreign_scan import Reader
from buffers.manifest import MANIFEST
from buffers.torch_archive import GZIP_MAGIC, ZIP_MAGIC, gzip_holds_archive

OURS = "dflash-engine"
_ARROW_MAGIC = b"\xff\xff\xff\xff"
# A file with such a name that is empty or damaged belongs to the dataset all the same, and is reported.
_ARCHIVE_SUFFIXES = (".ckpt", ".pt", ".pth", ".ckpt.gz", ".pt.gz")


@dataclass(frozen=True)
class Found:
    """A folder's samples and the files that belong to none: file -> why."""

    reader: Reader
    left_over: dict[str, str]


def recognise(root: Path) -> Found | None:
    """The reader for the folder; None for our own format.

    Raises ValueError when the folder does not exist, holds none of the formats, or two of them.
    """
    if not root.is_dir():
        raise ValueError(f"expected a dataset with {MANIFEST} in {root}, found no such folder. Check the path.")
    own = (root / MANIFEST).is_file()
    is_deepspec = deepspec.is_deepspec(root)
    certain = own and _says_ours(root / MANIFEST)
    # Our folder has no folders below it that could matter; another trainer's may be deep.
    stamps, outside = _list_files(root, deep=not certain)
    claimed = {MANIFEST, "target.safetensors"} if own else set()
    deep_reader = None
    if is_deepspec:
        deep_reader = deepspec.DeepSpecReader(root, stamps)
        claimed |= {deepspec.MANIFEST, deepspec.INDEX, *deep_reader.shard_files}
    archives, states, arrow = [], {}, []
    for name in stamps:
        if name in claimed or (own and name.startswith("shard-") and name.endswith(".safetensors")):
            continue
        match _kind(root / name):
            case "archive":
                archives.append(name)
            case "states":
                states[name] = _row(name)
            case "arrow":
                arrow.append(name)
    present = {OURS: [MANIFEST]} if own else {}
    present |= {deepspec.DEEPSPEC: [deepspec.MANIFEST]} if is_deepspec else {}
    present |= {speculators.SPECULATORS: list(states)} if states else {}
    present |= {"SpecForge or Model-Optimizer": archives} if archives else {}
    if own and not certain and len(present) > 1:
        # Other people's files may be called dataset.json too.
        own = False
        del present[OURS]
    if len(present) > 1:
        raise two_formats(root, {name: files[0] for name, files in present.items()})
    if own:
        return None
    left_over = dict.fromkeys(outside, "expected files inside the folder, found a link that leads out of it")
    if deep_reader is not None:
        return Found(deep_reader, left_over)
    if archives:
        return Found(ArchiveReader(root, archives, [stamps[name] for name in archives]), left_over)
    if states:
        return _speculators(root, states, arrow, stamps, left_over)
    if (root / "unfinished.json").is_file() or any(root.glob("shard-*.safetensors")):
        raise ValueError(
            f"expected a dataset with {MANIFEST} in {root}, found none. Check the path; a folder of shards without it was not "
            "finished: write it again."
        )
    raise ValueError(
        f"expected a dataset with {MANIFEST} in {root}, found none, nor hidden states of SpecForge, speculators, "
        f"Model-Optimizer or DeepSpec ({len(stamps)} files). Check the path."
    )


def _says_ours(manifest: Path) -> bool:
    with manifest.open("rb") as stream:
        return b'"format_version"' in stream.read(4096)


def two_formats(root: Path, examples: dict[str, str]) -> ValueError:
    """The error for a folder of more than one format; examples: a file of each."""
    named = " and ".join(f"{name} ({file})" for name, file in examples.items())
    return ValueError(f"expected the files of one format in {root}, found {named}. Give each a folder of its own.")


def _speculators(
    root: Path, states: dict[str, int | None], arrow: list[str], stamps: dict[str, str], left_over: dict[str, str]
) -> Found:
    if not arrow:
        raise ValueError(
            f"expected the Arrow dataset of the hidden states in {root}, which has their loss masks, found none. Put "
            "speculators' dataset folder (data-*.arrow) below the same folder."
        )
    by_row: dict[int, str] = {}
    for name, row in states.items():
        if row is None or row in by_row:
            left_over[name] = "expected a name hs_<row>.safetensors of its own, which says the Arrow dataset's row"
        else:
            by_row[row] = name
    # A damaged file has no header that shows what it holds; by its name it is the row's.
    for name in stamps:
        row = _row(name)
        if row is not None:
            by_row.setdefault(row, name)
    reader = speculators.SpeculatorsReader(root, speculators.in_order(root, arrow), by_row, stamps)
    for name in reader.left_over:
        left_over[name] = f"expected a row of the Arrow dataset, which has {reader.arrow_rows} rows, found none for it"
    return Found(reader, left_over)


def _row(name: str) -> int | None:
    match = re.fullmatch(r"hs_(\d{1,18})\.safetensors", Path(name).name)
    return int(match[1]) if match else None


def _kind(file: Path) -> str:
    """archive, states, arrow, or "" for a file that is no dataset's."""
    try:
        with file.open("rb") as stream:
            magic = stream.read(9)
        if magic[:4] == ZIP_MAGIC or (magic[:2] == GZIP_MAGIC and gzip_holds_archive(file)):
            return "archive"
        if magic[:4] == _ARROW_MAGIC:
            return "arrow"
        if magic[8:] == b"{" and speculators.holds_states(file):
            return "states"
    except OSError:
        pass
    return "archive" if file.name.endswith(_ARCHIVE_SUFFIXES) else ""


def _list_files(root: Path, *, deep: bool) -> tuple[dict[str, str], list[str]]:
    """Size and time of change of every file by its name below root, data_10 after data_9; and links that lead out of root."""
    stamps, outside = {}, []
    home = str(root.resolve()) + os.sep
    for folder, folders, files in os.walk(root):
        if not deep:
            folders.clear()
        for file in files:
            path = os.path.join(folder, file)
            name = os.path.relpath(path, root)
            if os.path.islink(path) and not os.path.realpath(path).startswith(home):
                outside.append(name)
                continue
            try:
                status = os.stat(path)
            except OSError:
                continue  # gone since the folder was listed
            if os.path.isfile(path):
                stamps[name] = f"{status.st_size}:{status.st_mtime_ns}"
    natural: Callable[[str], list[tuple[int, str]]] = lambda name: [  # noqa: E731
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
    return {name: stamps[name] for name in sorted(stamps, key=natural)}, sorted(outside)
