"""The walk of engine/step_memory.py against the code it follows: what a real step keeps, and the most that it ever holds."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from buffers.shapes import Bucket
from engine.kernels import fused_ops
from engine.step import forward_backward
from engine.step_memory import StepShape, walk_step
from graphs.pool_model import Pool
from tests.drafter_helpers import cloned, make_batch, make_step, random_sample, random_target, small_config

pytestmark = pytest.mark.usefixtures("one_thread")
# Wide enough that the small tensors, which the walk leaves out, do not count.
CONFIG = small_config(hidden_size=256, intermediate_size=384, head_dim=64, vocab_size=1024, mask_token_id=1023)
BUCKET = Bucket(B=1, S=32, N=8, K=4, tile=32)


class Live(TorchDispatchMode):
    """Bytes of the storages that operations inside have made and nobody has let go of: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.paused = False
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _storage(leaf) not in given | self._known:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)

        def gone() -> None:
            self._known.discard(key)
            self.now -= nbytes

        weakref.finalize(storage, gone)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize(("recompute", "chunk"), [("none", 8), ("mlp", 24)])
def test_the_walk_meets_the_step(recompute: Any, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = GridExecutor.__call__
    gc.freeze()  # what is there already is not looked at again and again

    def launched(*args: Any, **kwargs: Any) -> Any:
        live.paused = True
        try:
            return launch(*args, **kwargs)
        finally:
            live.paused = False
            gc.collect()  # the interpreter's own cycles hold on to the arguments

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    step = make_step(CONFIG, random_target(CONFIG), ops=fused_ops("triton"), chunk_rows=chunk, recompute=recompute)
    batch = make_batch(CONFIG, BUCKET, [random_sample(CONFIG, BUCKET.S, 1)])
    expected = walk_step(Pool(), CONFIG, BUCKET, StepShape("fp32", 4, recompute, chunk))

    inputs = cloned(batch)
    with Live() as live:
        hidden = step.parts.drafter(inputs)
    assert live.now == pytest.approx(expected.kept, rel=0.08)
    del hidden
    with Live() as live:
        forward_backward(step.parts, inputs, step.denominator)
    assert live.most == pytest.approx(expected.most, rel=0.08)
