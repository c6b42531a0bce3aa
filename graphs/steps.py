"""Named steps, what building them reports, and the executor that calls them: what runs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from buffers.stages import stage
from graphs.timing import StepTimes

Step = Callable[[], object]
Named = Callable[[str], object]


def nothing(name: str) -> None:
    """Of a step that nobody wants to know about."""


def step_named(steps: Mapping[str, Step], name: str) -> Step:
    """Raises ValueError where there is none of that name."""
    if name not in steps:
        raise ValueError(
            f"expected one of the generation's steps ({', '.join(steps) or 'none: it is closed'}), found {name}; take the bucket "
            "of a batch of this generation's plan"
        )
    return steps[name]


OnFailure = Literal["stop", "eager"]


@dataclass(frozen=True)
class BuildReport:
    """What building one step took. pool_mib: growth of the memory that torch holds on the device, by this capture; exec_mib:
    what the device has less of for the executable graph, which torch does not see; nodes: kernels in it, None where nobody
    counted. why: the reason that a step is called where others are replayed."""

    name: str
    how: str  # "replayed" | "called"
    warm_up_s: float
    capture_s: float
    pool_mib: float
    exec_mib: float = 0.0
    nodes: int | None = None
    why: str = ""


class CallExecutor:
    """Calls the steps: what runs where there is no GPU. No stream, no pool, no addresses to keep."""

    how = "called"

    def __init__(self) -> None:
        self.times = StepTimes(None)
        self.on_failure: OnFailure = "stop"
        self.pool_fill: int | None = None  # for the pool, which there is none of
        self.filled_mib = 0.0
        self._steps: dict[str, Step] = {}

    def add(self, name: str, step: Step, *, group: str = "") -> None:
        """Registers a step without arguments and with effects on fixed memory only."""
        assert name not in self._steps, f"step {name} was added twice"
        self._steps[name] = step

    def build(self, *, before: Named = nothing, after: Named = nothing) -> list[BuildReport]:
        """Nothing to call or to capture; steps may run from here on."""
        return [BuildReport(name, self.how, 0.0, 0.0, 0.0) for name in self._steps]

    def run(self, name: str) -> None:
        """The step's effects, by the fastest way there is."""
        with stage("call", name), self.times.measure(name):
            step_named(self._steps, name)()

    def call(self, name: str) -> None:
        """The step called from Python, whatever was captured."""
        step_named(self._steps, name)()

    def how_of(self, name: str) -> str:
        """What run() does with this step."""
        return self.how

    def call_instead(self, name: str, why: str) -> None:
        """Nothing: every step is called already."""

    def successor(self) -> CallExecutor:
        """An empty executor for the next generation."""
        return CallExecutor()

    def attach(self) -> None:
        """Nothing: the CPU has no streams."""

    def release(self) -> None:
        """Nothing to free: there is no graph."""

    def close(self) -> None:
        """Forgets the steps."""
        self._steps.clear()
