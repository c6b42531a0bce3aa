"""One start of a training run, up to its first step, in a process of its own: `python -m bench.start_once CONFIG SPAWNED`.

SPAWNED is time.monotonic() of whoever spawned it. The last line of stdout is JSON: seconds by phase, from there to here.
"""

from __future__ import annotations

import json
import sys
import time

# What takes seconds to load and only flex attention needs, or nothing of a start does.
HEAVY = ("torch._dynamo", "torch._inductor.compile_fx", "sympy", "transformers", "matplotlib")


def main(config: str, spawned: float) -> None:
    """Starts the run of the settings in `config` and prints where the seconds went."""
    from engine.run import TrainingRun
    from engine.settings import load_settings
    from graphs.guards import kernels_compiled

    imported = time.monotonic()
    with TrainingRun(load_settings(config), resume=False) as run:
        ready = time.monotonic()
        phases = {"import": imported - spawned, **run.laps.seconds}
        figures = {
            "seconds": ready - spawned,
            "phases": phases,
            "buckets": [bucket.name for bucket in run.engine.buckets],
            "attention": run.engine.ops.name,
            "kernels_compiled": kernels_compiled(),
            "loaded": [name for name in HEAVY if name in sys.modules],
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
