"""`dflash-engine data inspect`: what a dataset holds, whether it is whole, and what speaks against how it was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from buffers.dataset import Dataset, Sample, SampleSource, load_target_tensors
from buffers.filling import all_finite
from buffers.foreign import ForeignFolder
from buffers.foreign_facts import NORM_OF_FORMAT, Facts, missing_facts, resolve_target
from buffers.manifest import TARGET_FILE
from buffers.open_dataset import complete, open_dataset, open_folder
from buffers.raw_sample import RawSample
from buffers.untrusted import printable
from engine.assemble import norm_eps, refuse_unreproduced, text_config
from engine.data_source import ScanProgress, facts_are_settings, facts_from
from engine.reading_checks import check_layer_ids, check_norm, some_positions
from engine.recomputation import recompute as recompute_samples
from engine.reports import make_console, print_fields
from engine.sample_progress import SampleProgress
from engine.settings import Settings
from engine.settings_fields import SettingsError

# Fewer supervised tokens leave no place for an anchor.
_FEWEST = 2


def inspect_dataset(path: Path, settings: Settings, *, verify: bool, recompute: int = 0) -> dict[str, Any]:
    """Prints a summary and returns it: sizes and lengths, files that cannot be used with their reasons, and warnings.

    verify: reads every byte, against the manifest's sha256 where there is one, and counts samples with NaN or infinity.
    recompute: samples over which the target is run again. Raises ValueError for a folder that is no dataset, a damaged one of
    ours, or a target that cannot be run.
    """
    facts, target = facts_from(settings.data), settings.data.target
    if target and not recompute and not Path(target).is_dir():  # running it over samples takes a hub id, too
        raise ValueError(
            f"data.target: expected the folder of the target's checkpoint, found no folder {target}; check the path"
        )
    folder = open_folder(path, ScanProgress(path))
    dataset: SampleSource | None
    if folder is None:
        with facts_are_settings():
            dataset = open_dataset(path, facts)
        assert isinstance(dataset, Dataset)
        figures = _of_ours(dataset)
    else:
        with facts_are_settings():
            figures, dataset = _of_foreign(folder, facts)
    figures["verified"] = verify
    if verify:
        figures["samples_not_finite"] = _count_not_finite(dataset if folder is None else folder)
    recorded = dataset.info.last_hidden_norm if dataset is not None else None
    if folder is not None and facts.last_hidden_norm == "auto" and NORM_OF_FORMAT[folder.format] is None:
        recorded = None  # what was put in its place is a guess
    figures |= _checks(dataset, settings.data.target, recorded)
    if recompute:
        figures |= _recomputed(dataset, settings.data.target, recompute, recorded, figures)
    figures["warnings"] += _warnings(figures)
    _show(figures)
    return figures


def _of_ours(dataset: Dataset) -> dict[str, Any]:
    info = dataset.info
    return {
        "format": "dflash-engine",
        "target": info.target_name,
        "shards": len(info.shards),
        "bytes": sum(shard.num_bytes for shard in info.shards),
        **_of_samples(dataset),
        "bad_files": {},
    }


def _of_foreign(folder: ForeignFolder, facts: Facts) -> tuple[dict[str, Any], SampleSource | None]:
    """The figures, and the dataset as far as facts and files make one."""
    reader = folder.reader
    missing = missing_facts(folder.format, facts, reader, folder.has_last_hidden)
    usable = [m for m in folder.measured if not m.reason]
    figures: dict[str, Any] = {
        "format": folder.format,
        "files_or_records": len(folder.measured),
        "hidden_values_a_token": sorted({m.width for m in usable}),
        "last_hidden_values_a_token": sorted({m.last_width for m in usable}),
        "stored_as": sorted({m.dtype for m in usable}),
        "token_ids": [min(m.lowest_id for m in usable), max(m.highest_id for m in usable)],
        "missing_settings": missing,
    }
    # Sizes and readings can be looked at without a mask token, and before it is known which norm was taken.
    norm_is_open = folder.has_last_hidden and NORM_OF_FORMAT[folder.format] is None and facts.last_hidden_norm == "auto"
    enough = replace(facts, mask_token_id=max(0, facts.mask_token_id), on_bad_file="skip")
    if norm_is_open:
        enough = replace(enough, last_hidden_norm="pre")
    if missing_facts(folder.format, enough, reader, folder.has_last_hidden):
        lengths = [m.length for m in usable]
        figures |= {
            "samples": len(usable),
            "tokens": sum(lengths),
            "length_min_median_p90_p99_max": _quantiles(np.array(lengths)),
            "anchor_positions": sum(m.eligible for m in usable),
            "samples_without_anchor": sum(not m.eligible for m in usable),
            "samples_under_two_supervised": sum(m.supervised < _FEWEST for m in usable),
            "bad_files": folder.bad_files(),
        }
        return figures, None
    target = resolve_target(folder.root, folder.format, enough, reader, folder.has_last_hidden)
    strangers = [
        name
        for name, m in zip(reader.names, folder.measured, strict=True)
        if not m.reason and not (m.lowest_id >= 0 and m.highest_id < target.vocab_size)
    ]
    dataset = complete(folder, enough)
    figures |= _of_samples(dataset) | {
        "samples_with_ids_outside_the_vocabulary": len(strangers),
        "first_of_them": strangers[0] if strangers else None,
        "bad_files": dataset.bad_files,
    }
    if facts.mask_token_id < 0:
        figures["mask_token_id"] = None
    if norm_is_open:
        figures["last_hidden_norm"] = None
    return figures, dataset


def _of_samples(dataset: SampleSource) -> dict[str, Any]:
    info = dataset.info
    return {
        "samples": len(dataset),
        "tokens": int(dataset.lengths.sum()),
        "hidden_size": info.hidden_size,
        "target_layer_ids": list(info.target_layer_ids),
        "vocab_size": info.vocab_size,
        "mask_token_id": info.mask_token_id,
        "last_hidden_norm": info.last_hidden_norm,
        "length_min_median_p90_p99_max": _quantiles(dataset.lengths),
        "anchor_positions": int(dataset.eligible_counts.sum()),
        "samples_without_anchor": int((dataset.eligible_counts == 0).sum()),
        "samples_under_two_supervised": int((dataset.supervised_counts < _FEWEST).sum()),
    }


def _quantiles(lengths: Any) -> list[int]:
    return [int(n) for n in np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1], method="nearest")]


def _count_not_finite(data: SampleSource | ForeignFolder | None) -> int:
    """Samples with NaN or infinity. Raises ValueError when a shard of ours is not what its manifest says."""
    samples: Iterator[Sample | RawSample]
    if isinstance(data, ForeignFolder):
        usable = [index for index, measured in enumerate(data.measured) if not measured.reason]
        reader = data.reader
        samples = (reader.read(index)[0] for index in usable)
    else:
        assert isinstance(data, Dataset)
        data.verify()
        samples = map(data.sample, range(len(data)))
        usable = list(range(len(data)))
    count = 0
    with SampleProgress(len(usable), 0, "reading") as progress:
        for sample in samples:
            count += not all(all_finite(h) for h in (sample.hidden_states, sample.last_hidden) if h is not None)
            progress.advance()
    return count


def _checks(dataset: SampleSource | None, target: str, recorded: str | None) -> dict[str, Any]:
    """What the target's own head, norm and embedding say of the recorded norm and layer ids, as far as they are at hand."""
    figures: dict[str, Any] = {"last_hidden_nats": None, "layer_ids": None, "warnings": []}
    tensors = None if dataset is None else _target_tensors(dataset, target)
    if dataset is None or tensors is None or not (dataset.lengths >= _FEWEST).any():
        return figures
    info = dataset.info
    config = text_config(info.target_config)
    eps, positions = norm_eps(config), some_positions(dataset)
    norm = recorded
    if positions.last is not None:
        found = check_norm(positions, tensors, eps, recorded)
        figures["warnings"] += [found.pop("warning")] if found["warning"] else []
        figures["last_hidden_nats"] = {key: value for key, value in found.items() if key != "warning"}
        norm = found["fits"] if found["fits"] in ("pre", "post") else recorded
    num_layers = config.get("num_hidden_layers")
    if isinstance(num_layers, int):
        told = check_layer_ids(
            positions, tensors, eps, norm=norm, layer_ids=info.target_layer_ids, num_layers=num_layers
        )
        figures["layer_ids"] = told["verdict"]
        figures["warnings"] += [told["warning"]] if told["warning"] else []
    return figures


def _recomputed(
    dataset: SampleSource | None, target: str, samples: int, recorded: str | None, so_far: dict[str, Any]
) -> dict[str, Any]:
    """What running the target over samples says of the taps, in place of what the numbers alone can."""
    if dataset is None or not len(dataset):
        missing = "; ".join(so_far["missing_settings"])
        raise SettingsError(
            f"--recompute: expected data.target and data.target_layer_ids, found missing: {missing}. Any layer ids of the "
            "right number will do: the right ones are told."
        )
    found = recompute_samples(dataset, target or dataset.info.target_name, samples, recorded_norm=recorded)
    wrong = sum(tap["is"] != tap["recorded"] for tap in found["taps"])
    verdict = f"{wrong} taps are not of the layers recorded" if wrong else "every tap is of the layer recorded"
    return {"layer_ids": verdict, "warnings": so_far["warnings"] + found.pop("warnings"), "recomputed": found}


def _target_tensors(dataset: SampleSource, target: str) -> dict[str, Tensor] | None:
    """Those of data.target, or of the dataset itself; None when neither has any."""
    if target and any(Path(target).glob("*.safetensors")):
        where = Path(target)
    elif (dataset.folders[0] / TARGET_FILE).is_file():
        where = dataset.folders[0]
    else:
        return None
    try:
        refuse_unreproduced(text_config(dataset.info.target_config))
    except ValueError:
        return None  # its head and norm say something else than these formulas
    tensors, info = load_target_tensors(where), dataset.info
    expected = (info.vocab_size, info.hidden_size)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if tuple(tensors[name].shape) != expected:
            raise ValueError(
                f"{where}: {name} has shape {tuple(tensors[name].shape)}, expected {expected} from the dataset; "
                "give its own target"
            )
    return tensors


def _warnings(figures: dict[str, Any]) -> list[str]:
    few, strange = figures["samples_under_two_supervised"], figures.get("samples_with_ids_outside_the_vocabulary")
    warnings = []
    scattered = figures["samples_without_anchor"] - few
    if few:
        warnings.append(
            f"{few} of {figures['samples']} samples have fewer than two supervised tokens: they train nothing"
        )
    if scattered:
        warnings.append(
            f"{scattered} of {figures['samples']} samples have no two supervised tokens side by side: they train nothing"
        )
    if strange:
        warnings.append(
            f"{strange} samples have token ids outside 0..{figures['vocab_size'] - 1}, the first is {figures['first_of_them']}: "
            "another tokenizer's"
        )
    if figures.get("samples_not_finite"):
        warnings.append(f"{figures['samples_not_finite']} samples have NaN or infinity in their hidden states")
    return warnings


def _show(figures: dict[str, Any]) -> None:
    shown: dict[str, Any] = {}
    below: list[str] = []
    for name, value in figures.items():
        if name in ("missing_settings", "warnings", "bad_files"):
            shown[name] = len(value)
            items = [f"{file}: {reason}" for file, reason in value.items()] if isinstance(value, dict) else value
            below += [f"{name}: {item}" for item in items]
        elif name == "recomputed":
            shown["recomputed_samples"] = value["samples"]
            for tap in value["taps"]:
                what = "of no layer, the nearest" if tap["is"] is None else tap["is"]
                shown[f"tap_of_layer_{tap['recorded']}_is"] = f"{what}, {tap['distance']:.4f} of its length away"
            shown["last_hidden_distance"] = value["last_hidden"]
        else:
            shown[name] = value
    console = make_console()
    print_fields(console, shown)
    for line in below:
        console.print(printable(line), markup=False, soft_wrap=True)
