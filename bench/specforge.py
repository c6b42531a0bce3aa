"""SpecForge's DFlash training model, imported from the user's own checkout and fed with our weights, inputs and anchors.

Nothing of SpecForge is part of this repository. Written against its commit a6b6b02.
"""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.drafter_config import DrafterConfig
from engine.settings import ObjectiveSettings
from engine.settings_fields import SettingsError

_TRAINING_MODEL = ("specforge.algorithms.common.dflash_family_model", "OnlineDFlashModel")
_DRAFTER = ("specforge.modeling.draft.dflash", "DFlashDraftModel")


@dataclass(frozen=True)
class SpecForge:
    """Its two classes; the checkout's commit (None without history) and the first 12 digits of the sha256 of all that was
    imported."""

    drafter: Any
    training_model: Any
    commit: str | None
    sources: str


def load_specforge(folder: Path) -> SpecForge:
    """Imports the training model and what it needs from a checkout. Raises ValueError when it is none or cannot be imported."""
    for module, _ in (_TRAINING_MODEL, _DRAFTER):
        file = Path(*module.split(".")).with_suffix(".py")
        if not (folder / file).is_file():
            raise ValueError(
                f"--specforge {folder}: expected a checkout of sgl-project/SpecForge, which has {file}, found no such file; "
                "clone it and give that folder"
            )
    _forget()
    _open_packages(folder.resolve())
    try:
        classes = [getattr(importlib.import_module(module), name) for module, name in (_TRAINING_MODEL, _DRAFTER)]
    except ModuleNotFoundError as error:
        _forget()
        what = f"expected to import its training model, found no module {error.name}"
        do = "use another commit (a6b6b02 works)" if str(error.name).startswith("specforge") else "install that package"
        raise ValueError(f"--specforge {folder}: {what}; {do}") from error
    except Exception as error:
        _forget()
        raise ValueError(
            f"--specforge {folder}: expected to import its training model, found {type(error).__name__}: {error}; use another "
            "commit (a6b6b02 works) or the version of transformers that its pyproject.toml names"
        ) from error
    return SpecForge(classes[1], classes[0], _commit(folder), _digest())


def loss_arguments(objective: ObjectiveSettings, block_size: int) -> dict[str, Any]:
    """The objective in the words of SpecForge's training model. Raises SettingsError for one that it does not have."""
    if objective.kl_weight > 0 or objective.ce_weight != 1:
        raise SettingsError(
            "objective: expected ce_weight 1 and kl_weight 0, SpecForge's DFlash loss, found "
            f"{objective.ce_weight:g} and {objective.kl_weight:g}; leave both out"
        )
    if objective.weighting == "dpace":
        return {"loss_type": "dpace", "dpace_alpha": objective.dpace_alpha}
    return {"loss_decay_gamma": objective.gamma_for(block_size) if objective.weighting == "decay" else None}


class SpecForgeStep:
    """Forward and backward of one batch through SpecForge's training model, as its TrainerCore does them: no autocast, weights
    and gradients in the compute precision, backward from the summed loss, gradients dropped before.

    On one GPU its trainer also wraps the model in FSDP; that is left out, in its favour.
    """

    def __init__(
        self,
        specforge: SpecForge,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        *,
        embed_tokens: Tensor,
        lm_head: Tensor,
        objective: ObjectiveSettings,
    ) -> None:
        """weights: by z-lab's names, which are SpecForge's too. batch: buffers.filling.batch_specs, rows without padding.

        Everything is copied, so that its memory can be measured beside ours. Raises ValueError when this SpecForge takes other
        arguments than the one written against, and as loss_arguments does.
        """
        device, dtype = embed_tokens.device, embed_tokens.dtype
        # flex_attention, its default, has no backward pass on the CPU.
        self.attention = "flex_attention" if device.type == "cuda" else "sdpa"
        loss = loss_arguments(objective, config.block_size)
        anchors_BN, keep_BN = _used_blocks(batch)
        try:
            hf_config = specforge.drafter.config_class.from_dict(config.to_json())
            hf_config._attn_implementation = self.attention
            with device:
                drafter = specforge.drafter(hf_config)
            self.exact_inv_freq = drafter.rotary_emb.inv_freq.clone()
            self.model = specforge.training_model(
                draft_model=drafter,
                target_lm_head=_frozen_linear(lm_head),
                target_embed_tokens=nn.Embedding.from_pretrained(embed_tokens.clone(), freeze=True),
                mask_token_id=config.mask_token_id,
                block_size=config.block_size,
                attention_backend=self.attention,
                num_anchors=batch["anchor_positions"].shape[1],
                **loss,
            ).to(device=device, dtype=dtype)
            drafter.load_state_dict(weights, strict=True)
            _inject_anchors(self.model, anchors_BN, keep_BN)
        except (TypeError, AttributeError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"expected SpecForge's training model to be built as at a6b6b02, found {type(error).__name__}: {error}; use that "
                "commit"
            ) from error
        self.model.train()
        self.drafter = drafter
        # Casting the whole module casts this buffer too: in bf16 SpecForge trains with rounded RoPE frequencies.
        self.shipped_inv_freq = drafter.rotary_emb.inv_freq
        self._batch = {
            "input_ids": batch["input_ids"].long(),
            "hidden_states": batch["target_hidden"].clone(),
            "loss_mask": batch["loss_mask"].long(),
        }
        self.loss = torch.zeros((), device=device)

    def set_rope(self, inv_freq: Tensor) -> None:
        """exact_inv_freq, or shipped_inv_freq: what SpecForge's own cast makes of it."""
        self.drafter.rotary_emb.inv_freq = inv_freq

    def __call__(self) -> None:
        """One step; leaves the loss (weighted mean) in `loss` and the gradients of the weighted sum on the parameters."""
        self.model.zero_grad(set_to_none=True)
        loss, _, metrics = self.model(**self._batch)
        numerator, _ = metrics["loss_terms"]
        numerator.backward()
        self.loss = loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """By z-lab's names."""
        return {name: parameter.grad for name, parameter in self.drafter.named_parameters()}


def _open_packages(folder: Path) -> None:
    """Makes SpecForge's packages known without running their __init__ files, which import the whole trainer with sglang,
    yunchang and more; the training model itself needs torch and transformers only."""
    for module, _ in (_TRAINING_MODEL, _DRAFTER):
        parts = module.split(".")
        for depth in range(1, len(parts)):
            package = types.ModuleType(".".join(parts[:depth]))
            package.__path__ = [str(folder.joinpath(*parts[:depth]))]
            sys.modules.setdefault(package.__name__, package)


def _forget() -> None:
    for name in [name for name in sys.modules if name == "specforge" or name.startswith("specforge.")]:
        del sys.modules[name]


def _digest() -> str:
    files = sorted(
        (name, str(module.__file__))
        for name, module in sys.modules.items()
        # Not packages: a copy of the needed files alone is the same SpecForge.
        if name.startswith("specforge.") and getattr(module, "__file__", None) and not hasattr(module, "__path__")
    )
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(name.encode() + b"\0" + Path(file).read_bytes())
    return digest.hexdigest()[:12]


def _commit(folder: Path) -> str | None:
    if not (folder / ".git").exists():
        return None
    command = ("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _used_blocks(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(anchors int64, keep bool), cut to as many blocks as the fullest row uses: SpecForge makes no others."""
    keep_BN = batch["block_keep_mask"] > 0
    width = int(keep_BN.sum(1).max())
    return batch["anchor_positions"][:, :width].long(), keep_BN[:, :width].clone()


def _inject_anchors(model: Any, anchors_BN: Tensor, keep_BN: Tensor) -> None:
    """Its own sampling still runs, so its time counts; then it gets our anchors."""
    sample = model._sample_anchor_positions

    def sampled(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        own_BN, _ = sample(*args, **kwargs)
        if own_BN.shape != anchors_BN.shape:
            raise ValueError(
                f"expected SpecForge to sample {tuple(anchors_BN.shape)} anchors as we do, found {tuple(own_BN.shape)}"
            )
        return anchors_BN, keep_BN

    model._sample_anchor_positions = sampled


def _frozen_linear(weight_VD: Tensor) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight_VD.shape[1], weight_VD.shape[0], bias=False)
    linear.weight = nn.Parameter(weight_VD.clone(), requires_grad=False)
    return linear
