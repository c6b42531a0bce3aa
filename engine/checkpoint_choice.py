"""Which checkpoint is gone on from: the newest that is whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint import DamagedCheckpoint, check_whole, checkpoints
from engine.publish import remove_folder

_PASSED_OVER = "passed-over-"


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole, and why each newer one is not."""

    folder: Path
    passed_over: tuple[tuple[Path, str], ...] = ()


def newest_whole(root: Path) -> Found | None:
    """None where there is no checkpoint at all. Raises ValueError where there are some and none is whole. One that the run of
    another process removes meanwhile, for a newer one that it has written, is no damaged one."""
    passed_over: list[tuple[Path, str]] = []
    for folder in reversed(checkpoints(root)):
        try:
            check_whole(folder)
        except DamagedCheckpoint as error:
            if not folder.exists():
                return newest_whole(root)
            passed_over.append((folder, error.why))
        else:
            return Found(folder, tuple(passed_over))
    if passed_over:
        told = "; ".join(f"{folder.name}: {why}" for folder, why in passed_over)
        raise ValueError(
            f"{root}: expected a checkpoint to go on from, found none that is whole ({told}); copy a whole one there, or remove "
            "them all to begin anew"
        )
    return None


def set_aside(found: Found) -> None:
    """Gives the folders that were passed over names that no checkpoint has: the run will come to their steps again."""
    for folder, _ in found.passed_over:
        place = folder.with_name(_PASSED_OVER + folder.name)
        if place.exists():
            remove_folder(place)
        folder.rename(place)
