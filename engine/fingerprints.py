"""The fingerprint of a bucket's graphs: everything that is baked into them when they are captured.

Learning rate, weight decay, clip, loss weights and gamma are not among it: they are values on the device, read by every
replay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from buffers.manifest import DatasetInfo
from buffers.shapes import Bucket
from engine.assemble import norm_eps, text_config
from engine.drafter_config import DrafterConfig
from engine.kernels import Ops, select_ops
from engine.precision import compute_dtype
from engine.settings import Settings
from engine.sources import ATTENTION_MODULES, files_of
from graphs.fingerprint import BUFFERS, Fingerprint, hash_of_files

_LOSS = ("frozen_head", "weigh_rows", "supervision", "block_sums")
_STEP_MODULES = tuple(
    f"engine.{name}"
    for name in ("step", "model", "mask", "metrics", "rope", "params", "optimizer", "kernels", "generation", "engine")
)
_DRIVER = Path("/proc/driver/nvidia/version")


def bucket_fingerprints(
    settings: Settings,
    config: DrafterConfig,
    info: DatasetInfo,
    buckets: Sequence[Bucket],
    device: torch.device,
    precision: str,
    *,
    buffer_generation: int = 1,
    world_size: int = 1,
) -> dict[Bucket, Fingerprint]:
    """One for each bucket. precision: bf16, fp32 or fp8. buffer_generation counts the buffers that the graphs' addresses lead
    to, from 1 in every process; status leaves it out of its comparison (graphs.fingerprint.BUFFERS).

    Raises ValueError for an attention or a precision that this device has not.
    """
    shared = {
        **_model_fields(config),
        **_step_fields(settings, info, precision),
        **_source_fields(*_operations(settings, device, precision)),
        **software_fields(device),
        "world_size": world_size,
        BUFFERS: buffer_generation,
    }
    return {
        bucket: Fingerprint.of({"bucket": f"{bucket.name}, K {bucket.K}, tile {bucket.tile}", **shared})
        for bucket in buckets
    }


def software_fields(device: torch.device) -> dict[str, str]:
    """What compiled code depends on besides our sources: torch, Triton, CUDA, driver and GPU."""
    cuda = device.type == "cuda"
    name, capability = "none", ""
    if cuda:
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return {
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": str(torch.version.cuda) if cuda else "none",
        "driver": _driver_version() if cuda else "none",
        "gpu": f"{name}, {capability}" if capability else name,
    }


def _model_fields(config: DrafterConfig) -> dict[str, object]:
    # Names of a config.json that no kernel sees.
    idle = {
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "num_target_layers",
        "target_layer_ids",
        "tie_word_embeddings",
    }
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    used = {f"model.{name}": value for name, value in found.items() if name not in idle}
    return used | {"model.num_taps": config.num_taps}


def _step_fields(settings: Settings, info: DatasetInfo, precision: str) -> dict[str, object]:
    objective, kl = settings.objective, settings.objective.kl_weight > 0
    normed_here = kl and info.last_hidden_norm == "pre"
    dtype = compute_dtype(precision)
    fp32_sums = dtype == torch.float32 or settings.optimizer.grad_dtype == "fp32"
    return {
        "objective.weighting": objective.weighting,
        "objective.kl": "yes" if kl else "no",
        "objective.dpace_alpha": objective.dpace_alpha if objective.weighting == "dpace" else "unused",
        "objective.last_hidden_norm": info.last_hidden_norm if kl else "unused",
        "objective.norm_eps": norm_eps(text_config(info.target_config)) if normed_here else "unused",
        "precision": precision,
        "dtype": str(dtype).removeprefix("torch."),
        "gradients": "float32" if fp32_sums else "bfloat16",
        "evaluation": "yes" if settings.data.eval_path else "no",
        "accumulation": "more" if settings.run.accumulation > 1 else "1",
        "recompute": settings.model.recompute,
        "head_chunk": settings.model.head_chunk,
        "last_hidden": "yes" if kl else "no",
    }


def _operations(settings: Settings, device: torch.device, precision: str) -> list[Ops]:
    """Those of the training steps, and of evaluation where it has others: fp8 is evaluated in bf16."""
    found = [select_ops(device, settings.model.attention, precision)]
    if precision == "fp8" and settings.data.eval_path:
        found.append(select_ops(device, settings.model.attention))
    return found


def _source_fields(*several: Ops) -> dict[str, object]:
    """Hashes of the files that take part; a change of a word in them counts, for who could say which words matter."""
    loss, operations = ["engine.objective"], list[str]()
    for ops in several:
        for field in dataclasses.fields(ops):
            if field.name not in ("name", "attention"):
                (loss if field.name in _LOSS else operations).append(getattr(ops, field.name).__module__)
    attention = several[0].name
    return {
        "attention": attention,
        "source.attention": hash_of_files(files_of([ATTENTION_MODULES[attention]])),
        "source.loss": hash_of_files(files_of(loss)),
        "source.operations": hash_of_files(files_of(operations)),
        "source.step": hash_of_files(files_of(_STEP_MODULES)),
    }


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _driver_version() -> str:
    """The kernel module's, as the system tells it; else the newest CUDA that the driver knows."""
    try:
        words = _DRIVER.read_text().splitlines()[0].split()
        return next(word for word in words if word[0].isdigit() and "." in word)
    except (OSError, IndexError, StopIteration):
        return f"CUDA {getattr(torch._C, '_cuda_getDriverVersion')()}"  # noqa: B009
