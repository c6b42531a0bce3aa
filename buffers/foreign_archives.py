"""SpecForge's and Model-Optimizer's datasets: one torch.save dictionary a sample, told apart by their keys.

SpecForge (`rows_a-b/data_i.ckpt`, also gzipped): input_ids, loss_mask, hidden_states [T, L*D]; its DSpark adds
target_last_hidden_states [T, D] after the final norm; other DSpark writers call the taps target_hidden_states.
Model-Optimizer (`<conversation_id>.pt`): input_ids, loss_mask, aux_hidden_states [T, L*D], and hidden_states [T, D], the last
layer's; its dumps through transformers have it after the final norm, those through vLLM before, and no file says which.
Every tensor may have a leading axis of 1.
"""

from pathlib import Path
from typing import Any

from buffers.raw_sample import RawSample, raw_sample
from buffers.torch_archive import load_archive

SPECFORGE, MODELOPT = "SpecForge", "Model-Optimizer"


class ArchiveReader:
    """Samples of the files `names` below `root`, in this order."""

    # What the hidden states of the folder are like is known once its files are read.
    target_layer_ids: tuple[int, ...] = ()
    hidden_size = 0
    target_name = ""

    def __init__(self, root: Path, names: list[str], stamps: list[str]) -> None:
        self.root, self.names, self.stamps = root, names, stamps

    def read(self, index: int) -> tuple[RawSample, str]:
        """The sample and its format's name. Raises ValueError without the file's name, and OSError."""
        return parse(load_archive(self.root / self.names[index]))


def parse(values: dict[str, Any]) -> tuple[RawSample, str]:
    """A sample from the dictionary of a file, and the name of the format that its keys are of. Raises ValueError."""
    if "aux_hidden_state" in values:
        raise ValueError(
            "expected hidden states for DFlash, found EAGLE3's keys (hidden_state, aux_hidden_state). Prepare them again with "
            "the DFlash or DSpark strategy"
        )
    if "aux_hidden_states" in values:
        keys = {"hidden": "aux_hidden_states", "last": "hidden_states"}
        return raw_sample(values, ids="input_ids", mask="loss_mask", **keys), MODELOPT
    hidden = "target_hidden_states" if "target_hidden_states" in values else "hidden_states"
    last = "target_last_hidden_states"
    return raw_sample(values, ids="input_ids", mask="loss_mask", hidden=hidden, last=last), SPECFORGE
