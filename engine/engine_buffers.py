"""The long-lived memory of an engine, by name."""

from __future__ import annotations

from torch import Tensor

from engine.engine import Engine


def engine_buffers(engine: Engine) -> list[tuple[str, dict[str, Tensor]]]:
    """All that lives as long as the engine, and the current generation's tables, for buffers.arena.arena_table; the inputs are
    their owner's."""
    p = engine.params
    flat = {"weight": p.weight, "grad": p.grad}
    if p.master is not None:
        flat |= {"master": p.master, "exp_avg": p.exp_avg, "exp_avg_sq": p.exp_avg_sq}
    target = {"embed_tokens": engine.embed_tokens, "lm_head": engine.head.weight}
    tables = {"rope cos": engine.drafter.cos_PE, "rope sin": engine.drafter.sin_PE}
    sums = {
        f"{name} {part}": tensor
        for name, metrics in (("training", engine.metrics), ("held-out", engine.eval_metrics))
        for part, tensor in (("sums", metrics.sums), ("slots", metrics.slots))
    }
    sums["held-out blocks by accepted drafts"] = engine.eval_metrics.blocks_by_accepted
    scalars = {name: getattr(engine.objective, name) for name in ("ce_weight", "kl_weight", "gamma")}
    if engine.optimizer is not None:
        scalars |= engine.optimizer.scalars()
    arenas = {
        "parameters": flat,
        "target": target,
        f"tables of generation {engine.generation}": tables,
        "metrics": sums,
        "scalars": scalars,
    }
    return list(arenas.items())
