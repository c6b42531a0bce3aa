"""Sampled speculative decoding writes as the target does: distributions against exact ones, with fixed seeds."""

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.acceptance import Sampler, choose, logit_rounding
from engine.decode import Drafter, drafter_for, plain_generate, speculative_generate
from engine.target import Target
from tests.test_decode import drafter_config, random_weights
from tests.test_target import small

pytestmark = pytest.mark.usefixtures("one_thread")
V, TEMPERATURE = 4, 0.7
PROMPT = torch.tensor([1, 2, 0])


def p_value(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's chi-square; outcomes that are expected less than five times count as one."""
    total = sum(counts.values())
    rare = {outcome for outcome, p in exact.items() if p * total < 5}
    cells = [(counts[outcome], p * total) for outcome, p in exact.items() if outcome not in rare]
    if rare:
        cells.append((sum(counts[o] for o in rare), sum(exact[o] for o in rare) * total))
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def tiny() -> tuple[Target, Drafter]:
    torch.manual_seed(3)
    target = Target(dataclasses.replace(small(), vocab_size=V, num_hidden_layers=3)).requires_grad_(False)
    for name, parameter in target.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    config = drafter_config(
        target.config,
        block_size=3,
        layer_types=("full_attention",),
        causal_layers=None,
        sliding_window=None,
    )
    return target, drafter_for(config, random_weights(config), target)


def exact_distribution(target: Target, length: int) -> dict[tuple[int, ...], float]:
    """Of the first tokens after the prompt, by one forward pass for every text of one token less."""
    texts = torch.cartesian_prod(*[torch.arange(V)] * length)
    rows = torch.cat((PROMPT.expand(len(texts), -1), texts), dim=1)
    logits = target(rows).logits[:, len(PROMPT) - 1 : -1]
    p = (logits.double() / TEMPERATURE).softmax(-1).gather(-1, texts[..., None])[..., 0].prod(-1)
    return {tuple(text): float(probability) for text, probability in zip(texts.tolist(), p, strict=True)}


def texts(generate: Callable[[Sampler], tuple[int, ...]], count: int) -> Counter[tuple[int, ...]]:
    return Counter(generate(Sampler(TEMPERATURE, seed)) for seed in range(count))


def test_texts_are_distributed_as_the_targets_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token comes from the prompt, the other two from a draft, its rejection or the target's own token after it."""
    target, drafter = tiny()
    exact = exact_distribution(target, 3)
    assert abs(sum(exact.values()) - 1) < 1e-9 and max(exact.values()) < 0.5

    def speculative(sampler: Sampler) -> tuple[int, ...]:
        return speculative_generate(target, drafter, PROMPT, 3, sampler).tokens

    drawn = texts(speculative, 1500)
    assert p_value(drawn, exact) > 0.01
    # The same test finds a rule that keeps every draft.
    monkeypatch.setattr(Sampler, "accept", lambda self, drafts, q, p: [*drafts.tolist(), int(self.draw(p[-1:]))])
    assert p_value(texts(speculative, 300), exact) < 1e-6


def test_plain_texts_are_too() -> None:
    target, _ = tiny()
    drawn = texts(lambda sampler: plain_generate(target, PROMPT, 2, sampler).tokens, 800)
    assert p_value(drawn, exact_distribution(target, 2)) > 0.01


def test_acceptance_is_as_likely_as_the_distributions_overlap() -> None:
    q, p = torch.tensor([[0.7, 0.2, 0.1, 0.0]]), torch.tensor([[0.2, 0.2, 0.3, 0.3], [0.25, 0.25, 0.25, 0.25]])
    sampler = Sampler(1.0, 0)
    kept: Counter[tuple[int, ...]] = Counter()
    for _ in range(3000):
        draft = sampler.draw(q.double())
        kept[tuple(sampler.accept(draft, q.double(), p.double()))] += 1
    # sum min(p, q) = 0.2 + 0.2 + 0.1; the rest max(p - q, 0) is 0.2 of token 2 and 0.3 of token 3.
    exact = {(d, own): min(float(p[0, d]), float(q[0, d])) / 4 for d in range(3) for own in range(4)}
    assert p_value(kept, exact | {(2,): 0.2, (3,): 0.3}) > 0.01


def test_drafts_from_the_targets_distribution_all_stand() -> None:
    p = torch.rand(4, 9, dtype=torch.float64).softmax(-1)
    sampler = Sampler(1.0, 5)
    for _ in range(50):
        drafts = sampler.draw(p[:3])
        kept = sampler.accept(drafts, p[:3], p)
        assert kept[:3] == drafts.tolist() and len(kept) == 4


def test_a_seed_gives_its_draws_and_impossible_tokens_are_never_drawn() -> None:
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64).expand(200, 5)
    once, again, other = (Sampler(1.0, seed).draw(p) for seed in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert set(once.tolist()) == {1, 3}
    cold: Tensor = Sampler(1e-3, 0).probabilities(torch.tensor([[1.0, 2.0, 1.5]]))
    assert cold.argmax() == 1 and float(cold.max()) == 1.0
    with pytest.raises(ValueError, match="temperature: expected a number above 0 to sample, found 0"):
        Sampler(0.0, 0)


def test_rounding_of_bf16_makes_wider_ties_than_that_of_fp32() -> None:
    logits = torch.tensor([[9.0, 8.9, *[0.0] * 9], [9.0, 8.0, *[0.0] * 9], [0.09, 0.0889, *[0.0] * 9]])
    assert choose(logits, logit_rounding(torch.float32, 36)) == ([0, 0, 0], [])
    # 36 layers in bf16: 4 * 2^-7 * 6 = 0.19 of the logits' standard deviation, which is 3.6, 3.5 and 0.036.
    assert choose(logits, logit_rounding(torch.bfloat16, 36)) == ([0, 0, 0], [0, 2])
