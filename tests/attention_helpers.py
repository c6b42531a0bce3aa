"""Inputs for the tests of Triton's attention: masks of every kind, and q, k, v as slices of wider rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.mask import DraftMask

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

NAMES = ("dq", "dk_context", "dv_context", "dk_draft", "dv_draft")


@dataclass(frozen=True)
class Case:
    """Sizes and mask of one call. documents: rows are packed, `pieces` documents in each; unused: slots without an anchor at
    the end of a row."""

    K: int
    N: int
    H: int
    G: int
    S: int
    B: int = 1
    E: int = 16
    window: int | None = None
    causal: bool = False
    documents: bool = False
    pieces: int = 3
    unused: int = 0
    ordered: bool = True


def mask_of(case: Case, device: str = "cpu", seed: int = 0) -> DraftMask:
    """Anchors without replacement. The last row of a batch of several has no anchor at all, as in a batch's filler."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(case.B, max(case.S - 1, case.N), generator=generator).argsort(-1)
    anchors = order[:, : case.N].clamp(max=case.S - 2)
    anchors = anchors.sort(-1).values if case.ordered else anchors
    keep = torch.ones(case.B, case.N, dtype=torch.int32)
    start = (
        anchors // (case.S // case.pieces) * (case.S // case.pieces) if case.documents else torch.zeros_like(anchors)
    )
    if case.unused:
        keep[:, -case.unused :] = 0
    if case.B > 1:
        keep[-1] = 0
    if case.ordered:
        anchors, start = anchors * keep, start * keep
    else:
        # Unused slots anywhere, with the numbers of another batch left in them.
        keep[:, 1::4] = 0
    return DraftMask(anchors.int().to(device), keep.to(device), start.int().to(device), case.K)


def inputs_of(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Inputs, Tensor]:
    """(q, k_context, v_context, k_draft, v_draft), which are slices of fused rows as a projection's, and do."""
    generator = torch.Generator(device).manual_seed(seed)

    def rows(length: int, heads: int) -> Tensor:
        return torch.randn(case.B, length, heads, case.E, device=device, generator=generator).to(dtype)

    Q, H, G = case.N * case.K, case.H, case.G
    q, k_draft, v_draft = rows(Q, H + 2 * G).split([H, G, G], dim=2)
    k_context, v_context = rows(case.S, 2 * G).split([G, G], dim=2)
    return (q, k_context, v_context, k_draft, v_draft), rows(Q, H)


def leaves(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same values in another precision, with gradients."""
    q, k_context, v_context, k_draft, v_draft = (x.detach().to(dtype).requires_grad_() for x in inputs)
    return q, k_context, v_context, k_draft, v_draft


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in fp64; the norm itself where zeros are expected."""
    expected = expected.double()
    norm = expected.norm().item()
    return (found.double() - expected).norm().item() / (norm or 1.0)
