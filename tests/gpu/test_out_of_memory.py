"""Out of GPU memory while an engine is built: the message, and that the process can go on with a smaller one."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from buffers.shapes import Bucket
from graphs.executor import CaptureError, GraphExecutor
from tests.gpu.engine_helpers import BUCKETS, CUDA, assemble, build, medium_config

REMEDY = r"lower buckets\.token_budget, buckets\.num_anchors or model\.head_chunk"


@pytest.fixture(params=["quota", "full card"])
def leave(request: pytest.FixtureRequest) -> Iterator[Callable[[int], None]]:
    """leave(MiB): from there on the process gets no more than these, by torch's quota or because the card is full."""
    ballast: list[Tensor] = []

    def limit(mib: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(CUDA)
        if request.param == "quota":
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + mib * 2**20) / total)
        else:
            ballast.append(torch.empty(free - mib * 2**20, dtype=torch.uint8, device=CUDA))

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    ballast.clear()
    torch.cuda.empty_cache()


def test_the_step_is_named_and_a_smaller_engine_can_be_built_afterwards(leave: Callable[[int], None]) -> None:
    made = assemble(medium_config(), [BUCKETS[0], Bucket(4, 2048, 512, 8)])
    leave(500)
    with pytest.raises(CaptureError, match=f"out of GPU memory while warming up train 4x2048x512: .* {REMEDY}"):
        made.engine.build()
    made.engine.close()
    del made
    smaller = build(medium_config(), BUCKETS[:2])
    for bucket in BUCKETS[:2]:
        smaller.inputs.load(bucket, seed=0)
        assert smaller.engine.verify(bucket) is None
    smaller.engine.close()


class Hungry:
    """A step that asks for memory it does not get, at its n-th call."""

    def __init__(self, at_call: int) -> None:
        self.number = torch.zeros(1000, device=CUDA)
        self._calls, self._at_call = 0, at_call

    def __call__(self) -> Tensor:
        self._calls += 1
        self.number += 1
        return torch.zeros(2**29 if self._calls == self._at_call else 1, device=CUDA)


@pytest.mark.parametrize(("at_call", "doing"), [(1, "warming up"), (2, "capturing")])
def test_what_was_being_done_is_named(leave: Callable[[int], None], at_call: int, doing: str) -> None:
    leave(600)
    executor = GraphExecutor(CUDA)
    executor.add("eval 8x512x64", Hungry(at_call))
    with pytest.raises(
        CaptureError, match=f"out of GPU memory while {doing} eval 8x512x64: .* GiB were free.* {REMEDY}"
    ):
        executor.build()
    executor.close()

    executor = GraphExecutor(CUDA)
    modest = Hungry(at_call=0)
    executor.add("eval 1x512x64", modest)
    executor.build()
    torch.cuda.synchronize()
    before = modest.number[0].item()
    executor.run("eval 1x512x64")
    assert modest.number[0].item() == before + 1
    executor.close()
