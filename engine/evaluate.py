"""Teacher-forced evaluation of a saved drafter on a dataset: every block starts from the data's own tokens."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from buffers.batching import BatchPlan
from buffers.staging import InputPipeline
from engine.assemble import (
    engine_options,
    frozen_target,
    make_plan,
    pipeline_options,
    resolve_device,
    resolve_precision,
)
from engine.data_source import open_data
from engine.decode import drafter_for
from engine.demo import EMBEDDED_TARGET, decode_held_out, held_out_texts
from engine.engine import Engine
from engine.export import load_drafter
from engine.reports import make_console
from engine.settings import Settings
from engine.target import load_target


def evaluate_drafter(drafter: Path, data: Path, settings: Settings, *, decode: bool) -> dict[str, Any]:
    """Prints and returns loss, accuracy per slot and accepted length; with decode, also what real speculative decoding
    of held-out files with the embedded target accepts. Raises ValueError when drafter and dataset do not belong together."""
    config, weights = load_drafter(drafter)
    dataset = open_data(data, settings, drafter=config)
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
    if decode:
        embedded = load_target(EMBEDDED_TARGET, device, torch.float32)
        drafter_for(config, weights, embedded)  # refuses a drafter of another target before the work begins
    precision = resolve_precision(settings.run.precision, device)
    target = frozen_target(settings, dataset)
    buckets = make_plan(settings, dataset, config, device).buckets
    batch_plan = BatchPlan(dataset.lengths, buckets, too_long=settings.data.too_long, seed=settings.run.seed)
    batches = batch_plan.epoch(0)[: settings.run.eval_batches or None]
    with ExitStack() as parts:
        pipeline = InputPipeline(dataset, buckets, **pipeline_options(settings, dataset, device, precision))
        inputs = parts.enter_context(pipeline)
        engine = Engine(
            config,
            target,
            buckets,
            inputs.inputs,
            optimizer=None,
            eval_inputs=inputs.inputs,
            training=False,
            **engine_options(settings, device, precision),
        )
        parts.callback(engine.close)
        engine.params.load_(weights)
        engine.build()
        inputs.start(batches)
        while (batch := inputs.next()) is not None:
            engine.eval_step(batch.bucket)
        means = engine.eval_metrics.snapshot().read().means()
    figures = {
        key: means[key] for key in ("loss", "accuracy", "accuracy_per_slot", "accept_len", "tokens_per_verification")
    }
    evaluated = {row.sample_id for batch in batches for row in batch.rows} - set(inputs.skipped)
    figures |= {
        "samples": len(evaluated),
        "skipped_samples": sorted(inputs.skipped),
        "too_long_samples": len(batch_plan.too_long),
        "how": engine.executor.how,
    }
    if decode:
        figures["decoding"] = decode_held_out(config, weights, embedded, held_out_texts(embedded))
    console = make_console()
    for name, value in figures.items():
        console.print(f"{name:26} {value}", markup=False, soft_wrap=True)
    return figures
