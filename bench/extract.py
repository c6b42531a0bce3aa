"""`bench extract`: hidden states of a random target over mixed lengths, then training from the files that came of it.

Before a speed is shown the target is run again over a few samples, one at a time: what lies in the files must be its states.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.mixture import Mixture, mixture_for
from bench.plots import check_plot, plot_bars
from bench.timing import provenance, write_result
from buffers.dataset import Dataset
from engine.assemble import resolve_device
from engine.extract_options import ExtractOptions
from engine.hf_extract import extract_dataset
from engine.hf_target import import_transformers
from engine.recomputation import recompute
from engine.reports import make_console, print_table
from engine.settings import Settings
from engine.train import train

# Qwen3-0.6B's shape; on the CPU a tiny one.
SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TINY_SHAPE: dict[str, Any] = {
    **SHAPE,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 10,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


# Samples that are compared, from all over the dataset.
COMPARED = 4


def run(settings: Settings, *, samples: int, steps: int, out: Path | None, plot: Path | None = None) -> dict[str, Any]:
    """Writes a random target and random samples to a temporary folder (TMPDIR says where), extracts, trains; returns figures.

    Every second half of a sample is supervised. Of the settings [model], [buckets], [objective] and run.device count. Raises
    ValueError without transformers and where the files do not hold the target's states.
    """
    check_plot(plot)
    device = resolve_device(settings.run.device)
    console = make_console(stderr=True)
    mixture = mixture_for(device, samples)
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as name:
        folder = Path(name)
        shape = SHAPE if device.type == "cuda" else TINY_SHAPE
        console.print("a random target", markup=False)
        parameters = write_target(folder / "target", shape, device)
        write_samples(folder / "samples.jsonl", mixture, shape["vocab_size"])
        options = ExtractOptions(
            target=str(folder / "target"),
            data=folder / "samples.jsonl",
            out=folder / "warm-up",
            mask_token_id=shape["vocab_size"] - 1,
            device=settings.run.device,
            max_samples=8,
        )
        extract_dataset(options)
        forget_peak()
        extracted = extract_dataset(replace(options, out=folder / "data", max_samples=0))
        peaks = {"extraction": peak_gib()}
        compared = compare(folder / "data", folder / "target")
        forget_peak()
        trained = train(training_settings(settings, folder, steps))
        peaks["training"] = peak_gib()
        rates = logged_rates(folder / "run" / "metrics.jsonl")
    figures = {
        "where": provenance(),
        "target": {"parameters": parameters, **shape},
        "mixture": {"median": mixture.median, "p95": mixture.p95, "longest": mixture.longest, "samples": samples},
        "compared": compared,
        "extraction": {
            key: extracted[key]
            for key in (
                "samples",
                "tokens",
                "tokens_per_s",
                "seconds",
                "seconds_waiting_for_reading",
                "seconds_waiting_for_writing",
                "padding",
                "bytes",
                "shards",
                "precision",
                "last_hidden_norm",
                "target_layer_ids",
            )
        },
        "training": {
            "steps": trained["steps"],
            # By the clock over the lines of the second half, when nothing is built any more.
            "tokens_per_s": statistics.median(rates[len(rates) // 2 :]),
            **{key: trained[key] for key in ("how", "seconds", "input_wait_ms", "device_allocations", "compilations")},
            "buckets": trained["buckets"],
        },
        "host_peak_gib": peaks,
    }
    write_result(figures, out)
    rows = [
        (stage, f"{figures[stage]['tokens_per_s']:,.0f}", f"{figures[stage]['seconds']:.1f}", f"{peaks[stage]:.2f}")
        for stage in ("extraction", "training")
    ]
    title = f"{samples} samples, {extracted['tokens']:,} tokens, target of {parameters / 1e6:,.1f} million parameters, {device}"
    print_table(make_console(), title, ("stage", "tokens/s", "s", "host peak GiB"), rows)
    if plot is not None:
        stages = ("extraction", "training")
        speeds = {"tokens/s": [figures[stage]["tokens_per_s"] for stage in stages]}
        plot_bars(plot, f"{figures['where']['gpu'] or 'CPU'}: extraction, and training from it", stages, speeds)
    return figures


def compare(data: Path, target: Path) -> dict[str, Any]:
    """How far the taps of a few samples are from the target's states, found again. Raises ValueError when they are others."""
    dataset = Dataset(data)
    found = recompute(dataset, str(target), COMPARED, recorded_norm=dataset.info.last_hidden_norm)
    if found["warnings"]:
        raise ValueError(f"extraction: {found['warnings'][0]}; no speed is shown")
    return {"samples": found["samples"], "farthest_tap": max(tap["distance_of_recorded"] for tap in found["taps"])}


def write_target(folder: Path, shape: dict[str, Any], device: torch.device) -> int:
    """A random Qwen3 in bf16, made on `device`; returns its number of parameters."""
    transformers = import_transformers()
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3Config(**shape, bos_token_id=None, eos_token_id=None), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_samples(file: Path, mixture: Mixture, vocab_size: int) -> None:
    """Random tokens, the second half of each sample supervised; seed 0. The last token, the mask, is left out."""
    generator = torch.Generator().manual_seed(0)
    with file.open("w") as stream:
        for length in mixture.lengths().tolist():
            ids = torch.randint(vocab_size - 1, (length,), generator=generator).tolist()
            mask = [0] * (length // 2) + [1] * (length - length // 2)
            stream.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")


def training_settings(settings: Settings, folder: Path, steps: int) -> Settings:
    """The given settings on the extracted files, for so many steps."""
    return replace(
        settings,
        data=replace(settings.data, path=str(folder / "data")),
        run=replace(
            settings.run,
            output=str(folder / "run"),
            epochs=1000,
            max_steps=steps,
            log_every=max(1, steps // 10),
            save_every=0,
        ),
    )


def logged_rates(metrics: Path) -> list[float]:
    """Useful tokens/s of a run's lines, by the clock."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["tokens_per_s"] for line in lines if line.get("tokens_per_s")]


def forget_peak() -> None:
    """Lets the kernel measure this process's peak anew; where it does not, the peak is that since the process began."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_gib() -> float:
    """The most host memory that this process held since `forget_peak`, GiB, with pinned memory and what it read of files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20
