"""The loss against full logits and formulas written out: cross entropy, soft labels, slot weights, and the sums of a step."""

import math

import pytest
import torch
from torch import Tensor

from buffers.shapes import Bucket
from engine.kernels import reference_ops
from engine.objective import BlockSums, Objective, TargetHead, block_loss, dpace_weights, supervision_of
from engine.ops.block_sums_ref import SUMS
from engine.optimizer import AdamW
from engine.settings import OptimizerSettings
from tests.drafter_helpers import (
    Step,
    assert_close,
    assert_same_bits,
    make_batch,
    make_step,
    objective,
    random_sample,
    random_target,
    set_anchors,
    small_config,
)

pytestmark = pytest.mark.usefixtures("one_thread")

V = 151_936
D = 8
K = 5
BUCKET = Bucket(B=2, S=20, N=4, K=K, tile=4)


def written_out(
    hidden: Tensor, batch: dict[str, Tensor], head: Tensor, teacher_states: Tensor, loss: Objective
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(sum of weighted losses, its denominator, counts) by loops over blocks and slots and full logits in fp64."""
    ce_weight, kl_weight, gamma = float(loss.ce_weight), float(loss.kl_weight), float(loss.gamma)
    total, weight_sum = hidden.new_zeros(()), 0.0
    counts = {"supervised": 0.0, "correct": 0.0, "accepted": 0.0, "blocks": 0.0}
    for b in range(BUCKET.B):
        supervised_row = False
        for n in range(BUCKET.N):
            if not batch["block_keep_mask"][b, n]:
                continue
            counts["blocks"] += 1
            anchor = int(batch["anchor_positions"][b, n])
            slots: list[tuple[Tensor, Tensor, bool] | None] = []
            for k in range(1, K):
                at = anchor + k
                if at >= int(batch["row_lengths"][b]) or not batch["loss_mask"][b, at]:
                    slots.append(None)
                    continue
                log_q = (head @ hidden[b, n, k - 1]).log_softmax(-1)
                log_p = (head @ teacher_states[b, at - 1]).log_softmax(-1)
                label = int(batch["input_ids"][b, at])
                slots.append((-log_q[label], (log_p.exp() * (log_p - log_q)).sum(), bool(log_q.argmax() == label)))
            going = True
            for slot in slots:
                going = going and (slot is None or slot[2])
                counts["accepted"] += going and slot is not None
            prefix, certainty = [], 1.0
            for slot in slots:
                certainty *= 1.0 if slot is None else 0.5 * math.exp(-slot[0].item()) + 0.5
                prefix.append(certainty)
            for k, slot in enumerate(slots, start=1):
                if slot is None:
                    continue
                supervised_row = True
                counts["supervised"] += 1
                counts["correct"] += slot[2]
                weight = 1.0
                if loss.weighting == "decay":
                    weight = math.exp(-(k - 1) / gamma)
                elif loss.weighting == "dpace":
                    weight = sum(p for i, p in enumerate(prefix, start=1) if i >= k and slots[i - 1] is not None)
                total = total + weight * (ce_weight * slot[0] + kl_weight * slot[1])
                weight_sum += weight if loss.weighting != "dpace" else 0.0
        weight_sum += loss.weighting == "dpace" and supervised_row
    return total, torch.tensor(weight_sum), counts


def some_batch() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A batch with gaps in the loss mask and labels that end before a block does; (batch, hidden states, head) in fp64."""
    config = small_config(hidden_size=D, vocab_size=V, mask_token_id=V - 1, block_size=K, target_layer_ids=(1,))
    gaps = (torch.arange(17) % 6 != 4).to(torch.uint8)
    batch = make_batch(config, BUCKET, [random_sample(config, 20, 0), random_sample(config, 17, 1, gaps)])
    set_anchors(batch, [[2, 9, 17, 18], [1, 6, 14]])
    batch = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, BUCKET.N, K - 1, D, generator=generator, dtype=torch.float64)
    head = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels, _ = labels_and_weights(batch, K)
    # About half of the slots are right: their labels stand out among 151,936 directions.
    head[labels[:, ::2].unique()] *= 2.5
    hidden[:, ::2] += head[labels[:, ::2]]
    return batch, hidden, head


def labels_and_weights(batch: dict[str, Tensor], block_size: int) -> tuple[Tensor, Tensor]:
    s = supervision_of(batch, objective(), reference_ops(), block_size=block_size)
    return s.labels, s.w


def numbers(found: BlockSums) -> dict[str, float]:
    return dict(zip(SUMS, found.totals.tolist(), strict=True))


def loss_of(
    hidden: Tensor, batch: dict[str, Tensor], head: TargetHead, loss: Objective, chunk_rows: int = 7
) -> BlockSums:
    return block_loss(hidden, batch, head, loss, reference_ops(), gradient=True, chunk_rows=chunk_rows)


@pytest.mark.parametrize("weighting", ["decay", "uniform", "dpace"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_loss_and_gradient_equal_those_of_full_logits(weighting: str, norm: str) -> None:
    batch, hidden, head = some_batch()
    loss = objective(weighting, ce=0.7, kl=0.3 if norm == "pre" else 1.5, gamma=3.0)
    norm_weight = torch.rand(D, dtype=torch.float64) + 0.5
    teacher_states = batch["last_hidden"]
    target_head = TargetHead(head, None)
    if norm == "pre":
        target_head = TargetHead(head, norm_weight, norm_eps=1e-3)
        rms = (teacher_states.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        teacher_states = teacher_states / rms * norm_weight
    found = loss_of(hidden, batch, target_head, loss)
    leaf = hidden.clone().requires_grad_()
    expected, weight, counts = written_out(leaf, batch, head, teacher_states, loss)
    expected.backward()
    assert leaf.grad is not None and found.dh is not None
    # Slot weights are fp32, and so is the norm of the teacher's states, whose dtype in training is bf16.
    torch.testing.assert_close(found.loss, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.dh, leaf.grad, rtol=0, atol=2e-6 * leaf.grad.abs().max().item())
    torch.testing.assert_close(found.weight, weight.double(), rtol=1e-6, atol=0)
    assert found.slots.sum(1).tolist() == [counts["correct"], counts["supervised"]]
    assert 0 < counts["correct"] < counts["supervised"]
    sums = numbers(found)
    assert sums["accepted"] == counts["accepted"]
    assert sums["blocks"] == counts["blocks"] == 7
    assert math.isclose(0.7 * sums["ce"] + float(loss.kl_weight) * sums["kl"], sums["loss"], rel_tol=1e-6)


def test_cross_entropy_alone_reads_no_teacher() -> None:
    batch, hidden, head = some_batch()
    del batch["last_hidden"]
    found = loss_of(hidden, batch, TargetHead(head), objective())
    assert numbers(found)["kl"] == 0
    assert numbers(found)["loss"] == numbers(found)["ce"]


def test_a_weight_written_between_steps_is_the_one_in_force() -> None:
    batch, hidden, head = some_batch()
    loss = objective("decay", kl=0.5, gamma=3.0)
    loss_of(hidden, batch, TargetHead(head), loss)
    for tensor, value in ((loss.ce_weight, 0.25), (loss.kl_weight, 2.0), (loss.gamma, 7.0)):
        tensor.fill_(value)
    found = loss_of(hidden, batch, TargetHead(head), loss)
    expected = loss_of(hidden, batch, TargetHead(head), objective("decay", ce=0.25, kl=2.0, gamma=7.0))
    assert found.loss == expected.loss
    assert found.weight == expected.weight


def test_labels_end_with_the_document_and_are_zero_where_there_is_none() -> None:
    batch, _, _ = some_batch()
    batch["context_end"][0, 1] = 12
    labels, w = labels_and_weights(batch, K)
    ids = batch["input_ids"][0]
    assert labels[0, 0].tolist() == ids[3:7].tolist()
    assert (labels[0, 1].tolist(), w[0, 1].tolist()) == ([*ids[10:12].tolist(), 0, 0], [1, 1, 0, 0])
    assert (labels[0, 2].tolist(), w[0, 2].tolist()) == ([*ids[18:20].tolist(), 0, 0], [1, 1, 0, 0])
    assert (labels[1, 3].tolist(), w[1, 3].tolist()) == ([0] * 4, [0] * 4)


def test_dpace_weights_of_a_block_by_hand() -> None:
    ce, w = torch.tensor([0.0, math.log(2), 9.0, math.log(4)]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    # Probabilities 1, 1/2, (no label: 1), 1/4 become 1, 3/4, 1, 5/8 at alpha = 1/2; their running products:
    p1, p2, p4 = 1.0, 0.75, 0.75 * 0.625
    expected = torch.tensor([p1 + p2 + p4, p2 + p4, p4, p4])
    torch.testing.assert_close(dpace_weights(ce, w, 0.5), expected)


@pytest.mark.parametrize(
    ("right", "accepted", "correct"),
    [([1, 1, 1], 3, 3), ([1, 0, 1], 1, 2), ([0, 1, 1], 0, 2), ([0, 0, 0], 0, 0)],
)
def test_a_slot_without_label_neither_ends_nor_lengthens_what_is_accepted(
    right: list[int], accepted: int, correct: int
) -> None:
    config = small_config(hidden_size=8, vocab_size=8, mask_token_id=7, block_size=K, target_layer_ids=(1,))
    loss_mask = torch.tensor([1, 1, 1, 0, 1], dtype=torch.uint8)  # slot 3 of the block at 0 has no label
    batch = make_batch(config, Bucket(B=1, S=8, N=4, K=K, tile=4), [random_sample(config, 5, 0, loss_mask)])
    set_anchors(batch, [[0]])
    batch["input_ids"][0, :5] = torch.tensor([0, 1, 2, 3, 4])
    hidden = torch.zeros(1, 4, K - 1, 8)
    for slot, is_right in zip((0, 1, 3), right, strict=True):
        hidden[0, 0, slot, slot + 1 if is_right else 6] = 5.0
    found = loss_of(hidden, batch, TargetHead(torch.eye(8)), objective())
    assert found.slots[1].tolist() == [1, 1, 0, 1]
    assert (numbers(found)["accepted"], int(found.slots[0].sum())) == (accepted, correct)


@pytest.mark.parametrize("chunk_blocks", [1, 7, 64])
def test_the_chunk_of_logits_does_not_change_the_loss(chunk_blocks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    bucket = Bucket(B=1, S=64, N=16, K=8, tile=64)
    config = small_config(hidden_size=64, vocab_size=V, mask_token_id=V - 1, block_size=8, target_layer_ids=(1,))
    batch = make_batch(config, bucket, [random_sample(config, 64, 0)])
    hidden, head = torch.randn(1, 16, 7, 64, generator=generator), torch.randn(V, 64, generator=generator)
    found = loss_of(hidden, batch, TargetHead(head), objective(), chunk_rows=7 * chunk_blocks)
    labels, w = labels_and_weights(batch, 8)
    leaf = hidden.clone().requires_grad_()
    ce = torch.nn.functional.cross_entropy((leaf @ head.t()).flatten(0, 2), labels.flatten(), reduction="none")
    expected = (ce * (w * torch.exp(-torch.arange(7) / 4.0)).flatten()).sum()
    expected.backward()
    assert leaf.grad is not None and found.dh is not None
    torch.testing.assert_close(found.loss.float(), expected.detach(), rtol=2e-6, atol=0)
    torch.testing.assert_close(found.dh, leaf.grad, rtol=0, atol=1e-5 * leaf.grad.abs().max().item())


def small_step(weighting: str = "decay") -> Step:
    config = small_config()
    return make_step(config, random_target(config), objective(weighting, kl=0.2), max_positions=1100)


@pytest.mark.parametrize("weighting", ["decay", "uniform", "dpace"])
def test_micro_batches_of_two_buckets_add_up_to_one_batch(weighting: str) -> None:
    step = small_step(weighting)
    samples = [random_sample(step.config, length, length) for length in (20, 45, 64)]
    anchors = [[3, 9, 14], [0, 1, 2, 30, 44], [5, 61]]
    together = make_batch(step.config, Bucket(B=3, S=64, N=8, K=4, tile=32), samples)
    set_anchors(together, anchors)
    short = make_batch(step.config, Bucket(B=2, S=32, N=8, K=4, tile=32), samples[:1])
    set_anchors(short, anchors[:1])
    long = make_batch(step.config, Bucket(B=2, S=64, N=16, K=4, tile=32), samples[1:])
    set_anchors(long, anchors[1:])
    found, expected = step.outcome(short, long), step.outcome(together)
    for outcome in (found, expected):
        outcome["metrics"] = outcome["metrics"][:7]  # without slot_tokens and the counts of batches
        for name in step.params.shapes:
            outcome[name] /= outcome["denominator"]
    assert_close(found, expected, 1e-5)


def test_the_number_of_anchors_is_bounded_by_the_sample_not_by_the_bucket() -> None:
    # 187 supervised tokens in a row: 186 of them may start a block, in a bucket of any size.
    step = small_step()
    loss_mask = torch.zeros(200, dtype=torch.uint8)
    loss_mask[10:197] = 1
    sample = random_sample(step.config, 200, 0, loss_mask)
    tight = make_batch(step.config, Bucket(B=1, S=256, N=192, K=4), [sample])
    wide = make_batch(step.config, Bucket(B=1, S=1024, N=256, K=4), [sample])
    for batch in (tight, wide):
        assert batch["block_keep_mask"].sum() == 186
    found, expected = step.outcome(wide), step.outcome(tight)
    for outcome in (found, expected):
        outcome["metrics"] = outcome["metrics"][:7]
    assert_close(found, expected, 1e-5)


def only_at(length: int, *positions: int) -> Tensor:
    loss_mask = torch.zeros(length, dtype=torch.uint8)
    loss_mask[list(positions)] = 1
    return loss_mask


def test_a_row_without_supervision_adds_nothing() -> None:
    step = small_step()
    normal, silent = random_sample(step.config, 32, 0), random_sample(step.config, 32, 1, only_at(32))
    bucket = Bucket(B=2, S=32, N=16, K=4, tile=32)
    found = step.outcome(make_batch(step.config, bucket, [normal, silent]))
    expected = step.outcome(make_batch(step.config, bucket, [normal]))
    for outcome in (found, expected):
        del outcome["metrics"]  # its tokens are counted, nothing else
    assert_same_bits(found, expected)


@pytest.mark.parametrize("weighting", ["decay", "uniform", "dpace"])
@pytest.mark.parametrize("positions", [(), (10, 31)], ids=["nothing", "isolated"])
def test_a_batch_without_supervision_is_a_defined_step(weighting: str, positions: tuple[int, ...]) -> None:
    step = small_step(weighting)
    samples = [random_sample(step.config, 32, seed, only_at(32, *positions)) for seed in range(2)]
    batch = make_batch(step.config, Bucket(B=2, S=32, N=16, K=4, tile=32), samples)
    optimizer = AdamW(step.params, reference_ops(), OptimizerSettings(weight_decay=0.1))
    optimizer.lr.fill_(1e-3)
    before = step.params.weight.clone()
    found = step.outcome(batch)
    assert found["loss"] == 0
    assert found["denominator"] == 0
    assert all((found[name] == 0).all() for name in step.params.shapes)
    assert found["metrics"].isfinite().all()
    optimizer.update()
    assert torch.equal(step.params.weight, before)
    assert (int(optimizer.step), int(optimizer.skipped)) == (0, 1)
    means = step.parts.metrics.snapshot().read().means()
    assert math.isnan(means["loss"])  # there was none
    assert (means["accuracy"], means["accept_len"]) == (0.0, 0.0)
