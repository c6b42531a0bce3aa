"""The engine: a drafter, its frozen target head, its buckets' inputs and the captured steps over them.

Three kinds of step: `train <bucket>` (forward and backward of one micro-batch), `eval <bucket>` (forward only) and `update`.
All of them read and write fixed memory only, so they are captured once and replayed; on the CPU they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.kernels import select_ops
from engine.metrics import Metrics
from engine.model import Drafter, Recompute
from engine.objective import Objective, TargetHead
from engine.optimizer import AdamW
from engine.params import ParamArena
from engine.precision import check_fp8_sizes, compute_dtype
from engine.settings import ObjectiveSettings, OptimizerSettings
from engine.step import StepParts, forward_backward, forward_only
from graphs.executor import BuildReport, make_executor
from graphs.parity import Difference, worst_difference

Inputs = Callable[[Bucket], Mapping[str, Tensor]]


@dataclass(frozen=True)
class FrozenTarget:
    """What the drafter borrows: embed_tokens and lm_head [V, D], the final norm [D] and its eps; last_hidden_norm says
    whether the dataset's last_hidden is already normed ("post") or not ("pre")."""

    embed_tokens: Tensor
    lm_head: Tensor
    norm: Tensor
    norm_eps: float = 1e-6
    last_hidden_norm: str | None = None


class Engine:
    """Owns parameters, optimizer state, metrics and graphs; the inputs belong to whoever passes `inputs`.

    Build order: construct, load or initialise `params`, `build()`, then steps. `close()` frees the graphs.
    """

    def __init__(
        self,
        config: DrafterConfig,
        target: FrozenTarget,
        buckets: Sequence[Bucket],
        inputs: Inputs,
        *,
        device: torch.device,
        objective: ObjectiveSettings,
        optimizer: OptimizerSettings | None,
        precision: str = "fp32",
        attention: str = "auto",
        chunk_rows: int = 2048,
        recompute: Recompute = "none",
        eval_inputs: Inputs | None = None,
        training: bool = True,
    ) -> None:
        """optimizer None: forward and backward only, no masters and moments. precision: bf16 | fp32 | fp8, of which evaluation
        knows the first two: fp8 is evaluated in bf16, as it is used. eval_inputs: static inputs of the held-out data over the
        same buckets, where there is any. training False: evaluation steps only. Raises ValueError where fp8 cannot be."""
        if precision == "fp8":
            check_fp8_sizes(config)
        dtype = compute_dtype(precision)
        grad_dtype = (
            torch.bfloat16
            if dtype == torch.bfloat16 and (optimizer is None or optimizer.grad_dtype == "bf16")
            else torch.float32
        )
        self.config, self.device, self.precision = config, device, precision
        self.buckets = tuple(sorted(buckets, key=lambda bucket: bucket.tokens))
        self.ops = select_ops(device, attention, precision)
        self.params = ParamArena(config, device, dtype=dtype, grad_dtype=grad_dtype, trainable=optimizer is not None)
        self.embed_tokens = target.embed_tokens.to(device, dtype)
        same = target.lm_head.data_ptr() == target.embed_tokens.data_ptr()
        self.head = TargetHead(
            self.embed_tokens if same else target.lm_head.to(device, dtype),
            None if target.last_hidden_norm == "post" else target.norm.to(device, dtype),
            target.norm_eps,
        )
        self.objective = _objective(objective, config.block_size, device)
        self.metrics, self.eval_metrics = Metrics(config.block_size, device), Metrics(config.block_size, device)
        longest = max(bucket.S for bucket in self.buckets)
        self.drafter = Drafter(
            config,
            self.params,
            self.embed_tokens,
            self.ops,
            max_positions=longest + config.block_size,
            recompute=recompute,
        )
        self.parts = StepParts(self.drafter, self.head, self.objective, self.ops, self.metrics, chunk_rows)
        # What is trained is used in bf16, so that is how it is evaluated.
        evaluated = self.parts
        if precision == "fp8":
            ops = select_ops(device, attention)
            drafter = Drafter(config, self.params, self.embed_tokens, ops, max_positions=longest + config.block_size)
            evaluated = replace(self.parts, drafter=drafter, ops=ops)
        self.optimizer: AdamW | None = None
        if optimizer is not None:
            o = optimizer
            self.optimizer = AdamW(
                self.params,
                self.ops,
                beta1=o.beta1,
                beta2=o.beta2,
                eps=o.eps,
                weight_decay=o.weight_decay,
                clip_norm=o.clip_norm,
            )
        self._denominator = (
            self.optimizer.denominator if self.optimizer else torch.zeros((), dtype=torch.float64, device=device)
        )
        self._first = True
        self.executor = make_executor(device)
        self._all_inputs = [provide for provide in (inputs, eval_inputs) if provide is not None]
        if training:
            for bucket in reversed(self.buckets):
                step = partial(forward_backward, self.parts, inputs(bucket), self._denominator)
                # Two graphs a bucket: for the first micro-batch of an optimizer step, and for those that add to it.
                self.executor.add(f"train {bucket.name}", partial(step, first=True))
                self.executor.add(f"add {bucket.name}", step)
        if eval_inputs is not None:
            for bucket in reversed(self.buckets):
                forward = partial(forward_only, evaluated, eval_inputs(bucket), self.eval_metrics)
                self.executor.add(f"eval {bucket.name}", forward)
        if self.optimizer is not None:
            self.executor.add("update", self.optimizer.update)

    def build(self) -> list[BuildReport]:
        """Compiles and captures everything, on inputs without content; parameters and optimizer state stay as they are."""
        for provide in self._all_inputs:
            for bucket in self.buckets:
                for tensor in provide(bucket).values():
                    # Rows of length 0, no block kept: every number finite, every weight 0, and the update skips itself.
                    tensor.zero_()
        reports = self.executor.build()
        self.zero_()
        if self.optimizer is not None:
            self.optimizer.skipped.zero_()
        self.executor.times.clear()
        return reports

    def micro_step(self, bucket: Bucket) -> None:
        """Forward and backward of what the bucket's inputs hold; gradients and metrics are added up, the gradients from the
        last update on."""
        self.executor.run(f"{'train' if self._first else 'add'} {bucket.name}")
        self._first = False

    def eval_step(self, bucket: Bucket) -> None:
        """Forward of what the bucket's inputs hold, into eval_metrics."""
        self.executor.run(f"eval {bucket.name}")

    def update(self, lr: float) -> None:
        """One optimizer step from the gradients added up since the last one. lr is written on the stream: no wait."""
        assert self.optimizer is not None, "the engine was built without an optimizer"
        self.optimizer.lr.fill_(lr)
        self.executor.run("update")
        self._first = True

    def zero_(self) -> None:
        """Forgets gradients, the step's weight and all metrics."""
        self._first = True
        for tensor in (self.params.grad, self._denominator):
            tensor.zero_()
        self.metrics.zero_()
        self.eval_metrics.zero_()

    def gradients(self) -> dict[str, Tensor]:
        """The gradient sums by parameter name; views of the arena, begun anew after the next update."""
        return dict(self.params.named(self.params.grad))

    def named_buffers(self) -> list[tuple[str, dict[str, Tensor]]]:
        """The memory that lives as long as the engine, for buffers.arena.arena_table; the inputs are their owner's."""
        p = self.params
        flat = {"weight": p.weight, "grad": p.grad}
        if p.master is not None:
            flat |= {"master": p.master, "exp_avg": p.exp_avg, "exp_avg_sq": p.exp_avg_sq}
        target = {"embed_tokens": self.embed_tokens, "lm_head": self.head.weight}
        tables = {"rope cos": self.drafter.cos_PE, "rope sin": self.drafter.sin_PE}
        sums = {
            f"{name} {part}": tensor
            for name, metrics in (("training", self.metrics), ("held-out", self.eval_metrics))
            for part, tensor in (("sums", metrics.sums), ("slots", metrics.slots))
        }
        sums["held-out blocks by accepted drafts"] = self.eval_metrics.blocks_by_accepted
        scalars = {name: getattr(self.objective, name) for name in ("ce_weight", "kl_weight", "gamma")}
        if self.optimizer is not None:
            scalars |= self.optimizer.scalars()
        arenas = {"parameters": flat, "target": target, "tables": tables, "metrics": sums, "scalars": scalars}
        return list(arenas.items())

    def verify(self, bucket: Bucket) -> Difference | None:
        """Replays the bucket's two steps, the first of an update and one that adds, on what its inputs hold and compares with
        the eager twins: every gradient, the steps' weight and all metrics. None when bit-equal. Forgets gradients and metrics."""
        return self._difference(bucket, self.executor.run, self.executor.call)

    def noise(self, bucket: Bucket) -> Difference | None:
        """As verify, of two eager steps: None where every kernel is deterministic."""
        return self._difference(bucket, self.executor.call, self.executor.call)

    def verify_rows(self, bucket: Bucket, rows: int) -> Difference | None:
        """As verify, of gradients and loss, with an eager step that has the first `rows` rows alone. The replay's others are
        emptied in the inputs: the same sums, added up in another order."""
        inputs = self._all_inputs[0](bucket)
        for tensor in inputs.values():
            tensor[rows:].zero_()
        few = {name: tensor[:rows] for name, tensor in inputs.items()}

        def eager(name: str) -> None:
            forward_backward(self.parts, few, self._denominator, first=name.startswith("train "))

        return self._difference(bucket, self.executor.run, eager, whole=False)

    def close(self) -> None:
        """Frees all graphs; the engine takes no step after it."""
        self.executor.close()

    def _difference(
        self, bucket: Bucket, run: Callable[[str], None], twin: Callable[[str], None], *, whole: bool = True
    ) -> Difference | None:
        """Of the bucket's two steps, the first of an update and one that adds, run in one way and in the other. whole: metrics
        beside the loss too. Forgets gradients and metrics."""
        expected, found = (self._outcome(way, bucket, whole=whole) for way in (twin, run))
        self.zero_()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the eager twin's memory lies outside the graphs' pool
        return worst_difference(found, expected)

    def _outcome(self, run: Callable[[str], None], bucket: Bucket, *, whole: bool) -> dict[str, Tensor]:
        self.zero_()
        for step in (f"train {bucket.name}", f"add {bucket.name}"):
            run(step)
        sums = {"loss": self.metrics.sums[0], "denominator": self._denominator}
        if whole:
            sums |= {"metrics": self.metrics.sums, "slots": self.metrics.slots}
        return {name: tensor.clone() for name, tensor in (self.gradients() | sums).items()}


def _objective(settings: ObjectiveSettings, block_size: int, device: torch.device) -> Objective:
    def scalar(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=device)

    return Objective(
        settings.weighting,
        settings.kl_weight > 0,
        settings.dpace_alpha,
        ce_weight=scalar(settings.ce_weight),
        kl_weight=scalar(settings.kl_weight),
        gamma=scalar(settings.gamma_for(block_size)),
    )
