"""Verify before use: which buckets are compared, on what, and what is said of the outcome. The replay is played by a stand-in."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from bench.cli import main
from buffers.batching import Batch, BatchPlan
from buffers.shapes import Bucket
from engine.engine import Engine
from engine.graphs_record import print_record, record_of
from engine.settings import ObjectiveSettings, OptimizerSettings
from engine.verification import CALLED, DOES_NOT_FIT, EQUAL, Feed, Verified, to_compare, verify_buckets
from graphs.executor import CaptureError
from graphs.fingerprint import BUFFERS, Fingerprint
from graphs.record import BucketRecord, Record
from graphs.steps import BuildReport, CallExecutor
from tests.drafter_helpers import CPU, make_batch, random_sample, random_target, random_weights, small_config
from tests.run_helpers import run, run_settings, training_dataset

BUCKETS = (Bucket(1, 128, 32, 4), Bucket(4, 256, 32, 4))
CONFIG = small_config()
PRINTS = {bucket: Fingerprint.of({"bucket": bucket.name, BUFFERS: 1}) for bucket in BUCKETS}


class Graphs:
    """Calls the steps, and says that it replays; `broken` is done after a replay, `fits` decides whether an eager step does."""

    how = "replayed"

    def __init__(self) -> None:
        self.steps: dict[str, Callable[[], object]] = {}
        self.times = SimpleNamespace(clear=lambda: None)
        self.broken: Callable[[str], object] = lambda name: None
        self.fits: Callable[[str], bool] = lambda name: True
        self.replayed: list[str] = []
        self.on_failure = "stop"
        self.called: dict[str, str] = {}
        self.eager: list[str] = []

    def add(self, name: str, step: Callable[[], object], *, group: str = "") -> None:
        self.steps[name] = step

    def build(self, *, before: Callable[[str], object], after: Callable[[str], object]) -> list[BuildReport]:
        for name, step in self.steps.items():
            before(name)
            step()
            after(name)
        return [BuildReport(name, self.how, 0.0, 0.0, 1.0) for name in self.steps]

    def run(self, name: str) -> None:
        self.replayed.append(name)
        self.steps[name]()
        self.broken(name)

    def call(self, name: str) -> None:
        self.eager.append(name)
        if not self.fits(name):
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.steps[name]()

    def how_of(self, name: str) -> str:
        return "called" if name in self.called else self.how

    def call_instead(self, name: str, why: str) -> None:
        self.called[name] = why

    def close(self) -> None:
        self.steps.clear()


class Case:
    """An engine on the CPU whose executor is a Graphs, and batches of samples for it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, held_out: bool = False, training: bool = True, adds: bool = True
    ) -> None:
        self.graphs = Graphs()
        monkeypatch.setattr("engine.engine.make_executor", lambda device: self.graphs)
        self.inputs = {bucket: make_batch(CONFIG, bucket, []) for bucket in BUCKETS}
        self.eval_inputs = {bucket: make_batch(CONFIG, bucket, []) for bucket in BUCKETS}
        self.held_out: Feed | None = None
        self.engine = Engine(
            CONFIG,
            random_target(CONFIG),
            BUCKETS,
            lambda bucket: self.inputs[bucket],
            device=CPU,
            objective=ObjectiveSettings(),
            optimizer=OptimizerSettings() if training else None,
            eval_inputs=(lambda bucket: self.eval_inputs[bucket]) if held_out else None,
            training=training,
            adds=adds,
        )
        self.engine.params.load_(random_weights(CONFIG))
        self.loaded: list[Batch] = []
        self.said: list[str] = []
        lengths = np.array([100, 200, 110, 210, 220, 90, 230])
        self.batches = BatchPlan(lengths, BUCKETS, seed=0).epoch(0)
        if held_out:
            self.held_out = Feed(BatchPlan(lengths[:3] + 5, BUCKETS, seed=1).epoch(0), self.load_held_out)

    def load(self, batch: Batch) -> None:
        self.loaded.append(batch)
        self.put(batch, self.inputs, first_sample=0)

    def load_held_out(self, batch: Batch) -> None:
        self.loaded.append(batch)
        self.put(batch, self.eval_inputs, first_sample=100)

    def put(self, batch: Batch, inputs: dict[Bucket, dict[str, Tensor]], first_sample: int) -> None:
        rows = [random_sample(CONFIG, row[0].stop, first_sample + row[0].sample_id) for row in batch.rows]
        for name, tensor in make_batch(CONFIG, batch.bucket, rows).items():
            inputs[batch.bucket][name].copy_(tensor)

    def build(self, policy: str = "always", known: Record | None = None) -> set[Bucket]:
        """Warms up on the batches that will be compared; of these buckets."""
        firsts = to_compare(self.engine, self.batches, policy=policy, fingerprints=PRINTS, known=known)
        self.engine.build({bucket: partial(self.load, batch) for bucket, batch in firsts.items()})
        return set(firsts)

    def verify(self, policy: str = "always", known: Record | None = None) -> dict[Bucket, Verified]:
        return verify_buckets(
            self.engine,
            self.batches,
            self.load,
            policy=policy,
            fingerprints=PRINTS,
            known=known,
            say=self.said.append,
            held_out=self.held_out,
        )


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    torch.set_num_threads(1)
    yield Case(monkeypatch)


def record(*buckets: Bucket, **fields: Any) -> Record:
    verified = {"verified": EQUAL, **fields}
    return Record(1, tuple(BucketRecord(b.name, PRINTS[b], "replayed", (), **verified) for b in buckets))


def test_every_bucket_is_compared_on_its_first_batch(case: Case) -> None:
    found = case.verify()
    assert {bucket: verified.how for bucket, verified in found.items()} == dict.fromkeys(BUCKETS, EQUAL)
    firsts = [next(b for b in case.batches if b.bucket == bucket) for bucket in BUCKETS]
    assert sorted(case.loaded, key=lambda b: b.bucket) == firsts
    assert len(case.graphs.replayed) == 4, "the graph that begins a step's sums and the one that adds, of both buckets"
    assert case.said == []
    assert not case.engine.metrics.sums.any()


def test_the_policies(case: Case) -> None:
    assert {verified.how for verified in case.verify("never").values()} == {""}
    assert case.loaded == []
    found = case.verify("changed", record(BUCKETS[0]))
    assert {verified.how for verified in found.values()} == {EQUAL}
    assert {batch.bucket for batch in case.loaded} == {BUCKETS[1]}
    case.loaded.clear()
    case.verify("changed", record(*BUCKETS, verified=""))
    assert {batch.bucket for batch in case.loaded} == set(BUCKETS), "known, but not as verified"
    case.loaded.clear()
    case.verify("always", record(*BUCKETS))
    assert {batch.bucket for batch in case.loaded} == set(BUCKETS)
    case.loaded.clear()
    case.verify("changed", None)
    assert {batch.bucket for batch in case.loaded} == set(BUCKETS)


def test_a_mismatch_names_the_bucket_and_the_worst_tensor(case: Case) -> None:
    def spoil(name: str) -> None:
        if name == f"add {BUCKETS[1].name}":
            case.engine.gradients()["layers.0.mlp.down_proj.weight"][3, 4] += 1.0

    case.graphs.broken = spoil
    with pytest.raises(
        CaptureError, match=r"bucket 4x256x32: the replay differs .* in layers\.0\.mlp\.down_proj\.weight by"
    ):
        case.verify()


def test_a_mismatch_is_called_instead_where_that_is_allowed(case: Case) -> None:
    bad = BUCKETS[1].name
    case.graphs.broken = lambda name: case.engine.gradients()["fc.weight"].mul_(1.5) if bad in name else None
    case.graphs.on_failure = "eager"
    found = case.verify()
    assert list(case.graphs.called) == [f"train {bad}"]
    assert found[BUCKETS[1]].refused and "the replay differs from the eager step in fc.weight" in found[BUCKETS[1]].how
    assert found[BUCKETS[0]] == Verified(EQUAL, found[BUCKETS[0]].seconds)
    last = [name for name in case.graphs.replayed if bad not in name]
    assert case.graphs.replayed[-2:] == last[-2:], "the others were captured anew, and are compared after that"
    assert any(bad in line and "called:" in line for line in case.said)

    reports = [BuildReport(f"{kind} {b.name}", "replayed", 0.0, 0.0, 1.0) for b in BUCKETS for kind in ("train", "add")]
    made = record_of(reports, PRINTS, found)
    assert [(b.how, bool(b.why), len(b.graphs)) for b in made.buckets] == [("replayed", False, 2), ("called", True, 0)]
    assert made.buckets[1].verified == "", "so it is compared again the next time"


def test_a_bucket_that_cannot_be_captured_again_beside_a_refused_one_is_called_too(case: Case) -> None:
    small, large = (bucket.name for bucket in BUCKETS)
    case.graphs.broken = lambda name: case.engine.gradients()["fc.weight"].mul_(1.5) if large in name else None
    case.graphs.on_failure = "eager"
    call_instead = case.graphs.call_instead

    def both(name: str, why: str) -> None:
        call_instead(name, why)
        call_instead(f"train {small}", "out of memory")

    case.graphs.call_instead = both  # type: ignore[method-assign]
    found = case.verify()
    assert found[BUCKETS[0]].refused and found[BUCKETS[0]].how.startswith("called: it could not be captured again")
    reports = [BuildReport(f"train {b.name}", "replayed", 0.0, 0.0, 1.0) for b in BUCKETS]
    assert {b.how for b in record_of(reports, PRINTS, found).buckets} == {"called"}
    assert any(small in line and "called" in line for line in case.said)


def test_a_wrong_loss_is_seen(case: Case) -> None:
    case.graphs.broken = lambda name: case.engine.metrics.sums[0].add_(1.0)
    with pytest.raises(CaptureError, match="differs from the eager step in (loss|metrics) by"):
        case.verify()


def test_kernels_that_are_not_deterministic_are_judged_by_their_own_noise(case: Case) -> None:
    step, calls = f"train {BUCKETS[0].name}", []
    original = case.graphs.steps[step]

    def noisy() -> None:
        original()
        calls.append(1)
        case.engine.gradients()["norm.weight"].mul_(1 + 1e-6 * (len(calls) % 3))

    case.graphs.steps[step] = noisy
    found = case.verify()
    assert "two eager steps" in found[BUCKETS[0]].how
    assert found[BUCKETS[1]].how == EQUAL
    assert case.said == [f"bucket {BUCKETS[0].name}: replay and eager step compared: {found[BUCKETS[0]].how}"]
    case.graphs.broken = lambda name: case.engine.gradients()["norm.weight"].mul_(1.001)
    with pytest.raises(CaptureError, match=r"norm\.weight"):
        case.verify()


def test_an_eager_step_that_does_not_fit_recomputes_its_layers(case: Case) -> None:
    case.graphs.fits = lambda name: case.engine.drafter.recompute == "layer"
    found = case.verify()
    assert {v.how for v in found.values()} == {
        f"{EQUAL}, the eager step with its layers recomputed to fit beside the pool"
    }
    assert case.engine.drafter.recompute == "none", "and the run goes on as it was set"
    assert len(case.said) == 2


def test_else_it_has_fewer_rows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.graphs.fits = lambda name: False
    tried = []
    compare = case.engine.verify_rows

    def few(bucket: Bucket, rows: int, **kind: Any) -> Any:
        tried.append(rows)
        if rows == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compare(bucket, rows, **kind)

    monkeypatch.setattr(case.engine, "verify_rows", few)
    case.batches = [batch for batch in case.batches if batch.bucket == BUCKETS[1]]
    found = case.verify()
    assert tried == [2, 1]
    assert "1 of 4 rows, more do not fit beside the pool" in found[BUCKETS[1]].how
    assert found[BUCKETS[0]].how == ""
    assert f"bucket {BUCKETS[0].name}: not verified, the data have no batch of it" in case.said

    case.graphs.broken = lambda name: case.engine.gradients()["fc.weight"].mul_(1.5)
    with pytest.raises(CaptureError, match=r"bucket 4x256x32: .* in fc\.weight"):
        case.verify()


def test_one_row_that_does_not_fit_is_not_called_verified(case: Case) -> None:
    case.graphs.fits = lambda name: False
    case.batches = [batch for batch in case.batches if batch.bucket == BUCKETS[0]]
    assert case.verify()[BUCKETS[0]].how == DOES_NOT_FIT
    case.graphs.fits = lambda name: True
    known = record(BUCKETS[0], verified=DOES_NOT_FIT)
    assert case.verify("changed", known)[BUCKETS[0]].how == EQUAL, "nor the next time"


def test_rows_that_are_left_out_are_empty_in_the_replay(case: Case) -> None:
    batch = next(batch for batch in case.batches if batch.bucket == BUCKETS[1])
    case.load(batch)
    difference = case.engine.verify_rows(BUCKETS[1], 2)
    assert difference is None or difference.relative < 1e-4
    seen: Tensor = case.inputs[BUCKETS[1]]["row_lengths"]
    assert seen.tolist()[2:] == [0, 0] and all(seen[:2] > 0)


def test_without_a_gpu_there_is_nothing_to_compare(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case.graphs, "how", "called", raising=False)
    assert {verified.how for verified in case.verify().values()} == {CALLED}
    assert case.loaded == []


# Evaluation


@pytest.fixture
def evaluating(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    torch.set_num_threads(1)
    yield Case(monkeypatch, held_out=True)


def hows(found: dict[Bucket, Verified]) -> list[tuple[str, str]]:
    return [(found[bucket].how, found[bucket].held_out) for bucket in BUCKETS]


def test_evaluation_is_compared_on_its_own_batches(evaluating: Case) -> None:
    assert hows(evaluating.verify()) == [(EQUAL, EQUAL)] * 2
    assert sorted(name for name in evaluating.graphs.replayed if name.startswith("eval")) == [
        f"eval {bucket.name}" for bucket in BUCKETS
    ]
    assert all(evaluating.eval_inputs[bucket]["row_lengths"].any() for bucket in BUCKETS)
    assert not evaluating.engine.eval_metrics.sums.any(), "and forgotten"
    assert evaluating.said == []


@pytest.mark.parametrize(
    ("spoil", "tensor"),
    [
        (lambda metrics: metrics.sums[0].add_(1e-3), "held-out (loss|metrics)"),
        (lambda metrics: metrics.sums[4].add_(1.0), "held-out metrics"),
        (lambda metrics: metrics.slots[0, 1].add_(1.0), "held-out slots"),
        (lambda metrics: metrics.blocks_by_accepted[2].add_(1.0), "held-out accepted"),
    ],
)
def test_a_wrong_number_of_an_evaluation_is_seen(evaluating: Case, spoil: Any, tensor: str) -> None:
    """The loss, the accepted length, the accuracy of a slot, the histogram of accepted lengths."""
    wrong = f"eval {BUCKETS[1].name}"
    evaluating.graphs.broken = lambda name: spoil(evaluating.engine.eval_metrics) if name == wrong else None
    with pytest.raises(CaptureError, match=f"bucket 4x256x32: the replay differs from the eager step in {tensor} by"):
        evaluating.verify()


def test_an_evaluation_that_is_wrong_is_called_where_that_is_allowed_and_training_is_replayed(
    evaluating: Case,
) -> None:
    bad = f"eval {BUCKETS[0].name}"
    evaluating.graphs.broken = lambda name: evaluating.engine.eval_metrics.sums.mul_(2) if name == bad else None
    evaluating.graphs.on_failure = "eager"
    found = evaluating.verify()
    assert list(evaluating.graphs.called) == [bad]
    assert found[BUCKETS[0]].how == EQUAL and found[BUCKETS[1]].held_out == EQUAL
    assert found[BUCKETS[0]].held_out_refused and "called: bucket 1x128x32" in found[BUCKETS[0]].held_out
    kinds = ("train", "add", "eval")
    reports = [BuildReport(f"{kind} {b.name}", "replayed", 0.0, 0.0, 1.0) for b in BUCKETS for kind in kinds]
    made = record_of(reports, PRINTS, found)
    assert [(b.how, len(b.graphs), b.verified) for b in made.buckets] == [
        ("replayed", 2, EQUAL),
        ("replayed", 3, EQUAL),
    ]
    assert made.buckets[0].held_out.startswith("called: ") and made.others == ()
    evaluating.graphs.called.clear()
    evaluating.graphs.broken = lambda name: None
    evaluating.loaded.clear()
    assert hows(evaluating.verify("changed", made)) == [(EQUAL, EQUAL)] * 2
    assert [batch.bucket for batch in evaluating.loaded] == [BUCKETS[0]], "only what was refused is compared again"


def test_an_evaluation_that_could_not_be_captured_is_told_with_the_reason(
    evaluating: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, why = f"eval {BUCKETS[0].name}", "could not finish warming up eval 1x128x32: it waits"
    evaluating.graphs.called[bad] = why
    found = evaluating.verify()
    assert hows(found) == [(EQUAL, CALLED), (EQUAL, EQUAL)]
    names = [f"{kind} {b.name}" for b in BUCKETS for kind in ("train", "add", "eval")]
    reports = [BuildReport(n, "called" if n == bad else "replayed", 0.0, 0.0, 1.0, why=why * (n == bad)) for n in names]
    made = record_of(reports, PRINTS, found)
    assert [b.held_out for b in made.buckets] == [f"called: {why}", EQUAL]
    assert [len(b.graphs) for b in made.buckets] == [2, 3]
    print_record(made, Console(width=400))
    assert f"{EQUAL}; held-out: called: {why}" in capsys.readouterr().out


def test_the_policies_hold_for_evaluation_too(evaluating: Case) -> None:
    assert hows(evaluating.verify("never")) == [("", "")] * 2
    assert evaluating.loaded == []
    evaluating.verify("changed", record(*BUCKETS))
    assert len(evaluating.loaded) == 2, "without held-out data nothing was compared of it then"
    evaluating.loaded.clear()
    assert hows(evaluating.verify("changed", record(*BUCKETS, held_out=EQUAL))) == [(EQUAL, EQUAL)] * 2
    assert evaluating.loaded == []


def test_an_evaluation_that_does_not_fit_has_fewer_rows(evaluating: Case) -> None:
    evaluating.graphs.fits = lambda name: not name.startswith("eval")
    found = evaluating.verify()
    assert found[BUCKETS[0]].held_out == DOES_NOT_FIT
    assert found[BUCKETS[1]].held_out.startswith("2 of 4 rows, more do not fit beside the pool: ")
    assert {verified.how for verified in found.values()} == {EQUAL}
    assert f"bucket {BUCKETS[0].name}, held-out: replay and eager step compared: {DOES_NOT_FIT}" in evaluating.said
    evaluating.graphs.broken = lambda name: evaluating.engine.eval_metrics.sums.mul_(1.5)
    with pytest.raises(CaptureError, match="4x256x32: the replay differs from the eager step in held-out loss"):
        evaluating.verify()


def test_a_drafter_that_is_only_evaluated_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, held_out=True, training=False)
    assert hows(case.verify()) == [("", EQUAL)] * 2
    assert {name.split()[0] for name in case.graphs.replayed} == {"eval"}


class Replays(CallExecutor):
    """Says that it replays; what `broken` does comes after every step of that name's beginning."""

    how = "replayed"

    def __init__(self, beginning: str, broken: Callable[[], object]) -> None:
        super().__init__()
        self._beginning, self._broken = beginning, broken

    def run(self, name: str) -> None:
        super().run(name)
        if name.startswith(self._beginning):
            self._broken()


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """spoilt(beginning): from here on every engine's steps of such names count one accepted slot too many."""
    engines: list[Engine] = []
    assembled = Engine._assemble

    def assemble(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        engines.append(engine)
        return assembled(engine, *args, **kwargs)

    def spoil(beginning: str) -> None:
        monkeypatch.setattr(Engine, "_assemble", assemble)
        broken = lambda: engines[-1].eval_metrics.sums[4].add_(1.0)  # noqa: E731
        monkeypatch.setattr("engine.engine.make_executor", lambda device: Replays(beginning, broken))

    return spoil


@pytest.mark.usefixtures("one_thread")
def test_no_run_and_no_evaluation_begins_with_graphs_that_evaluate_wrong(
    tmp_path: Path, spoilt: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    data = training_dataset(tmp_path / "data")
    held_out = training_dataset(tmp_path / "held-out", (50, 140), first_sample=100)
    run(data, tmp_path / "sound", "run.max_steps=2")
    config = tmp_path / "run.toml"
    config.write_text(run_settings(data, tmp_path / "run", f"data.eval_path={held_out}").to_toml())
    spoilt("eval ")
    wrong = "the replay differs from the eager step in held-out "
    for command in (["train", str(config)], ["graphs", "build", str(config)]):
        assert main(command) == 1
        assert wrong in capsys.readouterr().err
        assert not (tmp_path / "run" / "graphs.json").exists()
    evaluate = ["eval", str(tmp_path / "sound"), str(held_out), "--config", str(config)]
    assert main(evaluate) == 1
    assert wrong in capsys.readouterr().err
    assert main([*evaluate, "--set", "run.verify=never", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verified"] == {}
