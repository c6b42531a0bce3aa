"""A text corpus that every installation has: the source files of the running interpreter's standard library, as bytes.

Tests, installed packages, generated tables and files that describe the machine are left out. A file is held out by a
hash of its relative path, so the split is the same whatever the Python version and the order of the disk.
"""

import hashlib
import sysconfig
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idle_test",
        "lib-dynload",
        "site-packages",
        "test",
        "tests",
        # Written by generators, not by people: code tables (a fifth of all files) and the text of help topics.
        "encodings",
        "pydoc_data",
    }
)
# Written by the build of the interpreter or by its distributor: paths of that machine, not part of the library.
SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
HELD_OUT_PERMILLE = 50


def stdlib_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(relative: str) -> bool:
    """Whether the file of this relative posix path is held out (about 5 % of all paths)."""
    digest = hashlib.sha256(relative.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PERMILLE


def corpus_files(split: str, root: Path | None = None) -> list[Path]:
    """Source files of `split` ("train" or "heldout") under `root`, sorted by relative posix path.

    `root` is the standard library unless given. Raises ValueError for another split or when there are no source files.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f'corpus split: expected "train" or "heldout", found {split!r}. Choose one of the two.')
    root = stdlib_root() if root is None else root
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py") if _belongs(path, root))
    if not names:
        raise ValueError(
            f"standard library: expected source files (*.py) under {root}, found none. "
            "Use an interpreter that is installed with its sources."
        )
    return [root / name for name in names if is_held_out(name) == (split == "heldout")]


def read_documents(files: list[Path]) -> list[bytes]:
    """The bytes of each file, in order; a document is one file. Empty files give empty documents."""
    return [path.read_bytes() for path in files]


def _belongs(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    if any(part in SKIPPED_FOLDERS for part in parts[:-1]) or parts[-1].startswith(SKIPPED_PREFIXES):
        return False
    return path.is_file()
