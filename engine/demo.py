"""`dflash-engine demo`: the whole way on this machine, with a small real target that comes with the package.

Its hidden states over Python's own library become a dataset; a drafter is trained on them with the full engine; then
files that neither has seen are continued by real speculative decoding, whose text must be the target's own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from buffers.dataset import DatasetInfo
from engine.assemble import resolve_device
from engine.bytes_vocab import encode_bytes
from engine.corpus import corpus_files, read_documents
from engine.corpus_extract import extract_corpus
from engine.decode import Decoded, drafter_for, plain_generate, speculative_generate
from engine.decode_prompts import acceptance, against_own_text, one_thread
from engine.drafter_config import DrafterConfig, default_target_layer_ids
from engine.export import load_drafter
from engine.params import initial_parameters
from engine.plots import plot_run
from engine.reports import make_console
from engine.settings import (
    BucketsSettings,
    DataSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    RunSettings,
    Settings,
)
from engine.target import Target, load_target
from engine.train import train

EMBEDDED_TARGET = Path(__file__).parent / "embedded"
NUM_TAPS = 3
STEPS = 720
CHUNK_TOKENS = 250
DATASET_TOKENS, HELD_OUT_TOKENS = 100_000, 8_000
# Files begin with imports and licences: prompts are taken from behind them.
PROMPTS, SKIPPED_BYTES, PROMPT_TOKENS, NEW_TOKENS = 12, 2000, 128, 64


def demo_settings(out: Path, *, steps: int, seed: int, device: str) -> Settings:
    """A drafter of one layer and blocks of 8, sized for two CPU cores and a minute or two."""
    return Settings(
        model=ModelSettings(num_hidden_layers=1, block_size=8, intermediate_size=256, initializer_range=0.06),
        data=DataSettings(path=str(out / "data"), eval_path=str(out / "held-out-data")),
        buckets=BucketsSettings(max_buckets=4, token_budget=4096, num_anchors=64),
        # The draft is checked against the target's greedy text: its distribution teaches more than the files' own bytes, and
        # the first slots count most.
        objective=ObjectiveSettings(ce_weight=0.0, kl_weight=1.0, gamma=2.0),
        optimizer=OptimizerSettings(lr=3e-3),
        run=RunSettings(
            output=str(out / "run"),
            max_steps=steps or STEPS,
            epochs=1000,
            seed=seed,
            device=cast(Any, device),
            log_every=20,
            eval_every=180,
            save_every=0,
        ),
    )


def run_demo(out: Path, *, steps: int, seed: int, device: str) -> dict[str, Any]:
    """Writes data/, held-out-data/, run/ (the drafter is in run/best) and demo.png to `out` and returns the demo's figures.

    Raises ValueError when `out` holds an earlier demo, SettingsError when a GPU is required and absent.
    """
    if (out / "data").exists() or (out / "run").exists():
        raise ValueError(f"{out} holds an earlier demo; remove it or choose another folder with --out")
    began_s = time.perf_counter()
    console = make_console(stderr=True)
    settings = demo_settings(out, steps=steps, seed=seed, device=device)
    torch_device = resolve_device(device)
    target = load_target(EMBEDDED_TARGET, torch_device, torch.float32)
    console.print(
        f"1/4 hidden states of the embedded target over Python's library, after layers {list(tapped(target))}"
    )
    for folder, info in write_datasets(target, out, seed).items():
        console.print(
            f"    {folder}: {info.num_samples} samples, {sum(shard.num_tokens for shard in info.shards):,} tokens"
        )

    console.print("2/4 training")
    figures = train(settings)
    config, weights = load_drafter(out / "run" / "best")

    console.print(f"3/4 speculative decoding of {PROMPTS} held-out files, {NEW_TOKENS} tokens each")
    untrained = initial_parameters(config, seed, settings.model.initializer_range)
    texts = held_out_texts(target)
    before = decode_held_out(config, untrained, target, texts)
    after = decode_held_out(config, weights, target, texts)
    console.print(
        f"    accepted tokens per verification: {before['tokens_per_verification']:.2f} before training, "
        f"{after['tokens_per_verification']:.2f} after; {after['differing_tokens']} tokens differ from the target's own text, "
        f"{after['near_ties']} near ties"
    )
    console.print("4/4 files")
    plot = plot_run(out / "run" / "metrics.jsonl", figures["buckets"], out / "demo.png")
    for name, path in (
        ("drafter", out / "run" / "best"),
        ("metrics", out / "run" / "metrics.jsonl"),
        ("picture", plot or "none: pip install matplotlib"),
    ):
        console.print(f"    {name}: {path}", markup=False, soft_wrap=True)
    return {
        "tokens_per_verification_before": before["tokens_per_verification"],
        "tokens_per_verification_after": after["tokens_per_verification"],
        "differing_tokens": before["differing_tokens"] + after["differing_tokens"],
        "near_ties": before["near_ties"] + after["near_ties"],
        "steps": figures["steps"],
        "eval_loss": figures["eval_loss"],
        "eval_accept_len": figures["eval_accept_len"],
        "buckets": figures["buckets"],
        "device_allocations": figures["device_allocations"],
        "compilations": figures["compilations"],
        "how": figures["how"],
        "drafter": str(out / "run" / "best"),
        "metrics": str(out / "run" / "metrics.jsonl"),
        "picture": str(plot) if plot else None,
        "seconds": time.perf_counter() - began_s,
    }


def tapped(target: Target) -> tuple[int, ...]:
    """The layers that the demo's drafter listens to."""
    return default_target_layer_ids(target.config.num_hidden_layers, NUM_TAPS)


def write_datasets(target: Target, out: Path, seed: int) -> dict[str, DatasetInfo]:
    """The target's hidden states over Python's library, in out/data, and over files kept from training, in out/held-out-data."""
    return {
        folder: extract_corpus(
            target,
            corpus_files(split),
            out / folder,
            target_layer_ids=tapped(target),
            max_tokens=tokens,
            max_length=CHUNK_TOKENS,
            seed=seed,
        )
        for folder, split, tokens in (
            ("data", "train", DATASET_TOKENS),
            ("held-out-data", "heldout", HELD_OUT_TOKENS),
        )
    }


@dataclass(frozen=True)
class HeldOutText:
    """The beginning of a file that neither model has seen, and how the target itself continues it greedily."""

    prompt: Tensor
    own: Decoded


def held_out_texts(target: Target) -> list[HeldOutText]:
    """The held-out prompts with the target's own continuations."""
    with one_thread():
        return [HeldOutText(prompt, plain_generate(target, prompt, NEW_TOKENS)) for prompt in held_out_prompts()]


def held_out_prompts() -> list[Tensor]:
    """int32[PROMPT_TOKENS] each: pieces of held-out files, from a function's beginning on."""
    files = [text for text in read_documents(corpus_files("heldout")) if len(text) > SKIPPED_BYTES + PROMPT_TOKENS]
    stride = max(1, len(files) // PROMPTS)
    prompts = []
    for text in files[::stride][:PROMPTS]:
        start = max(text.find(b"    def ", SKIPPED_BYTES), 0)
        prompts.append(encode_bytes(text[start : start + PROMPT_TOKENS]))
    return prompts


def decode_held_out(
    config: DrafterConfig, weights: Mapping[str, Tensor], target: Target, texts: Sequence[HeldOutText]
) -> dict[str, Any]:
    """Continues the texts by speculative decoding and compares with the target's own continuation; see
    engine.decode_prompts for the figures."""
    drafter = drafter_for(config, weights, target)
    with one_thread():
        decoded = [speculative_generate(target, drafter, text.prompt, NEW_TOKENS) for text in texts]
    return acceptance(decoded, config.block_size) | against_own_text(decoded, [text.own for text in texts])
