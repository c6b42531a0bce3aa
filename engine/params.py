"""The drafter's parameters as views of flat arenas, under z-lab's names.

weight (compute dtype), grad (sums over a step's micro-batches), and for training the fp32 master and the two moments all have
one layout: matrices first, norm weights (no weight decay) last, the total rounded up so that ranks can own equal contiguous
shards. The members of a fused matmul ([q | k | v], [k | v], [gate | up]) stand next to each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from buffers.shapes import round_up
from buffers.untrusted import shown_names
from engine.drafter_config import DrafterConfig
from engine.ops.adamw_arenas import AdamWArenas
from engine.ops.weight import GradientSums, Weight

_ALIGN = 64  # elements between groups: 128 bytes in bf16, what cuBLAS and TMA like
_SHARD = 8192  # the arenas' size is a multiple: equal aligned shards for 1 to 64 ranks


def parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a drafter checkpoint, in checkpoint order."""
    D, inter, E = config.hidden_size, config.intermediate_size, config.head_dim
    HE, GE = config.num_attention_heads * E, config.num_key_value_heads * E
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, config.num_taps * D)}
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}."
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (HE, D),
            f"{layer}self_attn.k_proj.weight": (GE, D),
            f"{layer}self_attn.v_proj.weight": (GE, D),
            f"{layer}self_attn.o_proj.weight": (D, HE),
            f"{layer}mlp.gate_proj.weight": (inter, D),
            f"{layer}mlp.up_proj.weight": (inter, D),
            f"{layer}mlp.down_proj.weight": (D, inter),
        }
    shapes |= {"hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (D,),
            f"{layer}post_attention_layernorm.weight": (D,),
            f"{layer}self_attn.q_norm.weight": (E,),
            f"{layer}self_attn.k_norm.weight": (E,),
        }
    return shapes


def initial_parameters(config: DrafterConfig, seed: int, std: float = 0.02) -> dict[str, Tensor]:
    """New weights, fp32 on the CPU, the same on every machine: matrices N(0, std), norms 1. 0.02 is initializer_range of
    the Qwen3 configs that the published recipes start from.

    Each tensor comes from a generator of its own, seeded with (seed, its place): a billion normal numbers take one core 5 s, so
    all cores draw.
    """
    shapes = parameter_shapes(config)

    def draw(place: int, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        (of_tensor,) = np.random.SeedSequence((seed, place)).generate_state(1).tolist()
        return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(of_tensor))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(shapes, pool.map(draw, range(len(shapes)), shapes.values()), strict=True))


def check_tensors(
    where: str, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], most: int = 12
) -> None:
    """Strict: raises one ValueError that lists what is missing, unexpected and misshapen (`most` of them, and the count)."""
    problems = [f"no {name}" for name in shapes if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in shapes]
    problems += [
        f"{name} {tuple(tensors[name].shape)} for {shape}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        more = f", and {len(problems) - most} more" if len(problems) > most else ""
        raise ValueError(
            f"{where}: expected the {len(shapes)} tensors of its config.json, found {shown_names(problems[:most], 1200)}{more}. "
            "Take the weights and the config.json of one drafter"
        )


def arena_size(config: DrafterConfig) -> int:
    """Numbers in each arena of a drafter's parameters, padding included."""
    return _layout(parameter_shapes(config))[2]


def _layout(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, int], int, int]:
    """Where each parameter begins, how many numbers in front have weight decay, and how many there are."""
    offsets: dict[str, int] = {}
    end, num_decayed = 0, 0
    for name, shape in shapes.items():
        if not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            end = round_up(end, _ALIGN)
        if len(shape) == 1 and not num_decayed:
            num_decayed = end
        offsets[name] = end
        end += torch.Size(shape).numel()
    return offsets, num_decayed, round_up(end, _SHARD)


class ParamArena:
    """Owns every trainable number. Addresses never change after construction; load_ and the update write in place."""

    def __init__(
        self,
        config: DrafterConfig,
        device: torch.device,
        *,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        trainable: bool = True,
    ) -> None:
        """trainable = False leaves out master and moments (evaluation, forward + backward benchmarks)."""
        self.shapes = parameter_shapes(config)
        self._offsets, self.num_decayed, self.size = _layout(self.shapes)
        self.weight = torch.zeros(self.size, dtype=dtype, device=device)
        self.grad = torch.zeros(self.size, dtype=grad_dtype, device=device)
        self.gradient_sums = GradientSums()
        self.master: Tensor | None = None
        if trainable:
            # In fp32 the drafter computes with the masters themselves.
            self.master = (
                self.weight if dtype == torch.float32 else torch.zeros(self.size, dtype=torch.float32, device=device)
            )
            self.exp_avg = torch.zeros(self.size, dtype=torch.float32, device=device)
            self.exp_avg_sq = torch.zeros(self.size, dtype=torch.float32, device=device)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The part of a flat arena that belongs to one parameter, in its shape."""
        offset, shape = self._offsets[name], self.shapes[name]
        return flat[offset : offset + torch.Size(shape).numel()].view(shape)

    def fused(self, *names: str) -> Weight:
        """Adjacent parameters of one width as a single Weight, stacked along the output axis."""
        first, rows = self._offsets[names[0]], 0
        width = self.shapes[names[0]][1:]
        for name in names:
            start = first + rows * torch.Size(width).numel()
            assert self._offsets[name] == start and self.shapes[name][1:] == width, f"{names} do not stand side by side"
            rows += self.shapes[name][0]
        shape = (rows, *width)
        part = slice(first, first + torch.Size(shape).numel())
        value, grad = self.weight[part].view(shape).detach().requires_grad_(), self.grad[part].view(shape)
        return Weight(value, grad, self.gradient_sums)

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view) for every parameter of one of the arenas."""
        return ((name, self.view(flat, name)) for name in self.shapes)

    def arenas(self) -> AdamWArenas:
        """What the update works on."""
        assert self.master is not None, "this ParamArena was built with trainable=False"
        return AdamWArenas(self.weight, self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.num_decayed)

    def draw_(self, seed: int, std: float = 0.02) -> None:
        """New weights drawn on the device, for benchmarks: quick for billions, but not the bits of initial_parameters."""
        generator = torch.Generator(self.weight.device).manual_seed(seed)
        for name, view in self.named(self.weight):
            self._write(
                name, torch.ones_like(view) if view.dim() == 1 else view.clone().normal_(0.0, std, generator=generator)
            )

    def load_(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies a drafter's tensors in. Strict: raises ValueError listing missing, unexpected and misshapen names."""
        check_tensors("drafter", self.shapes, tensors)
        for name, value in tensors.items():
            self._write(name, value)

    def state(self) -> dict[str, Tensor]:
        """The parameters in full precision (masters where there are any), by name; views, not copies."""
        return dict(self.named(self.weight if self.master is None else self.master))

    def refresh_weights(self) -> None:
        """Compute-precision weights from the masters, after these were written from outside the update."""
        if self.master is not None and self.master is not self.weight:
            self.weight.copy_(self.master)

    def _write(self, name: str, value: Tensor) -> None:
        with torch.no_grad():
            if self.master is not None:
                # Over to the device once, and rounded there: billions of numbers take the host a second.
                value = self.view(self.master, name).copy_(value)
            self.view(self.weight, name).copy_(value)
