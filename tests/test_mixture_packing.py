"""Documents of several trainers' folders in one row: nothing of what is learnt from them changes."""

from pathlib import Path

import pytest
import torch

from buffers.mixture import Mixture
from buffers.staging import InputPipeline
from engine.assemble import drafter_config, frozen_target, make_batch_plan, make_plan
from engine.data_source import open_training_data
from engine.settings import load_settings
from tests.drafter_helpers import CPU, assert_close, cloned, make_step, objective
from tests.foreign_helpers import FIXTURES, MASK, write_ours, write_target
from tests.run_helpers import SETTINGS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("changes", [(), ("data.too_long=split", "buckets.max_length=24")])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_of_ours_and_two_other_formats_is_the_same_packed_or_not(
    target: Path, tmp_path: Path, epoch: int, changes: tuple[str, ...]
) -> None:
    """Through settings, plan, loader and step: documents of any source share a row, and each has its own blocks."""
    folders = (write_ours(tmp_path / "ours", target), FIXTURES / "specforge", FIXTURES / "deepspec")
    found = []
    for packing in ("false", "true"):
        said = (f"data.target={target}", "data.target_layer_ids=1,2,3", f"data.mask_token_id={MASK}")
        packed_so = ("data.weights=1,1.5,0.3", "buckets.lengths=", f"buckets.packing={packing}")
        settings = load_settings(None, [*SETTINGS, *said, *packed_so, *changes], folders=folders)
        dataset = open_training_data(settings.data.folders, settings)
        assert isinstance(dataset, Mixture)
        config = drafter_config(settings, dataset.info)
        buckets = make_plan(settings, dataset, config, CPU).buckets
        step = make_step(config, frozen_target(settings, dataset), objective("decay"), max_positions=512)
        batches = make_batch_plan(settings, dataset, buckets).epoch(epoch)
        with InputPipeline(dataset, buckets, seed=0, device=CPU, dtype=torch.float32) as inputs:
            loaded = []
            for batch in batches:
                inputs.load(batch)
                loaded.append(cloned(inputs.inputs(batch.bucket)))
        outcome = step.outcome(*loaded)
        outcome["metrics"] = outcome["metrics"][:-3]  # slot_tokens and the counts of batches
        rows = [[dataset.origin(document.sample_id) for document in row] for batch in batches for row in batch.rows]
        found.append((rows, outcome))
    (rows, alone), (packed_rows, packed) = found
    assert len(packed_rows) < len(rows) == sum(map(len, packed_rows))
    assert any(len({folder for folder, _ in row}) > 1 for row in packed_rows)
    assert_close(packed, alone, 5e-6)
