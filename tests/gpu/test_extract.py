"""`data extract` on a device: copies to the host that run beside later batches hold what the CPU computes."""

from pathlib import Path

import torch

from buffers.dataset import Dataset
from engine.extract_options import ExtractOptions
from engine.hf_extract import extract_dataset
from tests.hf_helpers import id_records, save_model, write_jsonl


def test_states_are_those_of_the_cpu(tmp_path: Path) -> None:
    target = save_model(tmp_path / "target")
    data = write_jsonl(tmp_path / "data.jsonl", id_records(300))
    found = []
    for device in ("cpu", "cuda"):
        extract_dataset(
            ExtractOptions(
                target=str(target),
                data=data,
                out=tmp_path / device,
                layers=(1, 4, 5),
                mask_token_id=95,
                device=device,
                dtype="fp32",
                # Many batches of one shape use the same pinned memory, one behind the other.
                token_budget=200,
                shard_tokens=4000,
            )
        )
        found.append(Dataset(tmp_path / device))
    cpu, cuda = found
    assert len(cpu) == len(cuda) == 300
    for i in range(300):
        one, other = cpu.sample(i), cuda.sample(i)
        assert torch.equal(one.input_ids, other.input_ids)
        torch.testing.assert_close(one.hidden_states, other.hidden_states, rtol=2**-7, atol=1e-3)
        assert one.last_hidden is not None and other.last_hidden is not None
        torch.testing.assert_close(one.last_hidden, other.last_hidden, rtol=2**-7, atol=1e-3)
