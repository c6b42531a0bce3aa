"""Opening hidden states, whoever wrote them: ours as `Dataset`, another trainer's as `ForeignDataset`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from buffers.dataset import Dataset, SampleSource
from buffers.foreign import ForeignDataset, ForeignFolder, scan_folder
from buffers.foreign_facts import Facts, FactsError, resolve_target
from buffers.foreign_recognise import recognise

__all__ = ["Facts", "FactsError", "complete", "open_dataset", "open_folder"]

NO_FACTS = Facts()


def open_dataset(
    path: str | Path,
    facts: Facts = NO_FACTS,
    *,
    fallback: Facts = NO_FACTS,
    progress: Callable[[int, int], None] | None = None,
) -> SampleSource:
    """The dataset in a folder, opened for reading. fallback: facts for a foreign one that neither `facts` nor its files have.
    progress: called with samples read and all samples, while a foreign one is scanned.

    Raises ValueError when it is none, is of two formats or damaged; FactsError when it contradicts the facts or, in one line
    for all of them, when facts are missing.
    """
    folder = open_folder(path, progress)
    if folder is None:
        dataset = Dataset(path)
        _refuse_other_facts(dataset, facts)
        return dataset
    if not (facts.target_layer_ids or folder.reader.target_layer_ids):
        facts = replace(facts, target_layer_ids=fallback.target_layer_ids)
    if facts.mask_token_id < 0:
        facts = replace(facts, mask_token_id=fallback.mask_token_id)
    return complete(folder, facts)


def open_folder(path: str | Path, progress: Callable[[int, int], None] | None = None) -> ForeignFolder | None:
    """Another trainer's folder, scanned; None for a dataset of ours. Raises ValueError as `open_dataset` does, but for facts."""
    found = recognise(Path(path))
    return None if found is None else scan_folder(Path(path), found, progress)


def complete(folder: ForeignFolder, facts: Facts) -> ForeignDataset:
    """A scanned folder with what the settings say of it. Raises ValueError as `open_dataset` does."""
    target = resolve_target(folder.root, folder.format, facts, folder.reader, folder.has_last_hidden)
    return ForeignDataset(folder, target, facts.on_bad_file)


def _refuse_other_facts(dataset: Dataset, facts: Facts) -> None:
    """Our datasets say everything themselves: a setting may repeat it, not contradict it."""
    info = dataset.info
    said: dict[str, object] = {}
    if facts.target_layer_ids:
        said["target_layer_ids"] = facts.target_layer_ids
    if facts.mask_token_id >= 0:
        said["mask_token_id"] = facts.mask_token_id
    if facts.last_hidden_norm in ("pre", "post") and info.last_hidden_norm is not None:
        said["last_hidden_norm"] = facts.last_hidden_norm
    for name, value in said.items():
        if value != getattr(info, name):
            raise FactsError(
                f"expected data.{name} to be {getattr(info, name)} as {dataset.path} has recorded, found {value}. Leave the "
                "setting out."
            )
