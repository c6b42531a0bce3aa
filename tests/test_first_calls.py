"""The call that warms a step up is the eager twin of its replay, where it had the batch that is compared."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import pytest
import torch

from buffers.shapes import Bucket
from engine.graphs_ready import make_ready
from engine.laps import Laps
from engine.settings import load_settings
from engine.verification import EQUAL, to_compare
from graphs.executor import CaptureError
from graphs.fingerprint import Fingerprint
from graphs.record import Record, write_record
from tests.drafter_helpers import assert_same_bits
from tests.test_verification import BUCKETS, PRINTS, Case, record

SMALL, LARGE = BUCKETS


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    torch.set_num_threads(1)
    yield Case(monkeypatch, held_out=True)


def test_no_eager_step_is_run_again(case: Case) -> None:
    before = {name: value.clone() for name, value in case.engine.params.state().items()}
    assert case.build() == set(BUCKETS)
    case.loaded.clear()
    found = case.verify()
    assert {verified.how for verified in found.values()} == {EQUAL}
    assert [name for name in case.graphs.eager if not name.startswith("eval")] == []
    assert {name for name in case.graphs.replayed if not name.startswith("eval")} == {
        f"{kind} {bucket.name}" for kind in ("train", "add") for bucket in BUCKETS
    }
    assert not case.engine.metrics.sums.any() and not case.engine.params.grad.any()
    assert_same_bits(case.engine.params.state(), before)
    assert case.engine.optimizer is not None
    assert (int(case.engine.optimizer.step), int(case.engine.optimizer.skipped)) == (0, 0), "the update had no weight"


def test_of_one_batch_a_step_one_graph_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, adds=False)
    case.build()
    case.verify()
    assert sorted(case.graphs.replayed) == sorted(f"train {bucket.name}" for bucket in BUCKETS)
    assert case.graphs.eager == []


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda case: case.engine.gradients()["fc.weight"][0, 0].add_(1.0), "fc.weight"),
        (lambda case: case.engine.gradients()["norm.weight"].mul_(1.5), "norm.weight"),
        (lambda case: case.engine.metrics.slots.add_(1.0), "slots"),
        (lambda case: case.engine._denominator.add_(1.0), "denominator"),
    ],
)
def test_a_replay_that_is_not_the_first_call_is_told_by_its_tensors(
    case: Case, spoil: Callable[[Case], object], named: str
) -> None:
    case.build()
    case.graphs.broken = lambda name: spoil(case) if name.startswith("add") else None
    with pytest.raises(CaptureError, match=f"the replay differs from the eager step in {named} by"):
        case.verify()


def test_another_batch_is_compared_with_the_eager_step(case: Case) -> None:
    case.build()
    case.batches = case.batches[::-1]
    assert {verified.how for verified in case.verify().values()} == {EQUAL}
    assert case.graphs.eager.count(f"train {SMALL.name}") == 1


def test_a_first_call_holds_for_one_comparison(case: Case) -> None:
    case.build()
    for eager in (0, 1):
        case.verify()
        assert case.graphs.eager.count(f"train {LARGE.name}") == eager


def test_other_buckets_are_warmed_up_without_content(case: Case) -> None:
    case.load(next(batch for batch in case.batches if batch.bucket == LARGE))
    assert case.build("changed", record(LARGE)) == {SMALL}
    assert all(not tensor.any() for tensor in case.inputs[LARGE].values())
    assert all(not tensor.any() for inputs in case.eval_inputs.values() for tensor in inputs.values())
    assert any(tensor.any() for tensor in case.inputs[SMALL].values())


def test_a_bucket_of_a_later_epoch_is_compared_and_known_the_next_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.set_num_threads(1)

    def start(policy: str, prints: Mapping[Bucket, Fingerprint] = PRINTS) -> tuple[Case, Record]:
        case = Case(monkeypatch)
        epochs = [[b for b in case.batches if b.bucket == bucket] for bucket in (SMALL, LARGE)]
        record = make_ready(
            case.engine,
            chain.from_iterable(epochs),  # read once
            case.load,
            settings=load_settings(None, [f"run.output={tmp_path}", f"run.verify={policy}"]),
            fingerprints=prints,
            laps=Laps(),
            say=case.said.append,
        )
        assert case.graphs.eager == [] and case.said == []
        assert [bucket.verified for bucket in record.buckets] == [EQUAL, EQUAL]
        return case, record

    case, made = start("changed")
    assert {name.split()[1] for name in case.graphs.replayed} == {SMALL.name, LARGE.name}
    write_record(tmp_path, made)
    case, _ = start("changed")
    assert case.loaded == [] and case.graphs.replayed == []
    case, _ = start("changed", {**PRINTS, LARGE: PRINTS[LARGE].with_field("head_chunk", 7)})
    assert {batch.bucket for batch in case.loaded} == {LARGE}
    case, _ = start("always")
    assert {batch.bucket for batch in case.loaded} == {SMALL, LARGE}


def test_which_batches_will_be_compared_is_known_before(case: Case) -> None:
    def wanted(policy: str, *known: object) -> set[object]:
        return set(
            to_compare(
                case.engine,
                case.batches,
                policy=policy,
                fingerprints=PRINTS,
                known=record(*known) if known else None,  # type: ignore[arg-type]
            )
        )

    assert wanted("always", SMALL) == set(BUCKETS)
    assert wanted("changed") == set(BUCKETS)
    assert wanted("changed", SMALL) == {LARGE}
    assert wanted("never") == set()
