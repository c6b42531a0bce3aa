"""A tiny random Qwen3 with a tokenizer of letters and Qwen3's way with thinking, in the place of the tutorial's target."""

import string
from pathlib import Path

import torch

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
# An answer without thoughts begins with an empty thought, as Qwen3 writes it.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last and message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def save_tutorial_target(folder: Path) -> None:
    """Writes model and tokenizer as transformers loads them."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # In the byte-level alphabet a space and the end of a line have letters of their own.
    alphabet = [*string.ascii_letters, *string.digits, *string.punctuation, "\u0120", "\u010a"]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(alphabet) + len(SPECIAL) + 3,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        # Larger than usual, so that the text depends on what stands before it.
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
