"""Evaluation of a saved drafter: teacher-forced on a dataset, and by decoding for real with its target."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buffers.staging import InputPipeline
from engine.assemble import (
    engine_options,
    frozen_target,
    make_batch_plan,
    make_plan,
    pipeline_options,
    resolve_device,
    resolve_precision,
)
from engine.data_source import open_data
from engine.decode import drafter_for
from engine.decode_prompts import EMBEDDED, DecodeRequest, decode_prompts, one_thread, print_decoding
from engine.demo import EMBEDDED_TARGET, held_out_prompts
from engine.drafter_config import DrafterConfig
from engine.engine import Engine
from engine.export import find_trained, load_trained
from engine.hf_decoding import load_decoding_target
from engine.plots import plot_evaluation, require_plot
from engine.precision import compute_dtype
from engine.prompts import ByteTokenizer, HFTokenizer, check_file, read_prompts
from engine.reports import make_console, print_fields
from engine.settings import Settings
from engine.target import load_target
from engine.verification import Feed, verify_buckets


def evaluate_drafter(
    source: Path,
    data: Path | None,
    settings: Settings,
    *,
    decode: DecodeRequest | None = None,
    plot: Path | None = None,
) -> dict[str, Any]:
    """Prints and returns the figures of a drafter, a checkpoint or a run's best drafter: on `data`, if given, loss, accuracy
    per slot and accepted length, every block starting from the data's own tokens; with `decode` what speculative decoding
    accepts (under "decoding"). `plot`: a PNG of both. Raises ValueError when they do not belong together.
    """
    if plot is not None:
        require_plot(plot)
    if decode is not None:
        find_trained(source)  # refuses before a target is loaded
    decoder = None if decode is None else _Decoder(decode, settings)
    # speculators' layout does not say how many layers the target has.
    folder, config, weights = load_trained(source, None if decoder is None else decoder.target.sizes[2])
    if decoder is not None:
        decoder.take(config, weights)  # refuses before the work begins
    figures: dict[str, Any] = {"drafter": str(folder), "block_size": config.block_size}
    if data is not None:
        figures |= _teacher_forced(folder, config, weights, data, settings)
    console = make_console()
    print_fields(console, figures)
    if decoder is not None:
        figures["decoding"] = decoder.run()
        print_decoding(figures["decoding"], console)
    if plot is not None:
        figures["plot"] = str(plot_evaluation(figures, plot))
    return figures


class _Decoder:
    """The target and the prompts of one request, and then the drafter."""

    def __init__(self, request: DecodeRequest, settings: Settings) -> None:
        device = resolve_device(settings.run.device)
        tokenizer: ByteTokenizer | HFTokenizer
        self._request = request
        if request.prompts is not None:
            check_file(request.prompts)  # a target takes a while to load
        self.target: Any
        if request.target == EMBEDDED:
            # fp32 as in the demo, whose figures these are.
            self.target, tokenizer = load_target(EMBEDDED_TARGET, device, torch.float32), ByteTokenizer()
        else:
            precision = resolve_precision(settings.run.precision, device)
            dtype = compute_dtype(precision)
            self.target, tokenizer = load_decoding_target(request.target, device, dtype), HFTokenizer(request.target)
        if request.prompts is not None:
            self._prompts = read_prompts(request.prompts, tokenizer, self.target.sizes[1])
        elif request.target == EMBEDDED:
            self._prompts = held_out_prompts()
        else:
            raise ValueError("expected a file of prompts to decode with, found none; name one with --prompts")

    def take(self, config: DrafterConfig, weights: dict[str, Tensor]) -> None:
        """Raises ValueError for a drafter of another target."""
        self._drafter = drafter_for(config, weights, self.target)

    def run(self) -> dict[str, Any]:
        """The figures of engine.decode_prompts."""
        embedded = self._request.target == EMBEDDED
        with one_thread() if embedded else nullcontext():
            figures = decode_prompts(self.target, self._drafter, self._prompts, self._request.options)
        return {"target": self._request.target} | figures


def _teacher_forced(
    folder: Path, config: DrafterConfig, weights: dict[str, Tensor], data: Path, settings: Settings
) -> dict[str, Any]:
    dataset = open_data(data, settings, drafter=config)
    info = dataset.info
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, info.hidden_size),
        ("vocab_size", config.vocab_size, info.vocab_size),
        ("target_layer_ids", tuple(config.target_layer_ids), tuple(info.target_layer_ids)),
    ):
        if ours != theirs:
            raise ValueError(
                f"{folder} has {name} {ours}, {data} has {theirs}; evaluate on the hidden states of its own target"
            )
    device = resolve_device(settings.run.device)
    precision = resolve_precision(settings.run.precision, device)
    target = frozen_target(settings, dataset)
    buckets = make_plan(settings, dataset, config, device).buckets
    batch_plan = make_batch_plan(settings, dataset, buckets)
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
        verified = verify_buckets(
            engine,
            (),
            inputs.load,
            policy=settings.run.verify,
            fingerprints={},
            known=None,
            say=lambda text: make_console(stderr=True).print(text, markup=False, soft_wrap=True),
            held_out=Feed(batches, inputs.load),
        )
        inputs.start(batches)
        while (batch := inputs.next()) is not None:
            engine.eval_step(batch.bucket)
        means = engine.eval_metrics.snapshot().read().means()
        histogram = [int(count) for count in engine.eval_metrics.blocks_by_accepted.tolist()]
    figures = {
        key: means[key] for key in ("loss", "accuracy", "accuracy_per_slot", "accept_len", "tokens_per_verification")
    }
    evaluated = {sample for batch in batches for sample in batch.sample_ids} - set(inputs.skipped)
    return figures | {
        "acceptance_histogram": histogram,
        "samples": len(evaluated),
        "skipped_samples": sorted(inputs.skipped),
        "too_long_samples": len(batch_plan.too_long),
        "how": engine.executor.how,
        "verified": {bucket.name: found.held_out for bucket, found in verified.items() if found.held_out},
    }
