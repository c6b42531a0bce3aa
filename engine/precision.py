"""What a run's precision means, and where fp8 cannot be had."""

from __future__ import annotations

import torch

from engine.drafter_config import DrafterConfig

_FP8_CAPABILITY = (8, 9)
_FP8_MULTIPLE = 16  # of every matrix side, by cuBLAS


def compute_dtype(precision: str) -> torch.dtype:
    """Of activations and of the weights that the step reads: fp8 quantises bf16 on the way into a matmul."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def check_fp8_device(device: torch.device) -> None:
    """Raises ValueError naming the device when it has no fp8 matmuls."""
    found = "the CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= _FP8_CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} with {'.'.join(map(str, capability))}"
    raise ValueError(
        f'run.precision = "fp8" needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell), found {found}; set '
        'run.precision = "auto"'
    )


def check_fp8_sizes(config: DrafterConfig) -> None:
    """Raises ValueError naming the sizes of a drafter that fp8 matmuls cannot take."""
    heads, groups, E = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": heads * E,
        "(num_attention_heads + 2 * num_key_value_heads) * head_dim": (heads + 2 * groups) * E,
    }
    odd = [f"{name} {size}" for name, size in sizes.items() if size % _FP8_MULTIPLE]
    if odd:
        raise ValueError(
            f'run.precision = "fp8" needs multiples of {_FP8_MULTIPLE}, found {", ".join(odd)}; set run.precision = "auto" or '
            "change the drafter's sizes"
        )
