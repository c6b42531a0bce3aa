"""How many drafted tokens stand when the target has checked them, greedily or by chance.

Greedy: the drafts that are the target's own choice. At a temperature: each draft is accepted with probability
min(1, p/q), and the first one that is not is replaced by a draw from max(p - q, 0), so that the text is distributed as
the target alone would write it, whatever was drafted (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Two best logits closer than this may change places with the rounding of another batch shape, in fp32.
NEAR_TIE = 1e-4


def logit_rounding(dtype: torch.dtype, num_layers: int) -> float:
    """How far apart two logits of one place may come out in two passes of a target, in standard deviations of its logits.

    Attention and MLP of every layer round the residual stream by eps / 2: what adds up over 2 * num_layers roundings is
    sqrt(2 * num_layers) * eps / 2 of a logit (as measured on random targets in bf16). The difference of two of them varies
    sqrt(2) times as much; four standard deviations of that.
    """
    return 4 * torch.finfo(dtype).eps * math.sqrt(num_layers)


def choose(logits_SV: Tensor, rounding: float = 0.0) -> tuple[list[int], list[int]]:
    """The greedy token of each row of logits, and the rows whose two best are equal but for rounding: less apart than
    `rounding` standard deviations of the row, at least NEAR_TIE."""
    wide_SV = logits_SV.float()
    best_S2 = wide_SV.topk(2, dim=-1).values
    near = (best_S2[:, 0] - best_S2[:, 1] < (rounding * wide_SV.std(-1)).clamp(min=NEAR_TIE)).tolist()
    # argmax, not topk's first: of equal logits plain greedy decoding takes argmax's.
    return logits_SV.argmax(-1).tolist(), [i for i, tie in enumerate(near) if tie]


def matching_prefix(drafts: Sequence[int], wanted: Sequence[int]) -> int:
    """How many drafts are the target's choices from the first on."""
    for i, draft in enumerate(drafts):
        if draft != wanted[i]:
            return i
    return len(drafts)


class Sampler:
    """Draws tokens at a temperature; the same seed gives the same draws on any device.

    Probabilities are fp64: in fp32 the cumulative sum over a large vocabulary is off by as much as rare tokens have.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        """Raises ValueError for a temperature that is not above 0: greedy decoding needs no sampler."""
        if not temperature > 0:
            raise ValueError(
                f"temperature: expected a number above 0 to sample, found {temperature}; 0 is greedy and draws nothing"
            )
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def probabilities(self, logits_SV: Tensor) -> Tensor:
        """fp64[S, V]."""
        return (logits_SV.double() / self.temperature).softmax(-1)

    def draw(self, p_SV: Tensor) -> Tensor:
        """int64[S]: one token a row. The rows need not sum to one; a token of probability 0 is never drawn."""
        cumulative_SV = p_SV.cumsum(-1)
        at_S1 = self._uniform(p_SV)[:, None] * cumulative_SV[:, -1:]
        drawn_S = torch.searchsorted(cumulative_SV, at_S1, right=True)[:, 0]
        return drawn_S.clamp(max=p_SV.shape[-1] - 1)

    def accept(self, drafts_K: Tensor, q_KV: Tensor, p_KV: Tensor) -> list[int]:
        """The drafts that stand and the target's own token after them: 1 to K tokens.

        drafts int64[K - 1] drawn from q [K - 1, V]; p [K, V] is the target's distribution at each of them and after the last.
        """
        p_drafts, q_drafts = (x[: len(drafts_K)].gather(1, drafts_K[:, None])[:, 0] for x in (p_KV, q_KV))
        accepted = self._uniform(p_drafts) * q_drafts < p_drafts
        count = int(accepted.cumprod(0).sum())
        own_1V = p_KV[count : count + 1]
        if count < len(drafts_K):
            rest_1V = (own_1V - q_KV[count]).clamp(min=0)
            # No rest only if p equals q but for rounding: then p is the rest.
            own_1V = rest_1V if float(rest_1V.sum()) > 0 else own_1V
        return [*drafts_K[:count].tolist(), int(self.draw(own_1V))]

    def _uniform(self, rows: Tensor) -> Tensor:
        drawn = torch.rand(len(rows), dtype=torch.float64, generator=self._generator)
        return drawn.to(rows.device)
