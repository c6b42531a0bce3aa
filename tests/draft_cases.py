"""Labels, positions and sums of a draft: the kernels against their definitions, on numbers that lie where nothing should be
read. The same on the GPU and in the interpreter."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from engine.ops.block_sums import block_sums
from engine.ops.block_sums_ref import block_sums_ref
from engine.ops.draft_inputs import Supervision
from engine.ops.draft_tokens import draft_tokens
from engine.ops.draft_tokens_ref import draft_tokens_ref
from engine.ops.supervision import supervision
from engine.ops.supervision_ref import supervision_ref


def a_draft(device: torch.device) -> dict[str, Tensor]:
    """Two rows of 40 tokens, the second of two documents; unused blocks, padding and what is beyond it hold nonsense."""
    generator = torch.Generator().manual_seed(3)
    B, S, N = 2, 40, 9
    ids = torch.randint(90, (B, S), generator=generator, dtype=torch.int32)
    positions = torch.arange(S, dtype=torch.int32).repeat(B, 1)
    positions[1, 15:] -= 15
    lengths = torch.tensor([33, 40], dtype=torch.int32)
    anchors = torch.sort(torch.randint(31, (B, N), generator=generator, dtype=torch.int32)).values
    keep = torch.ones(B, N, dtype=torch.uint8)
    keep[:, -2:] = 0
    anchors[0, -1], positions[0, 33:], ids[0, 33:] = 39, 9999, 77
    end = torch.where(anchors < 15, 15, 40).to(torch.int32)
    end[0] = 33
    batch = {
        "input_ids": ids,
        "position_ids": positions,
        "row_lengths": lengths,
        "loss_mask": (torch.rand(B, S, generator=generator) < 0.8).to(torch.uint8),
        "anchor_positions": anchors,
        "block_keep_mask": keep,
        "context_end": end,
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def check_draft_tokens(device: torch.device, K: int) -> None:
    batch = a_draft(device)
    names = ("input_ids", "position_ids", "row_lengths", "anchor_positions", "block_keep_mask")
    found, expected = (
        op(*(batch[name] for name in names), block_size=K, mask_token_id=99) for op in (draft_tokens, draft_tokens_ref)
    )
    for field in dataclasses.fields(expected):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name)), field.name
    assert found.context_positions.max() < 40
    assert found.ids.view(2, 9, K)[:, :7, 0].max() < 90


def check_supervision(device: torch.device, K: int, has_gamma: bool) -> None:
    batch = a_draft(device)
    gamma = torch.tensor(4.0, device=device) if has_gamma else None

    def call(op: Callable[..., Supervision]) -> Supervision:
        names = ("input_ids", "loss_mask", "anchor_positions", "block_keep_mask", "context_end")
        return op(*(batch[name] for name in names), gamma, block_size=K)

    found, expected = call(supervision), call(supervision_ref)
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.w, expected.w)
    torch.testing.assert_close(found.decayed, expected.decayed)
    assert 0 < found.w.sum() < found.w[:, :7].numel()


def check_block_sums(device: torch.device, K: int, has_kl: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    B, N = 2, 37
    ce, kl, weight = (torch.rand(B, N, K - 1, generator=generator) for _ in range(3))
    w, correct, keep = (torch.rand(shape, generator=generator) < 0.7 for shape in (ce.shape, ce.shape, (B, N)))
    ce[~w], weight[~w] = float("nan"), 0.0

    def call(op: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        scalars = torch.tensor(0.7, device=device), torch.tensor(0.3, device=device)
        soft = kl.to(device) if has_kl else None
        rest = (x.to(device) for x in (correct, w.float(), weight, keep.to(torch.uint8)))
        return op(ce.to(device), soft, *rest, *scalars)

    (found, accepted), (expected, expected_accepted) = call(block_sums), call(block_sums_ref)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert torch.equal(found[4:], expected[4:])
    assert torch.equal(accepted, expected_accepted)
