"""The embedded target's vocabulary: 256 bytes, a mask token for the drafter and a token that opens every document."""

import torch
from torch import Tensor

MASK_TOKEN_ID = 256
# Opens every document; predicted after its last byte, so it also ends the one before.
BOS_TOKEN_ID = 257
# Rounded up to a multiple of 8 for the tensor cores; the last six tokens are never used.
VOCAB_SIZE = 264


def encode_document(text: bytes) -> Tensor:
    """int32[len(text) + 1]: bos, then the bytes."""
    # bytearray, because torch wants memory that it may write.
    return torch.cat((torch.tensor([BOS_TOKEN_ID], dtype=torch.int32), encode_bytes(text)))


def encode_bytes(text: bytes) -> Tensor:
    """int32[len(text)]."""
    if not text:
        return torch.zeros(0, dtype=torch.int32)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int32)


def decode_bytes(tokens: list[int]) -> bytes:
    """The bytes among `tokens`; special tokens stand for none."""
    return bytes(token for token in tokens if token < MASK_TOKEN_ID)
