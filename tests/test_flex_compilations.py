"""Flex compiles once a shape, however many shapes an engine has. Here without kernels: the tracing is the same on the CPU."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from engine.ops import attention_flex
from engine.ops.attention_ref import attention_ref
from graphs.guards import Counters
from tests.attention_helpers import Case, inputs_of, mask_of

CPU = torch.device("cpu")


def test_more_buckets_than_dynamos_limit_are_compiled_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three buckets with full and sliding layers, trained and evaluated, are 12 compilations; Dynamo's own limit is 8."""
    torch._dynamo.reset()
    traced = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend="eager")
    monkeypatch.setattr(attention_flex, "_compiled_flex", traced)
    cases = [Case(K=8, N=16, H=2, G=1, S=128 * i, window=w) for i in range(1, 4) for w in (None, 50)]

    def attend_everywhere() -> None:
        for case in cases:
            mask, (inputs, _) = mask_of(case), inputs_of(case, torch.float32)
            for gradient in (True, False):
                with torch.set_grad_enabled(gradient):
                    tiles = attention_flex.block_mask(mask, case.S, window=case.window, causal=False)
                    o = attention_flex.attention_flex(*inputs, tiles=tiles)
                torch.testing.assert_close(o, attention_ref(*inputs, mask, window=case.window), rtol=0, atol=1e-5)

    before = Counters.read(CPU)
    attend_everywhere()
    assert (Counters.read(CPU) - before).compilations == 2 * len(cases)
    with torch.compiler.set_stance("fail_on_recompile"):
        attend_everywhere()
    torch._dynamo.reset()
