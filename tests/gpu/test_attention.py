"""Triton's attention on the GPU: as close to fp64 as plain torch, the same bits each time, captured, compiled once."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import triton

from engine.ops.attention import attention, attention_backward, attention_forward
from engine.ops.attention_ref import attention_ref
from tests.attention_helpers import NAMES, Case, Inputs, inputs_of, leaves, mask_of, relative_error

# Half a unit in the last place of the result, relative.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-20}
CASES = [
    pytest.param(Case(K=16, N=128, H=4, G=2, S=512, E=128), id="W1"),
    pytest.param(Case(K=16, N=128, H=8, G=2, S=2048, E=128), id="W2"),
    pytest.param(Case(K=32, N=64, H=8, G=2, S=2048, E=128), id="W3"),
    pytest.param(Case(K=16, N=64, H=8, G=2, S=1024, E=128, window=300, causal=True), id="sliding"),
    pytest.param(Case(K=10, N=51, H=5, G=1, S=700, E=128, B=3, documents=True, unused=9), id="nothing-divides"),
    pytest.param(Case(K=8, N=64, H=2, G=2, S=512, E=64, B=2, causal=True), id="no-groups"),
    pytest.param(Case(K=4, N=128, H=4, G=1, S=512, E=64, window=64), id="E64-window"),
    pytest.param(Case(K=16, N=64, H=8, G=2, S=512, E=256, documents=True), id="E256"),
    pytest.param(Case(K=32, N=32, H=16, G=2, S=512, E=256, causal=True), id="E256-block-larger-than-tile"),
    pytest.param(Case(K=16, N=40, H=16, G=1, S=512, E=128, ordered=False), id="any-order-of-anchors"),
    # Packed rows: documents of many tiles, and several documents in a tile of keys and in one of blocks.
    pytest.param(Case(K=16, N=256, H=8, G=2, S=2048, E=128, documents=True, unused=20), id="documents-of-many-tiles"),
    pytest.param(
        Case(K=16, N=256, H=8, G=2, S=1024, E=128, B=2, documents=True, pieces=40, window=100), id="many-documents"
    ),
]


def run(case: Case, inputs: Inputs, do: Tensor) -> list[Tensor]:
    """o and five gradients."""
    mask = mask_of(case, "cuda")
    o, lse = attention_forward(*inputs, mask, window=case.window, causal=case.causal)
    gradients = attention_backward(do, *inputs, o, lse, mask, window=case.window, causal=case.causal)
    return [o, *gradients]


def plain(case: Case, inputs: Inputs, do: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The same from the reference, computed in dtype."""
    inputs = leaves(inputs, dtype)
    o = attention_ref(*inputs, mask_of(case, "cuda"), window=case.window, causal=case.causal)
    return [o.detach(), *torch.autograd.grad(o, inputs, do.to(dtype))]


def assert_as_close_as_plain_torch(case: Case, dtype: torch.dtype) -> None:
    inputs, do = inputs_of(case, dtype, "cuda")
    exact = plain(case, inputs, do, torch.float64)
    torchs = plain(case, inputs, do, dtype)
    for name, found, low, expected in zip(("o", *NAMES), run(case, inputs, do), torchs, exact, strict=True):
        budget = 2 * relative_error(low, expected) + ROUNDING[dtype]
        assert relative_error(found, expected) <= budget, name


@pytest.mark.parametrize("case", CASES)
def test_bf16_is_as_close_as_plain_torch(case: Case) -> None:
    assert_as_close_as_plain_torch(case, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_as_close_as_plain_torch(dtype: torch.dtype) -> None:
    assert_as_close_as_plain_torch(Case(K=8, N=32, H=4, G=2, S=256, E=32, window=100), dtype)


@pytest.mark.parametrize("case", CASES)
def test_two_runs_give_the_same_bits(case: Case) -> None:
    inputs, do = inputs_of(case, torch.bfloat16, "cuda")
    for first, second in zip(run(case, inputs, do), run(case, inputs, do), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]])
def test_replay_equals_eager_after_inputs_and_anchors_change(case: Case) -> None:
    inputs, do = inputs_of(case, torch.bfloat16, "cuda")
    for x in inputs:
        x.requires_grad_()
    mask = mask_of(case, "cuda")

    def step() -> list[Tensor]:
        o = attention(*inputs, mask, window=case.window, causal=case.causal)
        return [o.detach(), *torch.autograd.grad(o, inputs, do)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        static = step()
    graph.replay()
    before = [x.clone() for x in static]

    others, other_do = inputs_of(case, torch.bfloat16, "cuda", seed=1)
    other_mask = mask_of(case, "cuda", seed=1)
    with torch.no_grad():
        for x, other in zip((*inputs, do), (*others, other_do), strict=True):
            x.copy_(other)
    mask.anchor_positions.copy_(other_mask.anchor_positions)
    mask.block_keep_mask.copy_(other_mask.block_keep_mask)
    mask.context_start.copy_(other_mask.context_start)
    graph.replay()
    for replayed, old, eager in zip(static, before, step(), strict=True):
        assert not torch.equal(replayed, old)
        assert torch.equal(replayed, eager)


def test_what_lies_past_the_highest_anchor_does_not_matter() -> None:
    case = Case(K=16, N=32, H=8, G=2, S=512, E=128)
    inputs, do = inputs_of(case, torch.bfloat16, "cuda")
    end = int(mask_of(case).anchor_positions.max())
    clean = run(case, inputs, do)
    for context in inputs[1:3]:
        context[:, end:] = float("nan")
    for found, expected in zip(run(case, inputs, do), clean, strict=True):
        assert torch.equal(found, expected)


def test_one_compilation_serves_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(case: Case) -> None:
        inputs, do = inputs_of(case, torch.bfloat16, "cuda")
        mask = mask_of(case, "cuda")
        for splits in (1, 3):
            o, lse = attention_forward(*inputs, mask, window=case.window, causal=case.causal)
            attention_backward(do, *inputs, o, lse, mask, window=case.window, causal=case.causal, splits=splits)

    both(Case(K=16, N=64, H=8, G=2, S=512, E=128))
    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["repr"]))
    both(Case(K=16, N=8, H=8, G=2, S=384, E=128, B=2))
    both(Case(K=16, N=72, H=8, G=2, S=1280, E=128, window=200))
    assert compiled == []
