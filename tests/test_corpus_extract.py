"""Extraction: chunks by the seed alone, and hidden states that do not depend on what they were batched with."""

from pathlib import Path

import pytest
import torch

from buffers.dataset import Dataset, load_target_tensors
from engine.bytes_vocab import BOS_TOKEN_ID, MASK_TOKEN_ID, VOCAB_SIZE, decode_bytes, encode_document
from engine.corpus_extract import cut_documents, extract_corpus
from engine.target import Target
from engine.target_config import TargetConfig


def byte_target(tied: bool = True) -> Target:
    return Target(
        TargetConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=tied,
        )
    )


def files(folder: Path) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{i}.py" for i in range(6)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes((i * 37 + j * 11) % 256 for j in range(150 * i + 10)))
    return paths


@pytest.mark.parametrize("tied", [True, False])
def test_samples_hold_the_targets_states(tied: bool, tmp_path: Path) -> None:
    target = byte_target(tied).requires_grad_(False)
    info = extract_corpus(
        target, files(tmp_path / "text"), tmp_path / "data", target_layer_ids=(0, 2), min_length=20, max_length=90
    )
    dataset = Dataset(tmp_path / "data")
    assert len(dataset) == info.num_samples > 10 and dataset.info.last_hidden_norm == "pre"
    assert dataset.info.mask_token_id == MASK_TOKEN_ID and dataset.info.target_layer_ids == (0, 2)
    assert TargetConfig.from_json(dataset.info.target_config) == target.config
    assert int(dataset.lengths.min()) >= 2 and int(dataset.lengths.max()) <= 90 and len(set(dataset.lengths)) > 5
    text = b"".join(path.read_bytes() for path in (tmp_path / "text").iterdir())
    for i in range(len(dataset)):
        sample = dataset.sample(i)
        assert sample.loss_mask.min() == 1
        assert decode_bytes(sample.input_ids.tolist()) in text
        alone = target(sample.input_ids[None].long(), tap_layer_ids=(0, 2))
        torch.testing.assert_close(sample.hidden_states.float(), alone.taps[0], rtol=1e-2, atol=1e-2)
        assert sample.last_hidden is not None
        torch.testing.assert_close(sample.last_hidden.float(), alone.last_hidden[0], rtol=1e-2, atol=1e-2)
    frozen = load_target_tensors(tmp_path / "data")
    assert torch.equal(frozen["lm_head.weight"], target.head_weight)
    assert torch.equal(frozen["norm.weight"], target.model.norm.weight)


def test_chunks_follow_the_seed_and_cover_the_documents() -> None:
    documents = [encode_document(bytes(range(256)) * 4), encode_document(b"short")]
    chunks = cut_documents(documents, min_length=16, max_length=200, seed=3)
    again = cut_documents(documents, min_length=16, max_length=200, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(chunks, again, strict=True))
    other = cut_documents(documents, min_length=16, max_length=200, seed=4)
    assert [len(c) for c in chunks] != [len(c) for c in other]
    assert 1025 - 16 < sum(map(len, chunks)) <= 1025 and all(len(c) <= 200 for c in chunks)
    assert sum(int((c == BOS_TOKEN_ID).sum()) for c in chunks) == 1
    limited = cut_documents(documents, min_length=16, max_length=200, seed=3, max_tokens=500)
    assert len(limited) < len(chunks) and sum(map(len, limited)) <= 500
    assert all(torch.equal(a, b) for a, b in zip(limited, chunks[: len(limited)], strict=True))


def test_messages(tmp_path: Path) -> None:
    document = encode_document(b"x" * 30)
    with pytest.raises(ValueError, match="chunks: expected 2 <= min_length <= max_length, found 9, 8"):
        cut_documents([document], min_length=9, max_length=8)
    with pytest.raises(ValueError, match="chunks: expected a document of 64 tokens or more .* found none"):
        cut_documents([document])
    with pytest.raises(ValueError, match="max_tokens that holds a chunk, found none"):
        cut_documents([document], min_length=20, max_length=20, max_tokens=10)
    with pytest.raises(ValueError, match=r"expected target_layer_ids in 0\.\.3 .*, found \[1, 7\]"):
        extract_corpus(
            byte_target(), files(tmp_path / "text"), tmp_path / "data", target_layer_ids=(1, 7), max_length=90
        )
    assert not (tmp_path / "data" / "dataset.json").exists()
