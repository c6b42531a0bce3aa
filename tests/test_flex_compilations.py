"""Flex compiles once a shape, however many shapes an engine has. Here without kernels: the tracing is the same on the CPU."""

from typing import Any

import pytest
import torch

from bench.attention import Shape
from bench.flex_shapes import once
from engine.ops import attention_flex
from engine.ops.attention_ref import attention_ref
from graphs.guards import Counters, kernels_compiled
from tests.attention_helpers import Case, inputs_of, mask_of

CPU = torch.device("cpu")


def trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo traces, nothing makes kernels of it."""
    traced = torch.compile(attention_flex._flex, dynamic=False, fullgraph=True, backend="eager")
    monkeypatch.setattr(attention_flex, "_compiled_flex", traced)


def attend(S: int) -> None:
    case = Case(K=8, N=16, H=2, G=1, S=S)
    tiles = attention_flex.block_mask(mask_of(case), S, window=None, causal=False)
    attention_flex.attention_flex(*inputs_of(case, torch.float32)[0], tiles=tiles)


def test_more_buckets_than_dynamos_limit_are_compiled_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three buckets with full and sliding layers, trained and evaluated, are 12 compilations; Dynamo's own limit is 8."""
    torch._dynamo.reset()
    trace_only(monkeypatch)
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


def test_room_is_made_for_every_generations_shapes_and_running_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    trace_only(monkeypatch)
    monkeypatch.setattr(attention_flex, "_reserved", 0)
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=1):
        attention_flex.reserve_compilations(1)
        assert config.recompile_limit == 2, "a shape with and without gradient"
        attend(128)
        attend(256)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            attend(384)
        attention_flex.reserve_compilations(2)
        attend(384)
    torch._dynamo.reset()


def test_graphs_that_no_cache_takes_are_compiled_anew_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch._dynamo.utils.counters["inductor"]
    before = kernels_compiled()
    for how, compiled in (("hit", 0), ("miss", 1), ("bypass", 2)):
        monkeypatch.setitem(counters, f"fxgraph_cache_{how}", counters.get(f"fxgraph_cache_{how}", 0) + 1)
        assert kernels_compiled() - before == compiled


def test_flex_never_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    trace_only(monkeypatch)
    attend(128)
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="would run uncompiled and dense"):
        attend(128)
    attend(128)
    torch._dynamo.reset()


@pytest.mark.parametrize(("way", "compilations"), [("a length", 3), ("all lengths", 1), ("all but the first", 2)])
def test_one_compilation_may_serve_all_lengths(way: str, compilations: int) -> None:
    """What bench.flex_shapes measures: traced here, kernels are made on a GPU alone."""
    torch._dynamo.reset()
    before = attention_flex._compiled_flex
    try:
        shape = Shape("small", 0, N=32, K=8, H=4, G=2)
        figures = once(way, (384, 512, 640), CPU, shape, backend="eager")
    finally:
        attention_flex._compiled_flex = before
        torch._dynamo.reset()
    assert figures["compilations"] == compilations
    assert len(figures["first_call_s"]) == len(figures["apart"]) == 3 and figures["ms"] == []
