"""`data extract`: hidden states of a Hugging Face target over conversations, as our dataset."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console

from buffers.dataset_writer import DatasetWriter
from buffers.manifest import MANIFEST
from engine.assemble import resolve_device, resolve_precision, text_config
from engine.extract_options import ExtractOptions, choose_layers, choose_mask_token, load_tokenizer, source_of
from engine.extract_reader import Progress, Reader
from engine.extract_tally import Tally, left_out_lines, warnings_about
from engine.extract_work import Work
from engine.hf_target import HfTarget, import_transformers, load_hf_target
from engine.reports import make_console
from engine.rope import rope_of_drafter
from engine.run_folder import alone_in

REPORT, PROGRESS = "extraction.json", "unfinished-extraction.jsonl"


def extract_dataset(options: ExtractOptions) -> dict[str, Any]:
    """Write the dataset, or what an interrupted run left of it, to `options.out`; returns and prints the figures.

    Raises ValueError for options, targets, tokenizers and data that cannot be used, naming what to do.
    """
    with ExitStack() as parts:
        return _extract(options, parts)


def _extract(options: ExtractOptions, parts: ExitStack) -> dict[str, Any]:
    if not options.data.is_file():
        raise ValueError(
            f"expected conversations in {options.data}, found no such file. Give a JSONL file with --data."
        )
    if (options.out / MANIFEST).is_file():
        raise ValueError(
            f"expected {options.out} to hold no dataset, found {MANIFEST}. Choose another folder or remove it."
        )
    import_transformers()
    console = make_console(stderr=True)
    device = resolve_device(options.device)
    precision = resolve_precision(options.dtype, device)
    tokenizer = load_tokenizer(options)
    target = load_hf_target(options.target, device, torch.bfloat16 if precision == "bf16" else torch.float32)
    layers = choose_layers(options, len(target.layers))
    mask_token_id, mask_from = choose_mask_token(options.mask_token_id, tokenizer, target.vocab_size)
    options.out.mkdir(parents=True, exist_ok=True)
    parts.enter_context(alone_in(options.out, "--out", "extraction"))
    writer = DatasetWriter(
        options.out,
        target_name=options.target,
        target_config=target.config,
        hidden_size=target.hidden_size,
        target_layer_ids=layers,
        vocab_size=target.vocab_size,
        mask_token_id=mask_token_id,
        last_hidden_norm=None if options.last_hidden == "none" else options.last_hidden,
        shard_tokens=options.shard_tokens,
        resume=True,
        source=source_of(options, precision),
    )
    kept = writer.num_samples
    progress = Progress(options.out / PROGRESS, kept)
    _say(
        console,
        f"target: {options.target}, {precision} on {device}; after layers {list(layers)} of {len(target.layers)}",
    )
    _say(console, f"mask token: {mask_token_id}, {mask_from}")
    untrainable = _untrainable(target)
    if untrainable:
        _say(console, f"warning: {untrainable}")
    if kept:
        _say(console, f"{kept:,} samples are there already; going on behind them")
    writer.write_target(*target.stored_tensors())

    tally = Tally(**progress.state.get("tally", {}))
    reader = Reader(options, tokenizer, tally, vocab_size=target.vocab_size, mask_token_id=mask_token_id)
    work = Work(target, layers, options, writer, progress, lambda text: _say(console, text))
    try:
        work.run(reader)
    except KeyboardInterrupt:
        _say(console, f"whole shards in {options.out} are kept; the same command goes on behind them")
        raise
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{str(error).splitlines()[0]} Lower --token-budget or --max-length.") from error
    if work.not_finite:
        tally.left_out["hidden states that are not finite"] = {"count": work.not_finite, "examples": []}
    if not writer.num_samples:
        progress.remove()
        reasons = "; ".join(left_out_lines(tally.left_out)) or "the file is empty"
        raise ValueError(f"expected a sample in {options.data}, found none in {tally.records} records: {reasons}.")
    info = writer.close()
    tokens = sum(shard.num_tokens for shard in info.shards)
    figures = {
        "out": str(options.out),
        "target": options.target,
        "target_layer_ids": list(layers),
        "last_hidden_norm": info.last_hidden_norm,
        "mask_token_id": mask_token_id,
        "mask_token_from": mask_from,
        "records": tally.records,
        "samples": info.num_samples,
        "tokens": tokens,
        "supervised_share": tally.supervised / max(1, tally.tokens),
        "loss_mask_from": tally.how,
        "cut_samples": tally.cut_samples,
        "cut_tokens": tally.cut_tokens,
        "left_out": {reason: entry["count"] for reason, entry in tally.left_out.items()},
        "left_out_examples": {reason: entry["examples"] for reason, entry in tally.left_out.items()},
        "target_loss_nats": work.loss.mean,
        "warnings": [untrainable] * bool(untrainable)
        + warnings_about(
            tally,
            work.loss,
            vocab_size=target.vocab_size,
            mask_token_id=mask_token_id,
            tokenizer_size=tokenizer.size,
            unmarked=tokenizer.unmarked,
        ),
        "shards": len(info.shards),
        "bytes": sum(shard.num_bytes for shard in info.shards),
        "samples_kept_from_before": kept,
        "tokens_per_s": work.tokens / work.seconds if work.seconds else 0.0,
        "seconds": work.seconds,
        "seconds_waiting_for_reading": work.reading_s,
        "seconds_waiting_for_writing": work.writing_s,
        "padding": 1 - work.tokens / work.slots if work.slots else 0.0,
        "device": str(device),
        "precision": precision,
    }
    (options.out / REPORT).write_text(json.dumps(figures, indent=1) + "\n")
    progress.remove()
    _show(console, figures, tally)
    return figures


def _untrainable(target: HfTarget) -> str:
    """Why no new drafter can be made for the target's hidden states, said before they are made; "" when one can."""
    try:
        rope_of_drafter(text_config(target.config))
    except ValueError as error:
        return (
            f"`train` will refuse a new drafter for this target (with --init one that has a rope of its own): {error}"
        )
    return ""


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _show(console: Console, figures: dict[str, Any], tally: Tally) -> None:
    _say(
        console,
        f"{figures['samples']:,} samples of {figures['records']:,} records, {figures['tokens']:,} tokens, "
        f"{figures['supervised_share']:.1%} supervised; {figures['tokens_per_s']:,.0f} tokens/s, "
        f"{figures['padding']:.1%} padding",
    )
    if figures["cut_samples"]:
        _say(
            console,
            f"{figures['cut_samples']:,} samples were cut to the longest length, {figures['cut_tokens']:,} tokens",
        )
    for line in left_out_lines(tally.left_out):
        _say(console, line)
    for warning in figures["warnings"]:
        _say(console, f"warning: {warning}")
    _say(console, f"dataset: {figures['out']}, {figures['shards']} shards, {figures['bytes'] / 2**30:.2f} GiB")
