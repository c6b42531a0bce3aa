"""A target model in the Qwen3 architecture: plain torch, Hugging Face's layout and tensor names.

It does what the drafter's life needs and no more: a forward pass that also hands out the residual stream after chosen
layers, and a key/value cache that can be rolled back to an earlier length.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buffers.manifest import read_tensors
from buffers.untrusted import read_object, read_weight_map
from engine.rope import apply_rope, rope_cos_sin, rope_inv_freq
from engine.target_config import TargetConfig


@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """`logits` [B,S,V]; `taps` [B,S,L*D]: residual stream after each tapped layer; `last_hidden` [B,S,D]: pre-norm."""

    logits: Tensor
    taps: Tensor
    last_hidden: Tensor


class KVCache:
    """Keys and values of all layers, allocated once: [layers, B, G, capacity, E], `length` positions of them valid."""

    def __init__(
        self, config: TargetConfig, batch: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.capacity = capacity
        self.length = 0

    def rollback(self, length: int) -> None:
        """Forget every position from `length` on; the next forward pass overwrites them."""
        if not 0 <= length <= self.length:
            raise ValueError(
                f"cache rollback: expected a length in 0..{self.length}, found {length}. Roll back, not forward."
            )
        self.length = length

    def write(self, layer: int, k_BGSE: Tensor, v_BGSE: Tensor) -> tuple[Tensor, Tensor]:
        """Put new keys and values behind the valid ones; return views of all. `length` moves after the last layer."""
        stop = self.length + k_BGSE.shape[2]
        self.keys[layer, :, :, self.length : stop] = k_BGSE
        self.values[layer, :, :, self.length : stop] = v_BGSE
        return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32, over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        B, S, _ = x.shape
        q_BSHE = apply_rope(self.q_norm(self.q_proj(x).view(B, S, -1, self.head_dim)), cos, sin)
        k_BSGE = apply_rope(self.k_norm(self.k_proj(x).view(B, S, -1, self.head_dim)), cos, sin)
        q_BHSE, k_BGSE = q_BSHE.transpose(1, 2), k_BSGE.transpose(1, 2)
        v_BGSE = self.v_proj(x).view(B, S, -1, self.head_dim).transpose(1, 2)
        if cache is not None:
            k_BGSE, v_BGSE = cache.write(layer, k_BGSE, v_BGSE)
        # Without a mask all S queries are also all the keys, or there is one query that sees every key.
        causal = mask is None and S > 1
        out = F.scaled_dot_product_attention(q_BHSE, k_BGSE, v_BGSE, attn_mask=mask, is_causal=causal, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(B, S, -1))
        return projected


class MLP(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, layer)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """Holds the parameters that Hugging Face names `model.*`."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Target(nn.Module):
    """The whole model. Its state_dict has Hugging Face's names; a tied head is no tensor of its own."""

    inv_freq: Tensor

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("inv_freq", rope_inv_freq(config.rope, config.head_dim), persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """[V, D], the embedding when they are tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        return self.model.embed_tokens.weight

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Hidden size, vocabulary, layers."""
        return self.config.hidden_size, self.config.vocab_size, self.config.num_hidden_layers

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text."""
        return frozenset(() if self.config.eos_token_id is None else (self.config.eos_token_id,))

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """An empty cache for `batch` rows of at most `capacity` positions."""
        return KVCache(self.config, batch, capacity, self.device, self.dtype)

    def extend(
        self, tokens_S: Tensor, cache: KVCache, tap_layer_ids: Sequence[int] = (), *, last_only: bool = False
    ) -> TargetOutput:
        """One row of tokens int[S] behind what the cache holds; last_only: logits of the last token alone, [1,1,V]."""
        return self(tokens_S[None], cache=cache, tap_layer_ids=tap_layer_ids, last_logits_only=last_only)

    def forward(
        self,
        input_ids_BS: Tensor,
        *,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        tap_layer_ids: Sequence[int] = (),
        last_logits_only: bool = False,
    ) -> TargetOutput:
        """Run the model on int tokens [B,S].

        With a cache the tokens follow its valid positions, which move on by S. `positions` int[B,S] or [S] defaults
        to the places in the row (after the cache). last_logits_only: logits [B,1,V]. Raises ValueError when the cache is
        full or a layer does not exist.
        """
        _, S = input_ids_BS.shape
        past = 0 if cache is None else cache.length
        if cache is not None and past + S > cache.capacity:
            raise ValueError(
                f"target cache: expected at most {cache.capacity} positions, found {past} + {S}. Make a larger cache."
            )
        unknown = [i for i in tap_layer_ids if not 0 <= i < self.config.num_hidden_layers]
        if unknown:
            raise ValueError(
                f"target_layer_ids: expected numbers in 0..{self.config.num_hidden_layers - 1}, found {unknown}. "
                "The target has no such layers."
            )
        if positions is None:
            positions = torch.arange(past, past + S, device=input_ids_BS.device)
        cos, sin = rope_cos_sin(positions, self.inv_freq)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        mask = None
        if past and S > 1:
            rows, columns = (torch.arange(n, device=input_ids_BS.device) for n in (S, past + S))
            mask = columns[None, :] <= rows[:, None] + past
        x = self.model.embed_tokens(input_ids_BS)
        taps: dict[int, Tensor] = {}
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, mask, cache, i)
            if i in tap_layer_ids:
                taps[i] = x
        if cache is not None:
            cache.length = past + S
        logits = F.linear(self.model.norm(x[:, -1:] if last_logits_only else x), self.head_weight)
        concatenated = torch.cat([taps[i] for i in tap_layer_ids], dim=-1) if taps else x[..., :0]
        return TargetOutput(logits, concatenated, x)


@torch.inference_mode()
def greedy_generate(target: Target, prompt: Tensor, max_new_tokens: int, stop_at_eos: bool = True) -> list[int]:
    """Greedy continuation of int `prompt` [T], one token a forward pass; ends after the config's `eos_token_id`."""
    cache = target.new_cache(prompt.numel() + max_new_tokens)
    tokens: list[int] = []
    feed = prompt.to(target.device)[None]
    while len(tokens) < max_new_tokens:
        logits = target(feed, cache=cache).logits[0, -1]
        tokens.append(int(logits.argmax()))
        if stop_at_eos and tokens[-1] == target.config.eos_token_id:
            break
        feed = feed.new_tensor([[tokens[-1]]])
    return tokens


def load_target(
    directory: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Target:
    """Load a Hugging Face folder (config.json; model.safetensors or its index) without gradients.

    Raises ValueError for missing files or tensors, for shapes that differ from the config, for configs not reproduced.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(
            f"target: expected the file {path}, found none. Pass a folder with config.json and model.safetensors."
        )
    with torch.device("meta"):
        target = Target(TargetConfig.from_json(read_object(path)))
    expected = {name: tuple(tensor.shape) for name, tensor in target.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        tensors |= {name: tensor.to(device, dtype) for name, tensor in read_tensors(file, expected).items()}
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise ValueError(
            f"target: expected the tensor {missing[0]} ({len(missing)} missing), found none in {directory}. Copy "
            "all shards."
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"target: expected {name} of shape {shape} by config.json, found {tuple(tensors[name].shape)}. "
                "Pair the weights with their own config."
            )
    target.load_state_dict(tensors, assign=True)
    target.inv_freq = rope_inv_freq(target.config.rope, target.config.head_dim, device)
    return target.requires_grad_(False).eval()


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(read_weight_map(index).values()))
    files = [directory / name for name in names]
    for file in files:
        if not file.is_file():
            raise ValueError(f"target: expected the file {file}, found none. Copy the whole checkpoint.")
    return files
