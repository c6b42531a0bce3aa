"""The engine: a drafter, its frozen target head, and generation after generation of captured steps over them.

Three kinds of step: `train <bucket>` (forward and backward of one micro-batch), `eval <bucket>` (forward only) and `update`.
All of them read and write fixed memory only, so they are captured once and replayed; on the CPU they are called. Parameters,
moments, device scalars and metrics live as long as the engine; buckets, inputs, tables and graphs as long as their generation
(generation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from buffers.shapes import Bucket
from engine.drafter_config import DrafterConfig
from engine.first_calls import FirstCalls, Load
from engine.generation import Generation, GenerationOptions, Inputs, Lasting, assemble
from engine.kernels import Ops, select_ops
from engine.metrics import Metrics
from engine.model import Drafter, Recompute
from engine.objective import Objective, TargetHead
from engine.optimizer import AdamW
from engine.params import ParamArena
from engine.precision import check_fp8_sizes, compute_dtype
from engine.settings import ObjectiveSettings, OptimizerSettings
from engine.step import StepParts, forward_backward, forward_only
from graphs.bit_sum import bit_sum
from graphs.compile_ban import compilation_allowed
from graphs.executor import BuildReport, Executor, make_executor
from graphs.generation import Order, hand_over
from graphs.parity import Difference, worst_difference
from graphs.steps import OnFailure


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
        adds: bool = True,
        on_capture_failure: OnFailure = "stop",
    ) -> None:
        """optimizer None: forward and backward only, no masters and moments. precision: bf16 | fp32 | fp8, of which evaluation
        knows the first two: fp8 is evaluated in bf16, as it is used. The rest is GenerationOptions' for the first generation.
        Raises ValueError where fp8 cannot be."""
        if precision == "fp8":
            check_fp8_sizes(config)
        dtype = compute_dtype(precision)
        grad_dtype = (
            torch.bfloat16
            if dtype == torch.bfloat16 and (optimizer is None or optimizer.grad_dtype == "bf16")
            else torch.float32
        )
        ops = select_ops(device, attention, precision)
        self.config, self.device, self.precision = config, device, precision
        self.params = ParamArena(config, device, dtype=dtype, grad_dtype=grad_dtype, trainable=optimizer is not None)
        self.embed_tokens = target.embed_tokens.to(device, dtype)
        same = target.lm_head.data_ptr() == target.embed_tokens.data_ptr()
        self.head = TargetHead(
            self.embed_tokens if same else target.lm_head.to(device, dtype),
            None if target.last_hidden_norm == "post" else target.norm.to(device, dtype),
            target.norm_eps,
        )
        self.metrics, self.eval_metrics = Metrics(config.block_size, device), Metrics(config.block_size, device)
        self.optimizer: AdamW | None = None
        if optimizer is not None:
            self.optimizer = AdamW(self.params, ops, optimizer)
        self._denominator = (
            self.optimizer.denominator if self.optimizer else torch.zeros((), dtype=torch.float64, device=device)
        )
        self._first = True
        self._read: torch.cuda.Event | None = None
        self._scalars = {
            name: torch.zeros((), dtype=torch.float32, device=device) for name in ("ce_weight", "kl_weight", "gamma")
        }
        self.write_objective(objective)
        self._coming: Generation | None = None
        self._twins: dict[Bucket, int] = {}
        self._current = self._assemble(
            GenerationOptions(
                _ascending(buckets),
                inputs,
                objective,
                attention,
                chunk_rows,
                recompute,
                eval_inputs,
                training,
                adds,
                on_capture_failure,
            ),
            make_executor(device),
            number=1,
        )

    @property
    def generation(self) -> int:
        """The number of the generation that steps are taken with, from 1 on; it counts the buffers' generations too."""
        return self._current.number

    @property
    def options(self) -> GenerationOptions:
        """What the current generation was made from."""
        return self._current.options

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The current generation's buckets, ascending in tokens."""
        return self._current.options.buckets

    @property
    def executor(self) -> Executor:
        """The current generation's steps."""
        return self._current.executor

    @property
    def drafter(self) -> Drafter:
        """The drafter of the current generation's training steps."""
        return self._current.drafter

    @property
    def parts(self) -> StepParts:
        """What the current generation's training steps touch."""
        return self._current.parts

    @property
    def ops(self) -> Ops:
        """The current generation's operations."""
        return self._current.ops

    @property
    def objective(self) -> Objective:
        """The current generation's loss, with the device values that all generations share."""
        return self._current.parts.objective

    def build(self, loads: Mapping[Bucket, Load] | None = None) -> list[BuildReport]:
        """Compiles and captures everything; parameters, optimizer state, counters and metrics stay as they are. Warm-up calls are
        made on inputs without content, and of buckets in `loads` on the batch that these put there: verify() on the same batch
        then compares with that call instead of running the eager steps again."""
        return self._build(self._current, loads)

    def regenerate(
        self,
        *,
        order: Order = "beside",
        check: Callable[[list[BuildReport]], object] | None = None,
        check_old: Callable[[list[BuildReport]], object] | None = None,
        **changes: Any,
    ) -> list[BuildReport]:
        """Between two optimizer steps: makes a new generation with `changes` to the current `options`, takes its steps from
        here on and closes the old one. Parameters, moments, device scalars and metrics stay, at their addresses; a step of the
        new generation must have inputs of its own. check: called with the reports and with the new generation in place, before
        the old one is gone; check_old: the same of the old one, where its graphs were freed and had to be made again. order:
        "beside" | "after" (graphs/generation.py).

        Raises whatever building or check raised, with the old generation in place and fit to run.
        """
        assert self._first, "a generation ends between two optimizer steps"
        if "buckets" in changes:
            changes["buckets"] = _ascending(changes["buckets"])
        old = self._current
        options = replace(old.options, **changes)
        executor = old.executor.successor()
        try:
            new = self._coming = self._assemble(options, executor, number=old.number + 1)
        except Exception:
            executor.close()
            old.executor.attach()
            raise

        def make(generation: Generation, check: Callable[[list[BuildReport]], object] | None) -> list[BuildReport]:
            reports = self._build(generation)
            self._current = generation
            if check is not None:
                with self.untouched():
                    check(reports)
            return reports

        reports: list[BuildReport] = []
        try:
            with compilation_allowed():
                hand_over(
                    old.executor,
                    new.executor,
                    order=order,
                    make=lambda: reports.extend(make(new, check)),
                    remake=lambda: make(old, check_old),
                )
        except Exception:
            self._current = old
            raise
        finally:
            self._coming = None
        self.write_objective(options.objective)
        return reports

    @property
    def between_steps(self) -> bool:
        """Whether no micro-batch was taken since the last update."""
        return self._first

    def attach(self) -> None:
        """From here on the calling thread takes the engine's steps: its current device and stream become the engine's."""
        self.executor.attach()

    def write_objective(self, settings: ObjectiveSettings) -> None:
        """ce_weight, kl_weight and gamma, on the stream: steps queued from here on read them, captured or not."""
        self._scalars["ce_weight"].fill_(settings.ce_weight)
        self._scalars["kl_weight"].fill_(settings.kl_weight)
        self._scalars["gamma"].fill_(settings.gamma_for(self.config.block_size))

    def micro_step(self, bucket: Bucket) -> None:
        """Forward and backward of what the bucket's inputs hold; gradients and metrics are added up, the gradients from the
        last update on."""
        assert self._first or self.options.adds, (
            "a second micro-batch of a step: the engine was built with adds = False"
        )
        self.executor.run(f"{'train' if self._first else 'add'} {bucket.name}")
        self._first = False

    def eval_step(self, bucket: Bucket) -> None:
        """Forward of what the bucket's inputs hold, into eval_metrics."""
        self.executor.run(f"eval {bucket.name}")

    def update(self, lr: float) -> None:
        """One optimizer step from the gradients added up since the last one. lr is written on the stream: no wait."""
        assert self.optimizer is not None, "the engine was built without an optimizer"
        self._wait_until_read()
        self.optimizer.lr.fill_(lr)
        self.executor.run("update")
        self._first = True

    def hold_update(self, read: torch.cuda.Event) -> None:
        """The next update begins, on the device, only after this event: somebody is reading masters and moments until then."""
        self._read = read

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

    def verify(self, bucket: Bucket, *, held_out: bool = False) -> Difference | None:
        """Replays the bucket's steps, the first of an update and the one that adds, on what its inputs hold and compares with
        the eager twins: every gradient, the steps' weight and all metrics. held_out: the evaluation's step on its own inputs
        instead, and its loss and counts. None when bit-equal. Forgets gradients and metrics."""
        twin = self._twins.pop(bucket, None) if not held_out else None
        if twin is not None:
            self._take(self.executor.run, bucket)
            same = self._bits(self.options.inputs, bucket) == twin
            self.zero_()
            if same:
                return None
        return self._difference(bucket, self.executor.run, self.executor.call, held_out=held_out)

    def noise(self, bucket: Bucket, *, held_out: bool = False) -> Difference | None:
        """As verify, of two eager steps: None where every kernel is deterministic."""
        return self._difference(bucket, self.executor.call, self.executor.call, held_out=held_out)

    def verify_rows(self, bucket: Bucket, rows: int, *, held_out: bool = False) -> Difference | None:
        """As verify, of gradients and loss, with an eager step that has the first `rows` rows alone. The replay's others are
        emptied in the inputs: the same sums, added up in another order."""
        provide = self.options.eval_inputs if held_out else self.options.inputs
        assert provide is not None, "the engine was built without held-out inputs"
        for tensor in provide(bucket).values():
            tensor[rows:].zero_()
        few = {name: tensor[:rows] for name, tensor in provide(bucket).items()}

        def eager(name: str) -> None:
            if held_out:
                forward_only(self._current.evaluated, few, self.eval_metrics)
            else:
                forward_backward(self.parts, few, self._denominator, first=name.startswith("train "))

        return self._difference(bucket, self.executor.run, eager, whole=False, held_out=held_out)

    def verify_inputs(self, bucket: Bucket, change: Callable[[], object]) -> Difference | None:
        """As verify, of the bucket's steps before and after `change` wrote into the inputs, both taken the fastest way."""
        expected = self._outcome(self.executor.run, bucket, whole=True)
        change()
        found = self._outcome(self.executor.run, bucket, whole=True)
        self.zero_()
        return worst_difference(found, expected)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Whatever steps without weight change inside is put back: metrics and the update's counters. Gradients are forgotten."""
        metrics = [tensor for m in (self.metrics, self.eval_metrics) for tensor in m.tensors()]
        scalars = list(self.optimizer.scalars().values()) if self.optimizer is not None else [self._denominator]
        kept = [(tensor, tensor.clone()) for tensor in metrics + scalars]
        try:
            yield
        finally:
            for tensor, value in kept:
                tensor.copy_(value)
            self.params.grad.zero_()
            self._first = True

    def close(self) -> None:
        """Frees all graphs; the engine takes no step after it."""
        if self._coming is not None:
            self._coming.executor.close()
        self.executor.close()

    def _assemble(self, options: GenerationOptions, executor: Executor, number: int) -> Generation:
        lasting = Lasting(
            self.config,
            self.device,
            self.precision,
            self.params,
            self.embed_tokens,
            self.head,
            self.metrics,
            self.eval_metrics,
            self.optimizer,
            self._denominator,
            self._scalars,
        )
        return assemble(lasting, options, executor, number)

    def _wait_until_read(self) -> None:
        if self._read is not None:
            torch.cuda.current_stream(self.device).wait_event(self._read)  # the host goes on
            self._read = None

    def _build(self, generation: Generation, loads: Mapping[Bucket, Load] | None = None) -> list[BuildReport]:
        self._wait_until_read()  # an update is among the steps that are warmed up
        with self.untouched():
            calls = FirstCalls(
                generation.options,
                loads or {},
                forget=self.zero_,
                bits=partial(self._bits, generation.options.inputs),
            )
            reports = generation.executor.build(before=calls.before, after=calls.after)
        self._twins = calls.twins
        generation.executor.times.clear()
        return reports

    def _difference(
        self,
        bucket: Bucket,
        run: Callable[[str], None],
        twin: Callable[[str], None],
        *,
        whole: bool = True,
        held_out: bool = False,
    ) -> Difference | None:
        """Of the bucket's steps, the first of an update and the one that adds, or of its evaluation, run in one way and in the
        other. whole: metrics beside the loss too. Forgets gradients and metrics."""
        outcome = self._held_out_outcome if held_out else self._outcome
        expected, found = (outcome(way, bucket, whole=whole) for way in (twin, run))
        self.zero_()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the eager twin's memory lies outside the graphs' pool
        return worst_difference(found, expected)

    def _outcome(self, run: Callable[[str], None], bucket: Bucket, *, whole: bool) -> dict[str, Tensor]:
        self._take(run, bucket)
        sums = {"loss": self.metrics.sums[0], "denominator": self._denominator}
        if whole:
            sums |= {"metrics": self.metrics.sums, "slots": self.metrics.slots}
        return {name: tensor.clone() for name, tensor in (self.gradients() | sums).items()}

    def _take(self, run: Callable[[str], None], bucket: Bucket) -> None:
        """The bucket's training steps, from nothing."""
        self.zero_()
        for kind in self.options.kinds:
            run(f"{kind} {bucket.name}")

    def _bits(self, inputs: Inputs, bucket: Bucket) -> int:
        """Of what the bucket's inputs hold and of all that its training steps write."""
        return bit_sum([*inputs(bucket).values(), self.params.grad, self._denominator, *self.metrics.tensors()])

    def _held_out_outcome(self, run: Callable[[str], None], bucket: Bucket, *, whole: bool) -> dict[str, Tensor]:
        self.zero_()
        run(f"eval {bucket.name}")
        metrics = self.eval_metrics
        sums = {"held-out loss": metrics.sums[0]}
        if whole:
            counts = (metrics.sums, metrics.slots, metrics.blocks_by_accepted)
            sums |= dict(zip(("held-out metrics", "held-out slots", "held-out accepted"), counts, strict=True))
        return {name: tensor.clone() for name, tensor in sums.items()}


def _ascending(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    return tuple(sorted(buckets, key=lambda bucket: bucket.tokens))
