"""Decoding with a transformers target on the device: its own text in fp32 and, but for near ties, in bf16; both rates."""

import pytest
import torch

from engine.decode import drafter_for
from engine.decode_prompts import DecodeOptions, decode_prompts
from tests.test_decode import drafter_config, random_weights

pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_targets_own(dtype: torch.dtype, temperature: float) -> None:
    from tests.test_hf_decoding import SizesOf, decoding, random_model

    target = decoding(random_model("qwen3 with sliding layers").to("cuda", dtype))
    config = drafter_config(SizesOf(target))  # type: ignore[arg-type]
    drafter = drafter_for(config, random_weights(config), target)
    prompts = [torch.randint(0, 49, (length,)) for length in (3, 9, 20)]
    figures = decode_prompts(target, drafter, prompts, DecodeOptions(60, temperature=temperature))
    assert figures.get("differing_tokens", 0) == 0
    assert figures["new_tokens"] == 180 and sum(figures["acceptance_histogram"]) == figures["verifications"]
    if dtype == torch.float32 and temperature == 0:
        assert figures["near_tie_differences"] == 0
    assert figures["tokens_per_s"] > 0 and figures["plain_tokens_per_s"] > 0
    assert figures["device"] == torch.cuda.get_device_name()
