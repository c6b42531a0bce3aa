"""A training run and the demo on the GPU: every bucket verified and replayed, nothing allocated or compiled on the way, and
both kinds of compiled attention learn the same."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from buffers.batching import Batch
from buffers.shapes import Bucket
from buffers.staging import InputPipeline
from engine.checking import CheckFailed
from engine.demo import demo_settings, run_demo
from engine.engine import Engine
from engine.model import Drafter
from engine.optimizer import AdamW
from engine.profiling import STEPS as STEPS_RECORDED
from engine.profiling import WARM_UP, _all_threads
from engine.report_page import write_report
from engine.run import TrainingRun
from engine.settings import Settings
from engine.train import train
from graphs.executor import GraphExecutor
from graphs.guards import host_sync_is_an_error
from graphs.parity import Difference
from graphs.pool_poison import CLEAN, fill_pool
from graphs.steps import BuildReport
from tests.drafter_helpers import assert_same_bits

STEPS = 60


@dataclass(frozen=True)
class Demo:
    """The demo's folder, whose data the other runs train on, and its figures."""

    folder: Path
    figures: dict[str, Any]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo") / "out"
    return Demo(folder, run_demo(folder, steps=150, seed=0, device="cuda"))


@dataclass(frozen=True)
class Run:
    """What train() returned, the losses it logged, and what every bucket's verification found."""

    figures: dict[str, Any]
    losses: list[float]
    verified: dict[str, Difference | None]


def trained(demo: Demo, out: Path, attention: Literal["flex", "triton"], *, packing: bool = False) -> Run:
    settings = demo_settings(demo.folder, steps=STEPS, seed=0, device="cuda")
    settings = replace(
        settings,
        model=replace(settings.model, attention=attention),
        buckets=replace(settings.buckets, packing=packing),
        data=replace(settings.data, eval_path=""),
        run=replace(settings.run, output=str(out), log_every=10, eval_every=0, accumulation=2),
    )
    verified = {}
    verify = Engine.verify

    def noted(engine: Engine, bucket: Bucket, *, held_out: bool = False) -> Difference | None:
        verified[bucket.name] = verify(engine, bucket, held_out=held_out)
        return verified[bucket.name]

    steps = TrainingRun.steps

    def watched(run: TrainingRun) -> Iterator[tuple[Batch, ...]]:
        for batches in steps(run):
            with host_sync_is_an_error():  # until the loop asks for the next step
                yield batches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "verify", noted)
        patch.setattr(TrainingRun, "steps", watched)
        figures = train(settings)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Run(figures, [record["loss"] for record in records if "loss" in record], verified)


@pytest.fixture(scope="module")
def flex(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(demo, tmp_path_factory.mktemp("flex"), "flex")


@pytest.fixture(scope="module")
def triton(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(demo, tmp_path_factory.mktemp("triton"), "triton")


@pytest.fixture(scope="module")
def packed(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(demo, tmp_path_factory.mktemp("packed"), "triton", packing=True)


@pytest.fixture(scope="module")
def packed_flex(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(demo, tmp_path_factory.mktemp("packed-flex"), "flex", packing=True)


def test_the_demo_decodes_the_targets_own_text(demo: Demo) -> None:
    figures = demo.figures
    assert figures["differing_tokens"] == 0
    assert figures["steps"] == 150
    assert figures["how"] == "replayed"
    assert figures["tokens_per_verification_after"] > figures["tokens_per_verification_before"] + 0.2
    assert all(Path(figures[key]).exists() for key in ("drafter", "metrics", "picture"))


@pytest.mark.parametrize("kind", ["flex", "triton", "packed", "packed_flex"])
def test_a_run_is_replayed_and_costs_no_sync_no_allocation_and_no_compilation(
    kind: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(kind)
    figures = run.figures
    assert figures["steps"] == STEPS
    assert figures["how"] == "replayed"
    assert {row["how"] for row in figures["buckets"]} == {"replayed"}
    # The last step of an epoch may have one batch only.
    assert STEPS < sum(row["batches"] for row in figures["buckets"]) <= 2 * STEPS
    assert all(row["device_ms"] > 0 for row in figures["buckets"] if row["batches"])
    assert (figures["device_allocations"], figures["compilations"]) == (0, 0)
    assert (figures["skipped_steps"], figures["skipped_samples"]) == (0, [])
    assert run.verified == {row["bucket"]: None for row in figures["buckets"]}
    assert len(run.losses) == STEPS // 10
    assert run.losses[-1] < 0.8 * run.losses[0]


@pytest.mark.parametrize("kind", ["flex", "triton"])
def test_the_page_of_a_replayed_run(kind: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(kind)
    page = Path(write_report(Path(run.figures["drafter"]).parent)["report"]).read_text()
    graphs = page.split("Graphs of the last generation", 1)[1].split("</section>")[0]
    for row in run.figures["buckets"]:
        assert f"<td>{row['bucket']}</td><td>replayed</td><td>equal bits</td>" in graphs
    assert "device, held by torch" in page
    for phase in ("capture", "compile", "verify", "device: update", "device: idle", "loop: launching"):
        assert phase in page


def test_flex_and_triton_learn_the_same(flex: Run, triton: Run) -> None:
    """The same batches and anchors in bf16, whose roundings differ: the losses stay together."""
    assert [row["bucket"] for row in flex.figures["buckets"]] == [row["bucket"] for row in triton.figures["buckets"]]
    assert flex.losses == pytest.approx(triton.losses, rel=0.02)


def test_flex_and_triton_learn_the_same_from_packed_rows(packed_flex: Run, packed: Run) -> None:
    assert [row["bucket"] for row in packed_flex.figures["buckets"]] == [
        row["bucket"] for row in packed.figures["buckets"]
    ]
    assert packed_flex.losses == pytest.approx(packed.losses, rel=0.02)


def test_the_drafter_of_a_run_is_the_same_whatever_attends(flex: Run, triton: Run) -> None:
    for run in (flex, triton):
        assert (Path(run.figures["drafter"]) / "model.safetensors").is_file()
    assert flex.figures["final"]["accuracy"] == pytest.approx(triton.figures["final"]["accuracy"], abs=0.02)


def short_run(demo: Demo, out: Path, **changes: Any) -> Settings:
    settings = demo_settings(demo.folder, steps=STEPS, seed=0, device="cuda")
    run = replace(settings.run, output=str(out), max_steps=20, eval_every=0, **changes)
    return replace(settings, data=replace(settings.data, eval_path=""), run=run)


@pytest.mark.parametrize("attention", ["triton", "flex"])
def test_check_finds_nothing_in_a_sound_run_which_is_the_unchecked_one(
    demo: Demo, tmp_path: Path, attention: Literal["triton", "flex"]
) -> None:
    runs = {}
    for name, every in (("plain", 0), ("checked", 5)):
        settings = short_run(demo, tmp_path / name, check_every=every, accumulation=2)
        runs[name] = train(replace(settings, model=replace(settings.model, attention=attention)))
    checks = runs["checked"]["checks"]
    assert (checks["steps"], checks["compared"]) == (20, 4)
    assert checks["poisoned_mib"] > 1
    assert (runs["checked"]["device_allocations"], runs["checked"]["compilations"]) == (0, 0)
    plain, checked = (load_file(Path(run["drafter"]) / "model.safetensors") for run in runs.values())
    assert_same_bits(checked, plain)


def test_check_names_the_line_that_waits(demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Engine.update

    def waits(self: Engine, lr: float) -> None:
        update(self, lr)
        self.metrics.sums[0].item()

    monkeypatch.setattr(Engine, "update", waits)
    with pytest.raises(CheckFailed, match=r"step 1: expected no wait of the host .* first at .*test_train\.py:\d+"):
        train(short_run(demo, tmp_path / "run", check_every=5))


def test_check_names_the_loaders_line_that_waits(demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = InputPipeline._fill
    on_device = torch.ones((), device="cuda")

    def waits(self: InputPipeline, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            on_device.item()
        return fill(self, *args)

    monkeypatch.setattr(InputPipeline, "_fill", waits)
    with pytest.raises(CheckFailed, match=r"step \d+: expected no wait of the host .* first at .*test_train\.py:\d+"):
        train(short_run(demo, tmp_path / "run", check_every=5))


def test_check_counts_what_a_step_allocates(demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Engine.update

    def allocates(self: Engine, lr: float) -> None:
        torch.ones(3, device=self.device)
        update(self, lr)

    monkeypatch.setattr(Engine, "update", allocates)
    with pytest.raises(CheckFailed, match=r"step 1: expected no allocation on the device, found 1;"):
        train(short_run(demo, tmp_path / "run", check_every=5))


def stale_nan() -> torch.Tensor:
    """0, or NaN when fresh memory is NaN from end to end."""
    poisoned = torch.empty(2**20, device="cuda").isnan().all().float()
    return 0 * poisoned / (1 - poisoned)


@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (Drafter, "__call__", "--check's NaN from the graphs' pool, so a step reads memory that it has not written"),
        (AdamW, "update", "the gradients are finite, so the update diverges or reads memory of its pool"),
    ],
)
def test_check_finds_a_captured_step_that_reads_what_it_has_not_written(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, told: str
) -> None:
    """The memory holds zeros until --check looks: nothing else would notice."""
    build, right = GraphExecutor.build, getattr(owner, name)

    def build_over_zeros(self: GraphExecutor, **calls: Any) -> list[BuildReport]:
        reports = build(self, **calls)
        assert fill_pool(self.device, self._pool, CLEAN) > 0
        return reports

    def careless(self: Any, *args: Any) -> Any:
        stale = stale_nan() if torch.cuda.is_current_stream_capturing() else 0.0  # what is called is beside the point
        result = right(self, *args)
        if owner is AdamW:
            self.grad_norm += stale
            return None
        return result + stale

    monkeypatch.setattr(GraphExecutor, "build", build_over_zeros)
    monkeypatch.setattr(owner, name, careless)
    with pytest.raises(CheckFailed, match=f"step 1: expected finite numbers, found NaN .*{told}"):
        train(short_run(demo, tmp_path / "run", check_every=5))


def test_a_profile_has_every_phase_by_name_and_the_kernels_of_the_replays(demo: Demo, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    settings = short_run(demo, tmp_path / "run", log_every=4, save_every=10)
    figures = train(settings, profile=trace)
    events = json.loads(trace.read_text())["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert {f"step {number}" for number in range(WARM_UP + 1, WARM_UP + STEPS_RECORDED + 1)} <= set(ranges)
    assert ranges.count("replay update") == STEPS_RECORDED
    buckets = {row["bucket"] for row in figures["buckets"]}
    replayed = {name.removeprefix("replay train ") for name in ranges if name.startswith("replay train ")}
    staged = {name.removeprefix("stage ") for name in ranges if name.startswith("stage ")}
    assert replayed and replayed <= buckets and replayed <= staged
    assert {"log", "checkpoint"} <= set(ranges)
    if _all_threads() is not None:
        assert any(name.startswith("read ") and "samples" in name for name in ranges)
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert len(kernels) > 20 * STEPS_RECORDED
    # AdamW's kernel (engine/ops/adamw.py): what a graph runs is in the trace, not its launch alone.
    assert kernels.count("_update") == STEPS_RECORDED
