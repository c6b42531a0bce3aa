"""Compiled flex_attention under the DFlash block mask against dense attention: output and five gradients, as close to fp64
as plain torch. Every case compiles kernels of its own, which is what takes the time."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine.ops.attention_flex import attention_flex, block_mask
from engine.ops.attention_ref import attention_ref
from tests.attention_helpers import NAMES, Case, Inputs, inputs_of, leaves, mask_of, relative_error

# Half a unit in the last place of the result, relative.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-20}
# S and Q = N * K fill whole tiles of 128; fp32 has a small head dim, because its kernels compile slowly.
CASES = [
    pytest.param(Case(K=4, N=64, H=4, G=2, S=384, E=32, documents=True, unused=9), torch.float32, id="K4-documents"),
    pytest.param(Case(K=8, N=48, H=4, G=2, S=512, E=64, window=100, causal=True), torch.bfloat16, id="K8-sliding"),
    pytest.param(Case(K=10, N=64, H=4, G=4, S=384, E=32, window=70, unused=5), torch.float32, id="K10-window"),
    pytest.param(Case(K=10, N=64, H=8, G=2, S=768, E=128, B=2, unused=7), torch.bfloat16, id="K10-rows"),
    pytest.param(Case(K=16, N=32, H=4, G=1, S=512, E=64, causal=True, documents=True), torch.bfloat16, id="K16-causal"),
    pytest.param(Case(K=32, N=12, H=8, G=2, S=1024, E=128, unused=2), torch.bfloat16, id="K32"),
]


def flex(case: Case, inputs: Inputs, do: Tensor) -> list[Tensor]:
    """o and five gradients."""
    inputs = leaves(inputs, do.dtype)
    tiles = block_mask(mask_of(case, "cuda"), case.S, window=case.window, causal=case.causal)
    o = attention_flex(*inputs, tiles=tiles)
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


def dense(case: Case, inputs: Inputs, do: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The same from the definition, computed in dtype."""
    inputs = leaves(inputs, dtype)
    o = attention_ref(*inputs, mask_of(case, "cuda"), window=case.window, causal=case.causal)
    return [o.detach(), *torch.autograd.grad(o, inputs, do.to(dtype))]


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_flex_is_as_close_as_plain_torch(case: Case, dtype: torch.dtype) -> None:
    inputs, do = inputs_of(case, dtype, "cuda")
    exact, plain = dense(case, inputs, do, torch.float64), dense(case, inputs, do, dtype)
    found = flex(case, inputs, do)
    for name, result, low, expected in zip(("o", *NAMES), found, plain, exact, strict=True):
        assert result.isfinite().all(), name
        budget = 2 * relative_error(low, expected) + ROUNDING[dtype]
        assert relative_error(result, expected) <= budget, name
    # Other anchors in the same shapes: the mask is data, and flex's kernels are those that exist.
    with torch.compiler.set_stance("fail_on_recompile"):
        again = flex(case, inputs, do)
        mask = mask_of(case, "cuda", seed=1)
        moved = attention_flex(
            *leaves(inputs, dtype), tiles=block_mask(mask, case.S, window=case.window, causal=case.causal)
        )
    assert all(torch.equal(first, second) for first, second in zip(found, again, strict=True))
    expected = attention_ref(*leaves(inputs, torch.float64), mask, window=case.window, causal=case.causal)
    assert relative_error(moved, expected) <= 2 * relative_error(plain[0], exact[0]) + ROUNDING[dtype]
