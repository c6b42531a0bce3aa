"""Teacher-forced evaluation of a saved drafter on a dataset: every block starts from the data's own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from buffers.batching import BatchPlan
from buffers.dataset import Dataset
from buffers.staging import InputPipeline
from engine.assemble import frozen_target, make_plan, needs_last_hidden, resolve_device, resolve_precision
from engine.demo import EMBEDDED_TARGET, decode_held_out
from engine.engine import Engine
from engine.export import load_drafter
from engine.settings import Settings
from engine.target import load_target


def evaluate_drafter(drafter: Path, data: Path, settings: Settings, *, decode: bool) -> dict[str, Any]:
    """Prints and returns loss, accuracy per slot and accepted length; with decode, also what real speculative decoding
    of held-out files with the embedded target accepts. Raises ValueError when drafter and dataset do not belong together."""
    config, weights = load_drafter(drafter)
    dataset = Dataset(data)
    info = dataset.info
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, info.hidden_size),
        ("vocab_size", config.vocab_size, info.vocab_size),
        ("target_layer_ids", tuple(config.target_layer_ids), tuple(info.target_layer_ids)),
    ):
        if ours != theirs:
            raise ValueError(
                f"{drafter} has {name} {ours}, {data} has {theirs}; evaluate on the hidden states of its own target"
            )
    device = resolve_device(settings.run.device)
    precision = resolve_precision(settings.run.precision, device)
    plan = make_plan(settings, dataset, config, device)
    batches = BatchPlan(dataset.lengths, plan.buckets, too_long=settings.data.too_long, seed=settings.run.seed).epoch(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with InputPipeline(
        dataset,
        plan.buckets,
        seed=settings.run.seed,
        device=device,
        dtype=dtype,
        on_nonfinite=settings.data.on_nonfinite,
        with_last_hidden=needs_last_hidden(settings, dataset),
    ) as inputs:
        engine = Engine(
            config,
            frozen_target(settings, dataset),
            plan.buckets,
            inputs.inputs,
            device=device,
            objective=settings.objective,
            optimizer=None,
            precision=precision,
            attention=settings.model.attention,
            chunk_rows=settings.model.head_chunk or 2048,
            eval_inputs=inputs.inputs,
            training=False,
        )
        engine.params.load_(weights)
        engine.build()
        inputs.start(batches[: settings.run.eval_batches or None])
        while (batch := inputs.next()) is not None:
            engine.eval_step(batch.bucket)
        means = engine.eval_metrics.snapshot().read().means()
        engine.close()
    figures = {
        key: means[key] for key in ("loss", "accuracy", "accuracy_per_slot", "accept_len", "tokens_per_verification")
    }
    figures |= {"samples": sum(len(batch.rows) for batch in batches), "how": engine.executor.how}
    if decode:
        figures["decoding"] = decode_held_out(config, weights, load_target(EMBEDDED_TARGET, device, torch.float32))
    console = Console(highlight=False)
    for name, value in figures.items():
        console.print(f"{name:26} {value}", markup=False)
    return figures
