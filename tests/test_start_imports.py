"""What a training run loads: what only other commands need stays unloaded, for every start would pay for it."""

import json
import subprocess
import sys
from pathlib import Path

from tests.run_helpers import run_settings, training_dataset

NOT_FOR_TRAINING = (
    "matplotlib",
    "pyarrow",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
    "wandb",
)
SCRIPT = """
import json, sys
from engine.settings import load_settings
from engine.train import train
train(load_settings(sys.argv[1]), quiet=True)
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""


def test_training_loads_nothing_that_only_others_need(tmp_path: Path) -> None:
    data, config = training_dataset(tmp_path / "data"), tmp_path / "run.toml"
    config.write_text(run_settings(data, tmp_path / "run", "run.max_steps=2").to_toml())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(config), *NOT_FOR_TRAINING], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
