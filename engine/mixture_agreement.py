"""Whether the sources of a mixture belong together: everything that the drafter depends on must be the same in all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from buffers.dataset import Dataset, SampleSource, load_target_tensors
from buffers.manifest import TARGET_FILE
from engine.assemble import norm_eps, text_config
from engine.rope import rope_of_drafter
from engine.settings import Settings
from engine.target_weights import fingerprint


def refuse_disagreement(sources: Sequence[SampleSource], settings: Settings) -> None:
    """Raises ValueError, in one line for all, with what sources say differently and which says what.

    Layers, sizes, mask token and the target's rope, norm and depth are compared, last_hidden_norm where soft labels are used, and
    the target's weights as far as they are at hand (data.target and each target.safetensors); where they are not, its name.
    """
    said: dict[str, dict[str, list[str]]] = {}
    for source in sources:
        for name, value in _claims(source, settings).items():
            said.setdefault(name, {}).setdefault(value, []).append(str(source.folders[0]))
    for name, values in _target_claims(sources, settings.data.target).items():
        said[name] = values
    differing = [
        f"{name}: " + ", ".join(f"{value} in {' and '.join(folders)}" for value, folders in values.items())
        for name, values in said.items()
        if len(values) > 1
    ]
    if differing:
        raise ValueError(
            f"data.path: expected hidden states of one target and the same layers in all {len(sources)} folders, found different "
            f"{'; '.join(differing)}. Mix folders that agree, or extract again"
        )


def _claims(source: SampleSource, settings: Settings) -> dict[str, str]:
    info, config = source.info, text_config(source.info.target_config)
    claims: dict[str, object] = {
        "hidden_size": info.hidden_size,
        "target_layer_ids": list(info.target_layer_ids),
        "vocab_size": info.vocab_size,
        "mask_token_id": info.mask_token_id,
        "num_hidden_layers of the target": config.get("num_hidden_layers"),
        "rms_norm_eps of the target": norm_eps(config),
        "rope of the target": rope_of_drafter(config),
    }
    if settings.objective.kl_weight > 0:
        claims["last_hidden_norm"] = info.last_hidden_norm
    return {name: str(value) for name, value in claims.items()}


def _target_claims(sources: Sequence[SampleSource], target: str) -> dict[str, dict[str, list[str]]]:
    """name of the claim -> value -> the folders that make it. Another trainer's files know no target but data.target."""
    weights: dict[str, list[str]] = {}
    if target and any(Path(target).glob("*.safetensors")):
        weights.setdefault(fingerprint(load_target_tensors(target)), []).append(f"{target} (data.target)")
    names: dict[str, list[str]] = {}
    compared = True
    for source in sources:
        if not isinstance(source, Dataset):
            continue
        folder = source.folders[0]
        if (folder / TARGET_FILE).is_file():
            weights.setdefault(fingerprint(load_target_tensors(folder)), []).append(str(folder))
        else:
            compared = False
        # An organisation or a folder before the name says nothing of the weights.
        names.setdefault(Path(source.info.target_name).name, []).append(str(folder))
    return {"weights of the target": weights} if compared else {"weights of the target": weights, "target": names}
