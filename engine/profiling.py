"""A window of steps as a Chrome trace, each step, bucket and phase a range with its name: for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from buffers.stages import ranges_in_profiles
from engine.settings_fields import SettingsError

WARM_UP = 5
STEPS = 8


class StepProfile:
    """Records `steps` optimizer steps after `warm_up` others and writes the trace. Close it: what an interrupted run has recorded
    is written too. Recording slows the steps down: what is read off is order and shares, not the speed."""

    def __init__(self, path: Path, say: Callable[[str], None], *, warm_up: int = WARM_UP, steps: int = STEPS) -> None:
        """path: ends in .json or .json.gz. Raises SettingsError for another name and for a folder that does not exist."""
        if not path.name.endswith((".json", ".json.gz")) or not path.absolute().parent.is_dir():
            raise SettingsError(
                f"--profile {path}: expected a file ending in .json or .json.gz in a folder that exists, found another; name one"
            )
        self._path, self._say = path, say
        self._warm_up, self._steps = warm_up, steps
        self._seen = 0
        self._recording: ExitStack | None = None
        self._profile: profile | None = None
        self._closed = False

    @contextmanager
    def step(self, number: int, left: int) -> Iterator[None]:
        """Around the whole of a step, which will be that of this number; `left` steps are left with it. A run too short for the
        warm-up is recorded at its end."""
        due = self._seen >= self._warm_up or left <= self._steps
        if self._profile is None and due and not self._closed:
            self._begin()
        if self._recording is None or self._closed:
            self._seen += 1
            yield
            return
        self._steps -= 1
        with record_function(f"step {number}"):
            yield
        if not self._steps or left == 1:
            self.close()

    def close(self) -> None:
        """Writes the trace of what was recorded, once; says so, or that nothing was."""
        if self._closed:
            return
        self._closed = True
        if self._profile is None or self._recording is None:
            self._say(f"no step was recorded for {self._path}: the run ended before its window")
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # or the replays in the queue would be missing
        self._recording.close()
        self._profile.export_chrome_trace(str(self._path))
        self._say(f"trace written: {self._path}; open it in https://ui.perfetto.dev or chrome://tracing")

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (torch.cuda.is_initialized())
        self._profile = profile(activities=activities, experimental_config=_all_threads())
        with ExitStack() as recording:
            recording.enter_context(ranges_in_profiles())
            recording.enter_context(self._profile)
            self._recording = recording.pop_all()


def _all_threads() -> torch._C._profiler._ExperimentalConfig | None:
    """The loader's ranges too, where torch can: otherwise it records the calling thread."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None
