"""One sample as another trainer's file holds it, and the checks that all such files share."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# What is read as hidden states; anything but bfloat16 is rounded to it when it is read.
HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class RawSample:
    """input_ids int[T], loss_mask {0,1}[T] of an integer type or bool, hidden_states [T, W] and last_hidden [T, D] in one
    of HIDDEN_DTYPES. Views of a mapped file where the format allows it."""

    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor
    last_hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What opening must know of a sample, without its hidden states.

    `reason` says why the sample cannot be used, "" when it can. `format` is the layout that the keys show, "" when
    unknown. `last_width` is 0 without last_hidden; `dtype` is bfloat16 when all hidden states are.
    `digest` covers tokens, mask and the first and last row of hidden states.
    """

    format: str = ""
    reason: str = ""
    length: int = 0
    eligible: int = 0
    supervised: int = 0
    lowest_id: int = 0
    highest_id: int = 0
    width: int = 0
    last_width: int = 0
    dtype: str = ""
    digest: str = ""


def raw_sample(values: Mapping[str, object], *, ids: str, mask: str, hidden: str, last: str) -> RawSample:
    """The sample under these keys, a leading axis of 1 removed. `last` may be absent.

    Raises ValueError, without the file's name, for a missing key, and for types and shapes that do not fit.
    """
    missing = [key for key in (ids, mask, hidden) if key not in values]
    if missing:
        raise ValueError(f"expected {', '.join((ids, mask, hidden))}, found no {', '.join(missing)}")
    tokens = _tensor(values, ids, (torch.int32, torch.int64, torch.int16), 1)
    length = len(tokens)
    if not length:
        raise ValueError(f"expected at least one token, found none in {ids}")
    loss_mask = _tensor(values, mask, _MASK_DTYPES, 1)
    states = {hidden: _tensor(values, hidden, HIDDEN_DTYPES, 2)}
    if values.get(last) is not None:
        states[last] = _tensor(values, last, HIDDEN_DTYPES, 2)
    for name, tensor in {mask: loss_mask, **states}.items():
        if len(tensor) != length:
            raise ValueError(f"expected {length} tokens in {name} as in {ids}, found {len(tensor)}")
    return RawSample(tokens, loss_mask, states[hidden], states.get(last))


def measure(sample: RawSample, format: str) -> Measured:
    """Reads tokens and mask and two rows of the hidden states."""
    ids = sample.input_ids.numpy()
    mask = sample.loss_mask.to(torch.int64).numpy()
    wrong = np.flatnonzero((mask != 0) & (mask != 1))
    reason = f"expected loss_mask values 0 and 1, found {mask[wrong[0]]} at position {wrong[0]}" if len(wrong) else ""
    digest = hashlib.sha256(ids.astype("<i4").tobytes() + mask.astype(np.uint8).tobytes())
    for hidden in (sample.hidden_states, sample.last_hidden):
        if hidden is not None:
            digest.update(hidden[[0, -1]].contiguous().view(torch.uint8).numpy().tobytes())
    others = [
        h.dtype for h in (sample.hidden_states, sample.last_hidden) if h is not None and h.dtype != torch.bfloat16
    ]
    return Measured(
        format=format,
        reason=reason,
        length=len(ids),
        eligible=int((mask[:-1] & mask[1:]).sum()),
        supervised=int(mask.sum()),
        lowest_id=int(ids.min()),
        highest_id=int(ids.max()),
        width=sample.hidden_states.shape[1],
        last_width=0 if sample.last_hidden is None else sample.last_hidden.shape[1],
        dtype=str(others[0] if others else torch.bfloat16).removeprefix("torch."),
        digest=digest.hexdigest()[:32],
    )


def _tensor(values: Mapping[str, object], name: str, dtypes: tuple[torch.dtype, ...], axes: int) -> Tensor:
    """The tensor `name` with `axes` axes, a leading one of 1 removed."""
    value = values[name]
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        raise ValueError(f"expected {name} as a dense tensor, found {type(value).__name__}")
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"expected {name} as one of {names}, found {str(value.dtype).removeprefix('torch.')}")
    found = value.detach()
    if found.ndim == axes + 1 and found.shape[0] == 1:
        found = found[0]
    if found.ndim != axes:
        raise ValueError(f"expected {name} with {axes} axes, or 1 before them, found shape {list(value.shape)}")
    return found
