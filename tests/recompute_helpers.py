"""What model.recompute must leave as it is, and what it must save, for any set of operations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from buffers.shapes import Bucket
from engine.kernels import Ops
from engine.model import Recompute
from tests.drafter_helpers import cloned, make_batch, make_step, random_sample, random_target, small_config


def drafted(
    recompute: Recompute, buckets: Sequence[Bucket], ops: Ops | None = None
) -> tuple[dict[str, Tensor], list[int]]:
    """(hidden states of each bucket and the gradient sums of one step over all, bytes that each forward pass kept for the
    backward pass, without the parameters)."""
    config = small_config()
    step = make_step(config, random_target(config), ops=ops, recompute=recompute)
    parameters = step.params.weight.untyped_storage().data_ptr()
    results: dict[str, Tensor] = {}
    kept: list[int] = []
    for i, bucket in enumerate(buckets):
        storages: dict[int, int] = {}

        def pack(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        batch = make_batch(config, bucket, [random_sample(config, bucket.S - 3, 10 * i + b) for b in range(bucket.B)])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            hidden = step.parts.drafter(cloned(batch))
        storages.pop(parameters, None)
        kept.append(sum(storages.values()))
        results[f"hidden {i}"] = hidden.detach().clone()
        step.parts.drafter.gradient_sums.begin(i == 0)
        hidden.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(i)))
    return results | dict(step.params.named(step.params.grad)), kept
