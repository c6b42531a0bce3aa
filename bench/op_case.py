"""One operation to be measured: how its inputs are drawn, every way of computing it, and how much work that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.ops.weight import Weight

Results = dict[str, Tensor]
# Half a unit in the last place of bf16, and two of fp32: what any result may be off by.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-22}


@dataclass(frozen=True)
class Data:
    """leaves: activations; weights with room for their gradients; gradients: of the outputs; extra: what else is needed."""

    leaves: Mapping[str, Tensor]
    weights: Mapping[str, Weight] = field(default_factory=dict)
    gradients: tuple[Tensor, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    def to(self, dtype: torch.dtype) -> Data:
        """The same numbers in another precision, in memory of its own; what was made for this one's calls is left behind."""
        extra = {
            name: value.to(dtype, copy=True) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.extra.items()
            if not name.startswith("made ")
        }
        return Data(
            {name: x.detach().to(dtype, copy=True) for name, x in self.leaves.items()},
            {name: fresh(w.value.detach().to(dtype, copy=True)) for name, w in self.weights.items()},
            tuple(gradient.to(dtype, copy=True) for gradient in self.gradients),
            extra,
        )

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What a call prepares before it is timed, kept for the next one."""
        key = f"made {name}"
        if key not in self.extra:
            self.extra[key] = make()
        return self.extra[key]


@dataclass(frozen=True)
class Call:
    """run forms outputs and gradients, as training does; forward, where it can be told apart, the outputs alone."""

    run: Callable[[Data], Results]
    forward: Callable[[Data], object] | None = None


@dataclass(frozen=True)
class Case:
    """make(rows, dtype, device) draws inputs of so many rows; the workload has `rows`, errors are measured on check_rows.

    calls: by name, the first of "ours" and "reference" is what the others are set against. work: operations (unit TFLOP/s) or
    bytes (GB/s) of a run on all rows.
    """

    op: str
    rows: int
    shape: str
    make: Callable[[int, torch.dtype, torch.device], Data]
    calls: Mapping[str, Call]
    work: float
    unit: str
    check_rows: int = 256

    def rate(self, ms: float) -> float:
        """Work over time, in `unit`."""
        return self.work / ms / (1e9 if self.unit == "TFLOP/s" else 1e6)


def differentiable(op: Callable[[Data], Any]) -> Call:
    """The outputs of op and all gradients, as of a step's first micro-batch; those of weights from the arena where the op puts
    them there itself."""

    def forward(data: Data) -> tuple[Tensor, ...]:
        outputs = op(data)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def run(data: Data) -> Results:
        for weight in data.weights.values():
            weight.sums.begin(first=True)
        outputs = forward(data)
        values = [*data.leaves.values(), *(weight.value for weight in data.weights.values())]
        found = torch.autograd.grad(outputs, values, data.gradients, allow_unused=True)
        arena = [None] * len(data.leaves) + [weight.grad for weight in data.weights.values()]
        results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
        for name, gradient, added in zip([*data.leaves, *data.weights], found, arena, strict=True):
            taken = added if gradient is None else gradient
            assert taken is not None, f"no gradient of {name}"
            results[f"d{name}"] = taken
        return results

    return Call(run, forward)


def fresh(value: Tensor) -> Weight:
    """A weight without gradient so far."""
    return Weight(value.requires_grad_(), torch.zeros_like(value))


class Draw:
    """Normal numbers of one dtype, seed 0."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.generator, self._dtype, self._device = torch.Generator(device).manual_seed(0), dtype, device

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device, generator=self.generator).to(self._dtype)


def errors(found: Results, exact: Results) -> dict[str, float]:
    """Relative error in the norm of each result."""
    assert found.keys() == exact.keys(), f"{sorted(found)} against {sorted(exact)}"
    return {
        name: ((found[name].double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)).item()
        for name, wanted in exact.items()
    }
