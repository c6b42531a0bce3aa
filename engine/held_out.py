"""Held-out evaluation during a run, and the best drafter so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffers.dataset import SampleSource, folder_names, load_target_tensors
from buffers.manifest import TARGET_FILE
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from buffers.untrusted import one_line, parse_json, shown
from engine.assemble import make_batch_plan, require_blocks
from engine.checkpoint import save_drafter
from engine.data_source import open_data
from engine.engine import Engine
from engine.publish import restore_folder
from engine.reports import without_nan
from engine.settings import Settings
from engine.target_weights import fingerprint, with_target
from engine.verification import Feed

BEST_FILE = "best.json"


def open_held_out(settings: Settings, training: SampleSource) -> SampleSource | None:
    """The dataset of data.eval_path, None without one. Raises ValueError when it is of another target than the training
    data."""
    if not settings.data.eval_path:
        return None
    held_out = open_data(settings.data.eval_path, settings)
    check_same_target(settings, training, held_out)
    return held_out


def check_same_target(settings: Settings, training: SampleSource, held_out: SampleSource) -> None:
    """Raises ValueError when the held-out data are of another target than the training data, or lack what the loss reads."""
    names = ["hidden_size", "target_layer_ids", "vocab_size", "mask_token_id"]
    if settings.objective.kl_weight > 0:
        names.append("last_hidden_norm")
    for name in names:
        ours, theirs = getattr(training.info, name), getattr(held_out.info, name)
        if ours != theirs:
            raise ValueError(
                f"data.eval_path: {folder_names(held_out)} has {name} {theirs}, {folder_names(training)} has {ours}; hold "
                "out samples of the same target and layers"
            )
    ours = Path(settings.data.target) if settings.data.target else next(iter(with_target(training.folders)), None)
    for folder in with_target(held_out.folders):
        if ours is not None and fingerprint(load_target_tensors(folder)) != fingerprint(load_target_tensors(ours)):
            raise ValueError(
                f"data.eval_path: {folder / TARGET_FILE} has other weights than the target in {ours}; hold out samples of the "
                "same target"
            )


class HeldOut:
    """The evaluation's inputs and order, the same at every step: fixed anchors, fixed batches."""

    def __init__(
        self,
        dataset: SampleSource,
        buckets: Sequence[Bucket],
        settings: Settings,
        *,
        folder: Path,
        pipeline: dict[str, Any],
    ) -> None:
        """pipeline: what InputPipeline takes by keyword. Raises ValueError when no sample fits the buckets, or none has a place
        for a draft block."""
        try:
            require_blocks(dataset)
            plan = make_batch_plan(settings, dataset, buckets)
        except ValueError as error:
            raise ValueError(f"data.eval_path: {error}") from error
        self.inputs = InputPipeline(dataset, buckets, **pipeline)
        self.too_long = plan.too_long
        self.best: float | None = None
        self._folder, self._all = folder / "best", plan.epoch(0)
        # Which samples the best was measured on.
        self._digest = dataset.digest
        self.limit(settings.run.eval_batches)

    @property
    def feed(self) -> Feed:
        """All batches that an evaluation may see."""
        return Feed(self._all, self.inputs.load)

    def limit(self, batches: int) -> None:
        """Evaluates on the first so many batches from here on; 0 means all."""
        self._batches = self._all[: batches or None]

    def go_on(self) -> None:
        """Takes up the best of the run that is continued, if it was measured on these samples. Raises ValueError when best.json
        is damaged."""
        restore_folder(self._folder)
        file = self._folder / BEST_FILE
        self.best = None
        if file.is_file():
            try:
                told = parse_json(file.read_bytes())
                best = told["eval_accept_len"]
                if type(best) not in (int, float) or not math.isfinite(best):
                    raise ValueError(f"eval_accept_len {shown(best)}")
                self.best = best if told.get("eval_data", self._digest) == self._digest else None
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(
                    f"{file}: expected the best evaluation, found a damaged one ({one_line(error)}); remove "
                    f"{self._folder} to go on"
                ) from error

    def evaluate(self, engine: Engine, step: int) -> dict[str, Any]:
        """Loss and acceptance on the held-out samples; the best drafter so far, by accepted length, goes to best/. Waits
        for the device."""
        engine.eval_metrics.zero_()
        self.inputs.start(self._batches)
        while (batch := self.inputs.next()) is not None:
            engine.eval_step(batch.bucket)
        means = engine.eval_metrics.snapshot().read().means()
        record: dict[str, Any] = {"step": step}
        record |= {f"eval_{key}": means[key] for key in ("loss", "accuracy", "accept_len", "accuracy_per_slot")}
        record["eval_accept_per_slot"] = share_accepted(engine.eval_metrics.blocks_by_accepted.tolist())
        if self.best is None or means["accept_len"] > self.best:
            self.best = means["accept_len"]
            best = without_nan(record) | {"eval_data": self._digest}
            save_drafter(self._folder, engine.config, engine.params.state(), {BEST_FILE: best})
        return record


def share_accepted(blocks_by_accepted: Sequence[float]) -> list[float]:
    """The share of blocks in which slot 1..K-1 stands, with all before it, from how many blocks have 0..K-1 such slots. Their
    sum is the accepted length."""
    total = sum(blocks_by_accepted)
    return [sum(blocks_by_accepted[k:]) / total if total else 0.0 for k in range(1, len(blocks_by_accepted))]
