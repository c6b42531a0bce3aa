"""Tiny random models of transformers' own classes, a tokenizer with a chat template, and files of conversations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # Larger than usual, so that what a layer adds can be seen.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {}),
    "gemma3": ("Gemma3TextConfig", {}),
    "qwen3-moe": ("Qwen3MoeConfig", MOE),
    # Attention without a growing cache in every other layer, and norms that multiply by 1 + w.
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **MOE,
            "shared_expert_intermediate_size": 12,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"] * 3,
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16},
    ),
    "granite": ("GraniteConfig", {"embedding_multiplier": 3.0}),
    "gpt-neox": ("GPTNeoXConfig", {}),
}


def tiny_model(kind: str, **changes: Any) -> Any:
    """A random model whose norms are not all ones."""
    name, own = CONFIGS[kind]
    config = getattr(transformers, name)(**{**SIZES, **own, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for part, parameter in model.named_parameters():
        if "norm" in part:
            parameter += 0.3 * torch.rand_like(parameter)
    return model


def save_model(folder: Path, kind: str = "qwen3", tokenizer: Any = None, **changes: Any) -> Path:
    """A model's folder, with a tokenizer if there is one."""
    tiny_model(kind, **changes).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


WORDS = [
    "hello",
    "world",
    "how",
    "are",
    "you",
    "i",
    "am",
    "fine",
    "thanks",
    "tell",
    "me",
    "more",
    "of",
    "course",
    "one",
    "two",
    "three",
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The last answer is written otherwise than those before it: the text of a beginning is no beginning of the text.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if loop.last and message['role'] == 'assistant' %}"
    "<think>\n</think>\n{% endif %}{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def word_tokenizer(template: str | None = CHATML, words: Sequence[str] = WORDS, **special: str) -> Any:
    """One token a word and a newline, the special ones first; roles are words too."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = ["<unk>", *SPECIAL, "\n", "user", "assistant", "system", *words]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n| "), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", additional_special_tokens=SPECIAL, **special
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    """Records a line each; a string stands as it is."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def id_records(count: int, seed: int = 0, longest: int = 90) -> list[dict[str, list[int]]]:
    """Records of random tokens and lengths, half of the tokens supervised."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for _ in range(count):
        length = int(torch.randint(6, longest, (1,), generator=generator))
        ids = torch.randint(0, SIZES["vocab_size"] - 1, (length,), generator=generator).tolist()
        records.append({"input_ids": ids, "loss_mask": [0] * (length // 2) + [1] * (length - length // 2)})
    return records
