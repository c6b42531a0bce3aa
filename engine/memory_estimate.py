"""What training will hold of a CUDA device, by arithmetic, before anything of it exists.

Fixed: weights, gradients, masters and moments of the drafter; the target's embedding and head; the static inputs, the staging
arena behind them and both again for held-out data; RoPE tables; cuBLAS's workspaces. On top of these the graphs' one pool, by
the walk of engine/step_memory.py over the buckets as they are captured, the largest first; and the executable graphs, which
torch does not see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from buffers.arena import packed_size
from buffers.filling import batch_specs
from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.params import ParamArena
from engine.precision import compute_dtype
from engine.settings import Settings
from engine.step_memory import StepMemory, StepShape, walk_step
from graphs.pool_model import MIB, Pool

# cuBLAS keeps 32 MiB a thread and stream on Hopper: for the thread of the forward pass and for autograd's.
WORKSPACES = 2 * 32 * MIB
# Of one executable graph: on an H200 one of 500 kernels took at most 2 MiB of the driver's memory, one of 4,000 at most 10
# (tests/gpu/test_graphs_files.py measures it); a step has some 450 nodes. graphs.json has what was measured.
GRAPH_EXEC = 4 * MIB


@dataclass(frozen=True)
class Estimate:
    """Bytes. fixed: by name. steps: of every bucket, the largest first, as they are captured. graphs_of_bucket: how many graphs
    each has; besides, there is the update's."""

    fixed: Mapping[str, int]
    steps: Mapping[Bucket, StepMemory]
    graphs_of_bucket: int

    @property
    def graphs(self) -> int:
        """Of all buckets, and the update's."""
        return len(self.steps) * self.graphs_of_bucket + 1

    @property
    def pool(self) -> int:
        """The graphs' pool after all captures."""
        return sum(step.grown for step in self.steps.values())

    @property
    def reserved(self) -> int:
        """What torch will hold."""
        return sum(self.fixed.values()) + self.pool

    @property
    def executables(self) -> int:
        """What the driver will hold besides."""
        return self.graphs * GRAPH_EXEC

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.reserved + self.executables

    def grown_mib(self) -> dict[Bucket, float]:
        """What each bucket adds to the pool, to stand beside what its captures added."""
        return {bucket: step.grown / MIB for bucket, step in self.steps.items()}


def estimate(
    settings: Settings,
    config: DrafterConfig,
    buckets: Iterable[Bucket],
    *,
    tied: bool = False,
    held_out: bool = False,
) -> Estimate:
    """Of training with these settings on a CUDA device, whatever device there is here: `auto` means what it would mean there.
    tied: whether the target's head is its embedding."""
    buckets = sorted(buckets, key=lambda bucket: bucket.tokens, reverse=True)
    shape = step_shape(settings)
    dtype = compute_dtype(shape.precision)
    V, D = config.vocab_size, config.hidden_size
    meta = torch.device("meta")
    grad_dtype = torch.bfloat16 if shape.grad_bytes == 2 else torch.float32
    params = ParamArena(config, meta, dtype=dtype, grad_dtype=grad_dtype)
    assert params.master is not None
    states = [params.exp_avg, params.exp_avg_sq] + ([] if params.master is params.weight else [params.master])
    inputs = max(
        packed_size(
            batch_specs(
                bucket, num_taps=config.num_taps, hidden_size=D, dtype=dtype, with_last_hidden=shape.soft_labels
            )
        )
        for bucket in buckets
    )
    positions = max(bucket.S for bucket in buckets) + config.block_size
    fixed = {
        "weights": params.weight.nbytes,
        "gradients": params.grad.nbytes,
        "optimizer": sum(state.nbytes for state in states),
        "embedding and head": (1 if tied else 2) * V * D * shape.c,
        "inputs": inputs,
        "staging": inputs,
        "held-out inputs": 2 * inputs if held_out else 0,
        "tables": 2 * positions * (config.head_dim // 2) * 4,
        "workspaces": WORKSPACES,
    }
    pool = Pool()
    steps = {bucket: walk_step(pool, config, bucket, shape) for bucket in buckets}
    # A bucket's sums are begun by one graph and, where a step has more batches, added to by another.
    of_bucket = 1 + (settings.run.accumulation > 1) + held_out
    return Estimate(fixed, steps, of_bucket)


def step_shape(settings: Settings) -> StepShape:
    """What the walk needs of the settings."""
    precision = "bf16" if settings.run.precision == "auto" else settings.run.precision
    fp32_sums = precision == "fp32" or settings.optimizer.grad_dtype == "fp32"
    return StepShape(
        precision=precision,
        grad_bytes=4 if fp32_sums else 2,
        recompute=settings.model.recompute,
        head_chunk=settings.model.head_chunk,
        attention="triton" if settings.model.attention == "auto" else settings.model.attention,
        soft_labels=settings.objective.kl_weight > 0,
    )
