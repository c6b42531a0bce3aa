"""From a batch's samples to the bytes of its bucket's input buffers.

`fill_row` and `clear_row` write every byte of a row, padding included, so nothing that a buffer held before can reach the
step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from buffers.anchors import eligible_positions, sample_anchors
from buffers.arena import BufferSpec
from buffers.dataset import Sample
from buffers.shapes import Bucket


class NonFiniteSample(ValueError):
    """A sample's hidden states hold NaN or infinity. `sample_id` names it, `place` is where it would lie among the
    documents of its row."""

    def __init__(self, sample: Sample, tensor: str, place: int = 0) -> None:
        super().__init__(
            f"expected finite {tensor}, found NaN or infinity in sample {sample.name}. "
            "Extract it again, or set on_nonfinite to skip to train without it."
        )
        self.sample_id, self.place = sample.sample_id, place


def batch_specs(
    bucket: Bucket, *, num_taps: int, hidden_size: int, dtype: torch.dtype, with_last_hidden: bool
) -> tuple[BufferSpec, ...]:
    """The input buffers of a bucket's step, in the order in which they are packed.

    L = num_taps, D = hidden_size; the hidden states have `dtype`, the rest is int32 and uint8.
    """
    B, S, N = bucket.B, bucket.S, bucket.N
    hidden = [BufferSpec("target_hidden", (B, S, num_taps * hidden_size), dtype)]
    if with_last_hidden:
        hidden.append(BufferSpec("last_hidden", (B, S, hidden_size), dtype))
    return (
        *hidden,
        BufferSpec("input_ids", (B, S), torch.int32),
        BufferSpec("position_ids", (B, S), torch.int32),
        BufferSpec("loss_mask", (B, S), torch.uint8),
        BufferSpec("row_lengths", (B,), torch.int32),
        BufferSpec("anchor_positions", (B, N), torch.int32),
        BufferSpec("block_keep_mask", (B, N), torch.uint8),
        BufferSpec("context_start", (B, N), torch.int32),
        BufferSpec("context_end", (B, N), torch.int32),
    )


def fill_row(
    buffers: Mapping[str, Tensor],
    b: int,
    samples: Sequence[Sample],
    *,
    bucket: Bucket,
    seed: int,
    epoch: int,
    pieces: Sequence[int] = (),
    max_blocks: Sequence[int] = (),
) -> None:
    """Write documents and their anchors one after the other into row b of host buffers laid out by `batch_specs`, and zero
    the row's padding. `pieces` and `max_blocks`: those of `Document`, for each sample; empty means 0 for all.

    A document's positions start at 0 and its blocks are bounded by it; its anchors are those it would have alone in a row
    of max_blocks. Hidden states that were read into their place stay there. Raises NonFiniteSample, with nothing written, when
    hidden states hold NaN or infinity; ValueError when the documents are more than the row holds or their tensors do not fit
    the buffers.
    """
    wanted = ["target_hidden", "input_ids", "loss_mask"] + ["last_hidden"] * ("last_hidden" in buffers)
    length = sum(len(sample.input_ids) for sample in samples)
    if length > bucket.S:
        named = ", ".join(sample.name for sample in samples)
        raise ValueError(
            f"expected at most {bucket.S} tokens for bucket {bucket.name}, found {length} in sample "
            f"{named}. Skip, truncate or split it, or plan a larger bucket."
        )
    sources = [_tensors_of(sample, place, wanted, buffers) for place, sample in enumerate(samples)]
    start, used = 0, 0
    anchor_positions, block_keep_mask = np.zeros((2, bucket.N), dtype=np.int32)
    context_start, context_end = np.zeros((2, bucket.N), dtype=np.int32)
    positions = buffers["position_ids"][b]
    for index, sample in enumerate(samples):
        stop = start + len(sample.input_ids)
        for name, source in sources[index].items():
            place = buffers[name][b, start:stop]
            if source.data_ptr() != place.data_ptr():  # else it was read there
                place.copy_(source)
        torch.arange(stop - start, dtype=positions.dtype, out=positions[start:stop])
        anchors, keep = sample_anchors(
            eligible_positions(sample.loss_mask.numpy()),
            (max_blocks[index] if max_blocks else 0) or bucket.N,
            seed=seed,
            epoch=epoch,
            sample_id=sample.sample_id,
            piece=pieces[index] if pieces else 0,
        )
        anchors = anchors[keep > 0]
        blocks = slice(used, used + len(anchors))
        if blocks.stop > bucket.N:
            raise ValueError(
                f"expected at most {bucket.N} blocks for bucket {bucket.name}, found {blocks.stop} up to sample "
                f"{sample.name}. Lower max_blocks, or put fewer documents into the row."
            )
        # Documents lie in ascending order, so the row's anchors ascend too.
        anchor_positions[blocks], block_keep_mask[blocks] = anchors + start, 1
        context_start[blocks], context_end[blocks] = start, stop
        start, used = stop, blocks.stop
    for name in (*wanted, "position_ids"):
        buffers[name][b, length:].zero_()
    buffers["row_lengths"][b] = length
    buffers["anchor_positions"][b].copy_(torch.from_numpy(anchor_positions))
    buffers["block_keep_mask"][b].copy_(torch.from_numpy(block_keep_mask))
    buffers["context_start"][b].copy_(torch.from_numpy(context_start))
    buffers["context_end"][b].copy_(torch.from_numpy(context_end))


def _tensors_of(sample: Sample, place: int, wanted: Sequence[str], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sample's tensors by buffer, shapes and numbers checked."""
    if "last_hidden" in wanted and sample.last_hidden is None:
        raise ValueError(
            f"expected last_hidden in sample {sample.name}, found none. "
            "Extract the dataset with the last hidden state, or train without soft labels."
        )
    found = {
        "target_hidden": sample.hidden_states,
        "input_ids": sample.input_ids,
        "loss_mask": sample.loss_mask,
        "last_hidden": sample.last_hidden,
    }
    sources = {name: source for name in wanted if (source := found[name]) is not None}
    for name, source in sources.items():
        # copy_ broadcasts: a wrong shape would be spread over the row without a word.
        expected = (len(sample.input_ids), *buffers[name].shape[2:])
        if source.shape != expected:
            raise ValueError(
                f"expected {name} of shape {list(expected)} in sample {sample.name}, found "
                f"{list(source.shape)}. Build the buffers from this dataset's layer ids and hidden size."
            )
        if source.is_floating_point() and not all_finite(source):
            raise NonFiniteSample(sample, name, place)
    return sources


def clear_row(buffers: Mapping[str, Tensor], b: int) -> None:
    """Zero every byte of row b: no context, no kept block, weight zero."""
    for buffer in buffers.values():
        buffer[b].zero_()


def all_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinite. One pass without temporaries: minimum and maximum both propagate NaN."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
