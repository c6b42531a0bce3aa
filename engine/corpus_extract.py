"""Hidden states of the embedded target over text documents, written as our dataset: what the demo trains on.

Documents are cut into chunks of random length, chosen by the seed alone. Chunks of like length run together; what pads
a batch stands behind the text, where a causal model cannot see it.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from buffers.dataset import DatasetInfo, DatasetWriter
from engine.bytes_vocab import MASK_TOKEN_ID, encode_document
from engine.corpus import read_documents
from engine.length_batches import batches_of_like_length
from engine.target import Target


def cut_documents(
    documents: Sequence[Tensor], *, min_length: int = 64, max_length: int = 512, seed: int = 0, max_tokens: int = 0
) -> list[Tensor]:
    """Cut token documents int[T] into chunks of log-uniform length in [min_length, max_length], in random order.

    A document's rest shorter than `min_length` is left out. With `max_tokens` the chunks end where their sum would pass
    it; the order being random, they come from all over the documents. Raises ValueError when no chunk results.
    """
    if not 2 <= min_length <= max_length:
        raise ValueError(
            f"chunks: expected 2 <= min_length <= max_length, found {min_length}, {max_length}. Correct them."
        )
    random = np.random.Generator(np.random.Philox(seed))
    chunks: list[Tensor] = []
    for document in documents:
        start = 0
        while len(document) - start >= min_length:
            length = round(math.exp(random.uniform(math.log(min_length), math.log(max_length))))
            chunks.append(document[start : start + length])
            start += length
    chunks = [chunks[i] for i in random.permutation(len(chunks))]
    if max_tokens:
        totals = np.cumsum([len(chunk) for chunk in chunks])
        chunks = chunks[: int(np.searchsorted(totals, max_tokens, side="right"))]
    if not chunks:
        raise ValueError(
            f"chunks: expected a document of {min_length} tokens or more and a max_tokens that holds a chunk, found "
            "none. "
            "Give longer documents, a smaller min_length or a larger max_tokens."
        )
    return chunks


@torch.inference_mode()
def write_chunks(
    target: Target, chunks: Sequence[Tensor], writer: DatasetWriter, target_layer_ids: Sequence[int], batch_tokens: int
) -> None:
    """Run the target over the chunks and add each as a sample: every token supervised, `last_hidden` pre-norm."""
    for indices, width in batches_of_like_length([len(chunk) for chunk in chunks], batch_tokens, step=1):
        batch = [chunks[i] for i in indices]
        padded = torch.zeros((len(batch), width), dtype=torch.int64)
        for row, chunk in zip(padded, batch, strict=True):
            row[: len(chunk)] = chunk
        output = target(padded.to(target.device), tap_layer_ids=target_layer_ids)
        taps, last = output.taps.cpu(), output.last_hidden.cpu()
        for row, chunk in enumerate(batch):
            length = len(chunk)
            writer.add(chunk, torch.ones(length, dtype=torch.uint8), taps[row, :length], last[row, :length])


def extract_corpus(
    target: Target,
    files: Sequence[Path],
    out_dir: str | Path,
    *,
    target_layer_ids: Sequence[int],
    target_name: str = "embedded",
    min_length: int = 64,
    max_length: int = 512,
    max_tokens: int = 0,
    batch_tokens: int = 8192,
    seed: int = 0,
) -> DatasetInfo:
    """Write the dataset of byte documents `files` to `out_dir`, the target's tensors included.

    A document is bos and the file's bytes; a chunk from inside a file has no bos, as in the target's training.
    Raises ValueError for a folder that already holds a dataset, missing layers, or when no chunk is long enough.
    """
    documents = [encode_document(text) for text in read_documents(list(files))]
    chunks = cut_documents(documents, min_length=min_length, max_length=max_length, seed=seed, max_tokens=max_tokens)
    writer = DatasetWriter(
        out_dir,
        target_name=target_name,
        target_config=target.config.to_json(),
        hidden_size=target.config.hidden_size,
        target_layer_ids=target_layer_ids,
        vocab_size=target.config.vocab_size,
        mask_token_id=MASK_TOKEN_ID,
        last_hidden_norm="pre",
    )
    head = None if target.config.tie_word_embeddings else target.head_weight
    writer.write_target(target.model.embed_tokens.weight, head, target.model.norm.weight)
    write_chunks(target, chunks, writer, target_layer_ids, batch_tokens)
    return writer.close()
