"""Rotary position embedding: the default kind and yarn, as Hugging Face computes them.

`RopeConfig` is read from a config.json in either spelling (`rope_theta` + `rope_scaling`, or `rope_parameters`). Kinds
that are not reproduced here are refused by name, because a drafter with slightly wrong angles still trains, only worse.
"""

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from buffers.untrusted import shown

ROPE_KINDS = ("default", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Kind and numbers of a rotary embedding; everything after `theta` is read by yarn only."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(
                f"rope kind: expected one of {', '.join(ROPE_KINDS)}, found {shown(self.kind)}, which is not reproduced "
                "here. "
                "Choose a model with default or yarn positions."
            )
        if not 1.0 < self.theta <= _MOST_THETA:
            raise ValueError(
                f"rope_theta: expected a number above 1 and at most {_MOST_THETA:g}, found {self.theta}. Correct the config.json."
            )
        if self.kind == "yarn" and (self.factor < 1.0 or self.original_max_position_embeddings < 1):
            raise ValueError(
                "yarn: expected factor >= 1 and a positive original_max_position_embeddings, found "
                f"factor {self.factor} and {self.original_max_position_embeddings}. Correct rope_scaling in the "
                "config.json."
            )
        for name in ("factor", *_YARN_NUMBERS):
            value = getattr(self, name)
            if self.kind == "yarn" and value is not None and not 0.0 < value <= _MOST_FACTOR:
                raise ValueError(
                    f"yarn: expected a number above 0 and at most {_MOST_FACTOR:g} as {name}, found {value}. Correct "
                    "rope_scaling in the config.json."
                )


# Beyond what any model has, and where fp32 holds every angle.
_MOST_THETA, _MOST_FACTOR = 1e12, 1e6
_YARN_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_PARTIAL = "partial_rotary_factor"
_YARN_OPTIONAL = (*_YARN_NUMBERS, "truncate")


def _spelling(config: Mapping[str, object], name: str) -> dict[str, object]:
    scaling = config.get(name) or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{name}: expected an object or null, found {shown(scaling)}. Correct the config.json.")
    return dict(scaling)


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        pass
    raise ValueError(f"{name}: expected a number, found {shown(value)}. Correct the config.json.")


def rope_from_config(config: Mapping[str, object]) -> RopeConfig:
    """Read the rotary embedding of a Hugging Face config.json (old and new spelling).

    Raises ValueError for a kind that is not reproduced, for a partial rotation, for missing yarn numbers, and where the
    two spellings say different things: some readers take the one, some the other.
    """
    new, old = _spelling(config, "rope_parameters"), _spelling(config, "rope_scaling")
    rope = _read_spelling(config, new or old)
    if new and old and _read_spelling(config, old) != rope:
        raise ValueError(
            f"rope_scaling: expected what rope_parameters says, found {shown(old)} beside {shown(new)}. Correct the "
            "config.json: servers differ in which of them they read."
        )
    return rope


def rope_of_drafter(target: Mapping[str, object]) -> RopeConfig:
    """What a new drafter takes from its target's config.json: theta and scaling, for the whole head.

    Which part of its own heads a target rotates (a quarter in Qwen3-Next and Qwen3.5) is no matter of the drafter's: those
    that are served beside such targets rotate all, and say nothing of a part. Raises as `rope_from_config` does.
    """
    spellings = {
        name: {key: value for key, value in _spelling(target, name).items() if key != _PARTIAL}
        for name in ("rope_parameters", "rope_scaling")
    }
    return rope_from_config({**target, **spellings, _PARTIAL: None})


def _read_spelling(config: Mapping[str, object], scaling: Mapping[str, object]) -> RopeConfig:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str):
        raise ValueError(f"rope kind: expected a word, found {shown(kind)}. Correct the config.json.")
    theta = _number("rope_theta", scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    partial = scaling.get(_PARTIAL, config.get(_PARTIAL))
    if partial is not None and _number(_PARTIAL, partial) != 1.0:
        raise ValueError(
            f"partial_rotary_factor: expected 1.0, found {partial}. Only a rotation of the whole head is reproduced "
            "here."
        )
    if kind != "yarn":
        return RopeConfig(kind=kind, theta=theta)
    # Hugging Face fills both numbers from max_position_embeddings when the config leaves them out.
    longest = config.get("max_position_embeddings")
    original = _number("original_max_position_embeddings", scaling.get("original_max_position_embeddings", longest))
    factor = scaling.get("factor")
    if factor is None:
        if original < 1:
            raise ValueError(
                f"yarn: expected a positive original_max_position_embeddings, found {original}. Correct the config.json."
            )
        factor = _number("max_position_embeddings", longest) / original
    optional: dict[str, float | bool] = {}
    for name in _YARN_OPTIONAL:
        value = scaling.get(name)
        if value is not None:
            optional[name] = bool(value) if name == "truncate" else _number(name, value)
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=_number("factor", factor),
        original_max_position_embeddings=int(original),
        **optional,  # type: ignore[arg-type]
    )


def rope_to_config(rope: RopeConfig) -> dict[str, object]:
    """The entries of a config.json in both spellings: `rope_theta` and `rope_scaling` as transformers 4 reads them,
    `rope_parameters` as transformers 5 does (vLLM and SGLang take whichever their transformers gives them)."""
    numbers: dict[str, object] = {"rope_type": rope.kind}
    if rope.kind == "yarn":
        numbers["factor"] = rope.factor
        numbers["original_max_position_embeddings"] = rope.original_max_position_embeddings
        defaults = RopeConfig(theta=rope.theta)
        for name in _YARN_OPTIONAL:
            if getattr(rope, name) != getattr(defaults, name):
                numbers[name] = getattr(rope, name)
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else dict(numbers),
        "rope_parameters": {"rope_theta": rope.theta, **numbers},
    }


def rope_inv_freq(rope: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each rotated pair: float32[head_dim / 2] (transformers, modeling_rope_utils.py)."""
    if head_dim % 2:
        raise ValueError(
            f"head_dim: expected an even number, found {head_dim}. Rotary positions turn pairs of components."
        )
    # Made on the CPU whatever the device, under a device context too, so that every machine holds the same bits.
    pos_freqs = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if rope.kind == "default":
        return (1.0 / pos_freqs).to(device)

    def correction_dim(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    return (ramp / (rope.factor * pos_freqs) + (1.0 - ramp) / pos_freqs).to(device)


def rope_attention_scaling(rope: RopeConfig) -> float:
    """What cos and sin are multiplied with: 1 for default, yarn's attention factor otherwise."""
    if rope.kind == "default":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_cos_sin(positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin, float32[..., E], of integer `positions` [...]; both halves of the head hold the same angles."""
    angles = positions.to(torch.float32)[..., None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [..., E] by `cos`, `sin` broadcastable to it; the result has x's dtype."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)
