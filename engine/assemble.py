"""From settings and a dataset to the parts of an engine: the drafter's config, the frozen target, the buckets."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from buffers.batching import BatchPlan
from buffers.dataset import SampleSource, folder_names, load_target_tensors
from buffers.manifest import TARGET_FILE, DatasetInfo
from buffers.mixture import Mixture
from buffers.plan_counts import count_first_epoch
from buffers.planner import Plan
from buffers.shapes import ATTENTION_TILE, Bucket
from buffers.untrusted import shown, shown_names
from engine.bucketing import Counts, batches_for, plan_for, step_cost
from engine.drafter_config import DrafterConfig, load_drafter_config
from engine.drafter_json import token
from engine.engine import FrozenTarget
from engine.export import load_drafter
from engine.params import initial_parameters
from engine.precision import check_fp8_device, compute_dtype
from engine.rope import rope_of_drafter
from engine.settings import Settings
from engine.settings_fields import SettingsError
from engine.target_weights import fingerprint, with_target


def resolve_device(wanted: str) -> torch.device:
    """run.device as a torch device. Raises SettingsError when CUDA is required and absent."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingsError(
            'run.device = "cuda" requires a GPU, found none that torch can use; check the driver and that torch is a CUDA build '
            f'(this one is {torch.__version__}), or set run.device = "auto" to train on the CPU'
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted, torch.cuda.current_device()) if wanted == "cuda" else torch.device(wanted)


def resolve_precision(wanted: str, device: torch.device) -> str:
    """run.precision as bf16, fp32 or fp8: bf16 on CUDA, fp32 on the CPU unless asked otherwise. Raises SettingsError for fp8
    on a device without it."""
    if wanted == "fp8":
        try:
            check_fp8_device(device)
        except ValueError as error:
            raise SettingsError(str(error)) from error
    if wanted != "auto":
        return wanted
    return "bf16" if device.type == "cuda" else "fp32"


def drafter_config(settings: Settings, info: DatasetInfo) -> DrafterConfig:
    """The drafter for this dataset's target: sizes from the target where the settings leave them 0, or model.init's config.

    Raises ValueError for a target whose embedding or head is not a plain matrix, and for an init that does not fit.
    """
    target = text_config(info.target_config)
    refuse_unreproduced(target)
    model = settings.model
    if model.init:
        config = load_drafter_config(model.init, target.get("num_hidden_layers"))
        for name, expected in (
            ("hidden_size", info.hidden_size),
            ("target_layer_ids", info.target_layer_ids),
            ("vocab_size", info.vocab_size),
            ("mask_token_id", info.mask_token_id),
        ):
            if getattr(config, name) != expected:
                raise ValueError(
                    f"model.init: {model.init} has {name} {getattr(config, name)}, the dataset has {expected}; "
                    "extract hidden states for this drafter or start from another"
                )
        return config
    heads = model.num_attention_heads or _needed(target, "num_attention_heads")
    try:
        return DrafterConfig(
            block_size=model.block_size,
            mask_token_id=info.mask_token_id,
            target_layer_ids=info.target_layer_ids,
            num_target_layers=_needed(target, "num_hidden_layers"),
            hidden_size=info.hidden_size,
            intermediate_size=model.intermediate_size or _needed(target, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=model.num_key_value_heads or _needed(target, "num_key_value_heads", heads),
            head_dim=model.head_dim or _needed(target, "head_dim", info.hidden_size // heads),
            vocab_size=info.vocab_size,
            layer_types=model.types_of_layers,
            sliding_window=model.sliding_window or None,
            causal_layers=None if model.causal == "auto" else (model.causal == "yes",) * model.num_hidden_layers,
            rms_norm_eps=norm_eps(target),
            rope=rope_of_drafter(target),
            max_position_embeddings=_needed(target, "max_position_embeddings", 32768),
            bos_token_id=token(target, "bos_token_id"),
            eos_token_id=token({"first": _first(target.get("eos_token_id"))}, "first"),
            initializer_range=model.initializer_range,
        )
    except ValueError as error:
        if str(error).startswith("dataset.json: "):
            raise
        raise ValueError(f"a drafter of dataset.json's target_config and [model]: {error}") from error


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a Hugging Face config.json: multimodal targets nest it."""
    inner = config.get("text_config") or config
    if not isinstance(inner, dict):
        raise ValueError(
            f"dataset.json: expected target_config to have an object as text_config, found {shown(inner)}; write the target's "
            "config.json there"
        )
    return inner


def norm_eps(target: dict[str, Any]) -> float:
    """The target's rms_norm_eps, 1e-6 where its config.json does not say. Raises ValueError when it is no small number."""
    value = target.get("rms_norm_eps")
    if value is None:
        return 1e-6
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"dataset.json: expected target_config to have a number from 0 to 1 as rms_norm_eps, found "
            f"{shown(value)}; write the target's config.json there"
        )
    return float(value)


def refuse_unreproduced(target: dict[str, Any]) -> None:
    """Raises ValueError naming what of this target's embedding or head the drafter would get wrong."""
    model_type = str(target.get("model_type", ""))
    problems = []
    if model_type.startswith(("gemma", "t5gemma", "recurrent_gemma")):
        problems.append(f"model_type {shown_names([model_type])} scales its embedding")
    if target.get("final_logit_softcapping"):
        problems.append(f"final_logit_softcapping {shown(target['final_logit_softcapping'])}")
    if target.get("lm_head_bias"):
        problems.append("lm_head_bias")
    for key in ("embedding_multiplier", "logits_scaling", "logit_scale", "embedding_scale", "scale_emb"):
        if target.get(key) not in (None, 1):
            problems.append(f"{key} {shown(target[key])}")
    if problems:
        raise ValueError(
            f"target cannot be reproduced: {'; '.join(problems)}. Only plain embeddings and heads are supported"
        )


def frozen_target(settings: Settings, dataset: SampleSource) -> FrozenTarget:
    """Embedding, head and norm from data.target or the dataset's own target.safetensors (of a mixture the first there is);
    shapes checked. Raises SettingsError where both are there and differ, and ValueError, for a target whose embedding or head is
    not a plain matrix too."""
    info = dataset.info
    refuse_unreproduced(text_config(info.target_config))
    holding = with_target(dataset.folders)
    own = holding or list(dataset.folders)
    where = settings.data.target or str(own[0])
    if not settings.data.target and not (own[0] / TARGET_FILE).is_file():
        files = " or ".join(str(folder / TARGET_FILE) for folder in own)
        raise ValueError(
            f"expected the target's embedding, head and norm in {files}, found no such file; set "
            "data.target to the folder of the target's checkpoint"
        )
    tensors = load_target_tensors(where)
    embed, head, norm = (tensors[f"{name}.weight"] for name in ("embed_tokens", "lm_head", "norm"))
    for name, tensor, expected in (
        ("embed_tokens.weight", embed, (info.vocab_size, info.hidden_size)),
        ("lm_head.weight", head, (info.vocab_size, info.hidden_size)),
        ("norm.weight", norm, (info.hidden_size,)),
    ):
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, expected {expected} from dataset.json; "
                "point data.target to the checkpoint that the hidden states were made with"
            )
    for folder in holding if settings.data.target else ():
        if fingerprint(load_target_tensors(folder)) != fingerprint(tensors):
            raise SettingsError(
                f"data.target: expected the target of {folder / TARGET_FILE}, found other weights in {where}. Leave the setting "
                "out, or name the checkpoint that the hidden states were made with."
            )
    eps = norm_eps(text_config(info.target_config))
    return FrozenTarget(embed, head, norm, eps, info.last_hidden_norm)


def needs_last_hidden(settings: Settings, dataset: SampleSource) -> bool:
    """Whether the objective reads last_hidden. Raises SettingsError when it does and the dataset has none."""
    needed = settings.objective.kl_weight > 0
    if needed and dataset.info.last_hidden_norm is None:
        raise SettingsError(
            f"objective.kl_weight: soft labels need last_hidden, which {folder_names(dataset)} does not have; set it to 0 or "
            "extract the last hidden states"
        )
    return needed


def pipeline_options(settings: Settings, dataset: SampleSource, device: torch.device, precision: str) -> dict[str, Any]:
    """What InputPipeline takes by keyword. Raises SettingsError as needs_last_hidden does."""
    return {
        "seed": settings.run.seed,
        "device": device,
        "dtype": compute_dtype(precision),
        "on_nonfinite": settings.data.on_nonfinite,
        "with_last_hidden": needs_last_hidden(settings, dataset),
    }


def engine_options(settings: Settings, device: torch.device, precision: str) -> dict[str, Any]:
    """What Engine takes by keyword from the settings, whatever it is built for."""
    return {"device": device, "precision": precision} | generation_options(settings)


def generation_options(settings: Settings) -> dict[str, Any]:
    """Of these what a new generation may change."""
    return {
        "objective": settings.objective,
        "attention": settings.model.attention,
        "chunk_rows": settings.model.head_chunk,
        "recompute": settings.model.recompute,
        "adds": settings.run.accumulation > 1,
        "on_capture_failure": settings.run.on_capture_failure,
    }


def initial_weights(settings: Settings, config: DrafterConfig) -> dict[str, torch.Tensor]:
    """The tensors of model.init, or new ones. Raises ValueError when model.init is damaged or not of that config."""
    if not settings.model.init:
        return initial_parameters(config, settings.run.seed, settings.model.initializer_range)
    return load_drafter(Path(settings.model.init), config.num_target_layers)[1]


def weights_aside(settings: Settings, config: DrafterConfig) -> Future[dict[str, torch.Tensor]]:
    """initial_weights under way in another thread, while memory is taken and the target goes over to the device."""
    pool = ThreadPoolExecutor(1, "initial-weights")
    weights = pool.submit(initial_weights, settings, config)
    pool.shutdown(wait=False)
    return weights


def require_blocks(dataset: SampleSource) -> None:
    """Raises ValueError when no sample has a place for a draft block."""
    if not dataset.eligible_counts.any():
        raise ValueError(
            f"{folder_names(dataset)}: expected a sample with two supervised neighbours (loss_mask 1, 1), found none in "
            f"{len(dataset)} samples; set loss_mask to 1 for what the target answered"
        )


def make_plan(settings: Settings, dataset: SampleSource, config: DrafterConfig, device: torch.device) -> Plan:
    """The buckets for a dataset: planned, or the fixed lengths of the settings with N and B by the same rules. Raises ValueError
    as require_blocks does."""
    require_blocks(dataset)
    counts = planned_counts(dataset)
    plan = plan_for(settings, *counts, config, device)
    if isinstance(dataset, Mixture) and not dataset.whole:
        batches = make_batch_plan(settings, dataset, plan.buckets)
        cost = step_cost(settings, *counts, config, device)
        return count_first_epoch(batches, dataset.eligible_counts, cost, len(batches.too_long))
    return plan


def make_batch_plan(settings: Settings, dataset: SampleSource, buckets: Sequence[Bucket]) -> BatchPlan:
    """The batches of a dataset in these buckets. Raises ValueError as BatchPlan does."""
    included = dataset.included if isinstance(dataset, Mixture) else None
    return batches_for(settings, dataset.lengths, dataset.eligible_counts, buckets, included)


def planned_counts(dataset: SampleSource) -> tuple[Counts, Counts]:
    """Lengths and places for an anchor, int64[n] each, of the samples that buckets are planned for: all, or of a mixture one
    epoch's."""
    if not isinstance(dataset, Mixture):
        return dataset.lengths, dataset.eligible_counts
    chosen = dataset.to_plan_for(ATTENTION_TILE)
    return dataset.lengths[chosen], dataset.eligible_counts[chosen]


def _needed(target: dict[str, Any], key: str, default: int | None = None) -> int:
    value = target.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        # The drafter's own number of layers is another thing than the target's.
        or_set = "" if key in ("num_hidden_layers", "max_position_embeddings") else f", or set model.{key}"
        raise ValueError(
            f"dataset.json: expected target_config to have {key}, found {shown(value)}; write the target's config.json "
            f"there{or_set}"
        )
    return value


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value
