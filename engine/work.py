"""The work of a training step, by arithmetic: what the planner minimises and what the benchmarks divide by."""

from __future__ import annotations

import math
from collections.abc import Callable

from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.params import ParamArena

# The part of a step that does not shrink with its rows (small kernels, tails of waves, the copy into the inputs), in FLOP:
# about 0.2 ms of an H200 at 600 TFLOP/s, 5 ms of two CPU cores at 50 GFLOP/s.
FIXED_FLOP = {"cuda": 1.2e11, "cpu": 2.5e8}


def step_flop(config: DrafterConfig, bucket: Bucket, seen: float = 0.0) -> float:
    """Floating-point operations of forward and backward over one batch, 2 a multiply-add.

    A trained matmul counts 6 a weight and token (forward, input gradient, weight gradient), fc 4 (its input needs no
    gradient), the frozen head 4 over slots 1..K-1; every layer whole, whatever the engine leaves out of the first and the last.
    Attention counts 14 H E a visible key (4 forward, 10 backward), with the own block and `seen` context tokens visible on
    average: half the row unless given, less where documents share it.
    """
    D, HE, GE = (
        config.hidden_size,
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )
    layers = config.num_hidden_layers
    per_draft: float = layers * 6 * (D * (2 * HE + 2 * GE) + 3 * D * config.intermediate_size)
    per_draft += 4 * D * config.vocab_size * (bucket.K - 1) / bucket.K
    per_context = 4 * config.num_taps * D * D + layers * 6 * D * 2 * GE
    seen = seen or bucket.S / 2
    keys = sum(min(seen, config.layer_window(i) or bucket.S) + bucket.K for i in range(layers))
    return bucket.B * (bucket.Q * (per_draft + 14 * HE * keys) + bucket.S * per_context)


def spoken_flop(flop: float) -> str:
    """In the unit that shows it with 1 to 3 digits before the point, as in 71.8 TFLOP."""
    units = ("kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    power = min(max(int(math.log10(max(flop, 1.0)) // 3), 1), len(units))
    return f"{flop / 1000**power:.4g} {units[power - 1]}"


def update_bytes(params: ParamArena) -> int:
    """Bytes that one optimizer update must move: the gradient read for its norm, then again; the weight written; the master
    and both moments read and written. 30 a parameter with bf16 weights and gradients."""
    weight, grad = params.weight.element_size(), params.grad.element_size()
    own_weight = 0 if params.master is params.weight else weight
    return params.size * (2 * grad + own_weight + 3 * 2 * 4)


def planning_cost(config: DrafterConfig, device_type: str, seen: float = 0.0) -> Callable[[Bucket], float]:
    """cost(bucket) for buffers.planner: step_flop plus the fixed part of a step."""
    return lambda bucket: step_flop(config, bucket, seen) + FIXED_FLOP.get(device_type, 0.0)
