"""Opening a dataset, or several as a mixture, as the settings say; with a word to the user while other trainers' files are
scanned."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from buffers.dataset import SampleSource, folder_names
from buffers.foreign_facts import NORM_OF_FORMAT, Facts, FactsError, missing_facts
from buffers.mixture import Mixture
from buffers.open_dataset import complete, open_dataset, open_folder
from engine.drafter_config import DrafterConfig
from engine.mixture_agreement import refuse_disagreement
from engine.reports import make_console
from engine.settings import DataSettings, Settings
from engine.settings_fields import SettingsError

_QUIET_S = 2.0
_EVERY_S = 10.0


def facts_from(data: DataSettings) -> Facts:
    """What [data] says of another trainer's files."""
    return Facts(
        target=data.target,
        target_layer_ids=data.target_layer_ids,
        mask_token_id=data.mask_token_id,
        last_hidden_norm=data.last_hidden_norm,
        on_bad_file=data.on_bad_file,
    )


@contextmanager
def facts_are_settings() -> Iterator[None]:
    """What is said of the data is said in [data]: a FactsError from within becomes a SettingsError."""
    try:
        yield
    except FactsError as error:
        raise SettingsError(str(error)) from error


def open_data(path: str | Path, settings: Settings, *, drafter: DrafterConfig | None = None) -> SampleSource:
    """The dataset in a folder, whoever wrote it; what is done to its values is said on stderr. A drafter's own layer ids and
    mask token stand in for settings that are left out. Raises as `buffers.open_dataset.open_dataset` does, SettingsError where
    the settings do not fit the data."""
    facts, fallback = facts_from(settings.data), Facts()
    if drafter is not None:
        fallback = Facts(target_layer_ids=tuple(drafter.target_layer_ids), mask_token_id=drafter.mask_token_id)
    with facts_are_settings():
        dataset = open_dataset(path, facts, fallback=fallback, progress=ScanProgress(path))
    _say_notes(dataset)
    return dataset


def open_training_data(folders: str | Path | Sequence[str | Path], settings: Settings) -> SampleSource:
    """The dataset in one folder, or several as a mixture with data.weights: what to train on. Raises as `open_data` does,
    SettingsError also for weights that are not one a folder, and ValueError naming all in which the folders disagree."""
    paths = [str(folders)] if isinstance(folders, str | Path) else list(map(str, folders))
    if not paths:
        raise SettingsError("data.path: expected a dataset's folder or several, found nothing. Name one.")
    data = replace(settings.data, path=tuple(paths))
    weights = data.weights or (1.0,) * len(paths)
    if len(paths) == 1 and weights == (1.0,):
        return open_data(paths[0], settings)
    with facts_are_settings():
        sources = _open_sources(paths, facts_from(data))
    refuse_disagreement(sources, settings)
    mixture = Mixture(sources, weights, seed=settings.run.seed)
    _say_notes(mixture)
    return mixture


def _open_sources(paths: Sequence[str], facts: Facts) -> list[SampleSource]:
    places = [Path(path).resolve() for path in paths]
    twice = [path for index, path in enumerate(paths) if places[index] in places[:index]]
    if twice:
        raise SettingsError(f"data.path: expected every folder once, found {twice[0]} again. Give it a weight of 2.")
    foreign = [open_folder(path, ScanProgress(path)) for path in paths]
    missing = [
        fact
        for folder in foreign
        if folder is not None
        for fact in missing_facts(folder.format, facts, folder.reader, folder.has_last_hidden)
    ]
    if missing:
        facts_wanted = list(dict.fromkeys(missing))
        raise SettingsError(
            f"data.path: other trainers' files do not say everything; expected {len(facts_wanted)} more settings: "
            f"{'; '.join(facts_wanted)}"
        )
    formats = {folder.format for folder in foreign if folder is not None}
    # The setting is meant for the format that leaves it open, not for one beside it that fixes it.
    auto = replace(facts, last_hidden_norm="auto") if any(NORM_OF_FORMAT[name] is None for name in formats) else facts
    if facts.last_hidden_norm == "none":
        auto = facts
    # A dataset of ours beside other trainers' files is compared with them, not with the settings meant for them.
    own = Facts() if formats else facts
    return [
        open_dataset(path, own)
        if folder is None
        else complete(folder, facts if NORM_OF_FORMAT[folder.format] is None else auto)
        for path, folder in zip(paths, foreign, strict=True)
    ]


def _say_notes(dataset: SampleSource) -> None:
    console = make_console(stderr=True)
    for note in (*dataset.notes, *_without_blocks(dataset)):
        console.print(note, markup=False, soft_wrap=True)


def _without_blocks(dataset: SampleSource) -> list[str]:
    """A line for each source that has samples which add nothing. Where none of any source does, planning is refused."""
    if not dataset.eligible_counts.any():
        return []
    sources = dataset.sources if isinstance(dataset, Mixture) else (dataset,)
    return [
        f"{folder_names(source)}: {empty} of {len(source)} samples have no two supervised tokens side by side, so no draft "
        "block: they add nothing"
        for source in sources
        if (empty := int((source.eligible_counts == 0).sum()))
    ]


class ScanProgress:
    """Lines on stderr about a scan that takes longer than a moment."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._next_s = time.monotonic() + _QUIET_S

    def __call__(self, done: int, total: int) -> None:
        """Called as samples are read."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVERY_S
            make_console(stderr=True).print(f"reading the lengths of {self._path}: {done} of {total} samples")
