"""graphs build and status on the GPU: what is counted, measured and estimated, verification where memory is short, and a second
start that compiles nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from bench.cli import main
from bench.subjects import workload_subject
from bench.temporary_data import write_samples
from bench.workloads import WORKLOADS, Workload
from buffers.shapes import Bucket
from engine.engine import Engine
from engine.memory_estimate import GRAPH_EXEC, estimate
from engine.run import TrainingRun
from engine.settings import load_settings
from engine.verification import EQUAL, ROWS_TOLERANCE, Feed, verify_buckets
from graphs.executor import CaptureError, GraphExecutor
from graphs.nodes import count_kernels, upload
from graphs.pool_model import MIB
from graphs.record import read_record
from tests.gpu.engine_helpers import BUCKETS, CUDA, Built, build, medium_config

ROOT = Path(__file__).parent.parent.parent
MODEL = Workload("medium", 512, 1536, 8, 8192, S=512, N=128, K=8)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    write_samples(folder / "data", MODEL, (100, 250, 500, 900, 120, 480), CUDA, with_target=True)
    settings = load_settings(
        None,
        [
            f"data.path={folder / 'data'}",
            f"run.output={folder / 'run'}",
            f"run.cache={folder / 'cache'}",
            "run.device=cuda",
            "model.block_size=8",
            "buckets.num_anchors=128",
            "buckets.lengths=128,512,1024",
            "buckets.max_rows=2",
        ],
    )
    (folder / "run.toml").write_text(settings.to_toml())
    return folder / "run.toml"


def started(config: Path) -> dict[str, Any]:
    """`graphs build` in a process of its own; the caches are the configuration's."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    program = "import sys; from bench.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "graphs", "build", str(config), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def test_a_second_start_compiles_nothing_and_what_is_built_is_fresh(config: Path) -> None:
    first = started(config)
    assert first["kernels_compiled"] > 5
    second = started(config)
    assert second["kernels_compiled"] == 0
    assert main(["graphs", "status", str(config)]) == 0
    assert main(["graphs", "status", str(config), "--set", "model.head_chunk=1024"]) == 3
    for row in second["buckets"]:
        assert row["how"] == "replayed"
        assert row["verified"] == EQUAL
        assert row["nodes"] > 50
        assert row["host_ms_saved"] > 0
        assert row["eager_ms"] > 0 and row["replay_ms"] > 0 and row["exec_mib"] >= 0
        graphs = len(row["graphs"])
        assert row["exec_mib"] <= graphs * GRAPH_EXEC / MIB, (
            "an estimate below what is taken lets in plans that do not fit"
        )
        assert row["worth"] != "not measured"
    assert {"compile", "capture", "verify", "measure"} <= second["phases_s"].keys()
    record = read_record(config.parent / "run")
    assert record is not None
    assert [graph.name.split()[0] for graph in record.buckets[0].graphs] == ["train"]
    # The largest bucket is captured first, and the others into the same pool.
    pool, estimate = (sum(row[key] for row in second["buckets"]) for key in ("pool_mib", "estimate_mib"))
    assert pool == pytest.approx(estimate, rel=0.1, abs=64)
    expected, held = second["estimate"]["reserved_mib"], second["reserved_mib"]
    # Beside, and much for a model this small: workspaces of further streams and half-used segments of the allocator.
    assert held == pytest.approx(expected, rel=0.1, abs=192)
    caches = list((config.parent / "cache").iterdir())
    assert len(caches) == 1
    (caches[0] / "cache.json").write_text("{")
    assert started(config)["kernels_compiled"] == first["kernels_compiled"], "a damaged cache is built again"


def test_what_was_verified_is_not_verified_again_unless_it_must(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[str] = []
    verify = Engine.verify

    def noted(engine: Engine, bucket: Bucket, **kind: Any) -> Any:
        verified.append(bucket.name)
        return verify(engine, bucket, **kind)

    monkeypatch.setattr(Engine, "verify", noted)
    output = config.parent / "policies"
    for changes, expected in (
        (["run.verify=changed"], 3),
        (["run.verify=changed"], 0),
        (["run.verify=changed", "buckets.lengths=128,512,1152"], 1),
        (["run.verify=never"], 0),
        (["run.verify=always"], 3),
    ):
        verified.clear()
        sets = [word for change in (f"run.output={output}", *changes) for word in ("--set", change)]
        assert main(["graphs", "build", str(config), *sets]) == 0
        assert len(set(verified)) == expected, changes


def test_a_start_runs_every_eager_step_once(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that warms a step up is what its replay is compared with."""
    called: list[str] = []
    call = GraphExecutor.call

    def noted(executor: GraphExecutor, name: str) -> None:
        called.append(name)
        call(executor, name)

    monkeypatch.setattr(GraphExecutor, "call", noted)
    settings = load_settings(config, [f"run.output={config.parent / 'once'}", "run.max_steps=1", "run.accumulation=2"])
    with TrainingRun(settings, resume=False) as run:
        assert called == []
        assert {bucket.verified for bucket in run.graphs.buckets} == {EQUAL}
        assert all(len(bucket.graphs) == 2 for bucket in run.graphs.buckets)
        held = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        assert held - torch.cuda.memory_reserved() <= 8 * MIB, "what calling and comparing took is given back"


@pytest.mark.parametrize("mode", ["none", "mlp", "layer"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_estimate_follows_the_code(mode: str, precision: str) -> None:
    settings = load_settings(None, [f"model.recompute={mode}", f"run.precision={precision}"])
    workload = replace(WORKLOADS["W1"], vocab_size=16384, N=256)
    expected = estimate(settings, workload.config(), [workload.bucket])
    with workload_subject(workload, settings, CUDA) as subject:
        assert subject.report.pool_mib == pytest.approx(expected.pool / MIB, rel=0.15)


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    made = build(medium_config(), BUCKETS, precision="bf16", attention="triton", evaluate=True)
    yield made
    made.engine.close()


def verify(made: Built, bucket: Bucket) -> tuple[str, str]:
    """How training and how evaluation compare."""

    class One:
        """Stands for a batch: the inputs that hold it are loaded by its bucket."""

        def __init__(self) -> None:
            self.bucket = bucket

    found = verify_buckets(
        made.engine,
        [One()],  # type: ignore[list-item]
        lambda batch: made.inputs.load(batch.bucket, seed=0),
        policy="always",
        fingerprints={},
        known=None,
        say=lambda text: None,
        held_out=Feed([One()], lambda batch: made.inputs.load(batch.bucket, seed=0)),  # type: ignore[list-item]
    )
    return found[bucket].how, found[bucket].held_out


def test_fewer_rows_are_the_same_but_for_rounding(built: Built) -> None:
    bucket = BUCKETS[2]
    for rows in (1, 2):
        built.inputs.load(bucket, seed=0)
        difference = built.engine.verify_rows(bucket, rows)
        assert difference is None or difference.relative < ROWS_TOLERANCE["bf16"], difference


def test_verification_where_the_eager_step_does_not_fit(built: Built) -> None:
    bucket = BUCKETS[-1]
    assert verify(built, bucket) == (EQUAL, EQUAL)
    torch.cuda.empty_cache()
    held, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
    try:
        torch.cuda.set_per_process_memory_fraction((held + 24 * MIB) / total)
        how, held_out = verify(built, bucket)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "beside the pool" in how, how
    assert "beside the pool" in held_out or held_out == EQUAL, held_out
    assert torch.cuda.memory_reserved() <= held + 2 * MIB, "and its memory is given back"
    assert verify(built, bucket) == (EQUAL, EQUAL)


def test_a_graph_of_other_code_is_found_out(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = built.engine.drafter
    monkeypatch.setattr(drafter, "config", replace(drafter.config, rms_norm_eps=0.1))
    with pytest.raises(CaptureError, match=f"bucket {BUCKETS[0].name}: the replay differs from the eager step in "):
        verify(built, BUCKETS[0])


def test_an_evaluation_of_other_code_is_found_out(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of the evaluation alone: the training graphs are what their eager step is."""
    engine, bucket = built.engine, BUCKETS[0]
    built.inputs.load(bucket, seed=0)
    assert engine.verify(bucket, held_out=True) is None
    # What the eager evaluation runs from here on; the executor holds the captured one beside it.
    monkeypatch.setitem(getattr(engine.executor, "_steps"), f"eval {bucket.name}", lambda: None)  # noqa: B009
    assert engine.verify(bucket) is None
    with pytest.raises(
        CaptureError, match=f"bucket {bucket.name}: the replay differs from the eager step in held-out "
    ):
        verify(built, bucket)


@pytest.mark.parametrize("kernels", [500, 4000])
def test_the_first_replay_of_a_graph_on_the_device_takes_no_more_memory(kernels: int) -> None:
    """So exec_mib is what an executable graph takes. Prints it (pytest -s): what GRAPH_EXEC has to hold."""

    def free_mib() -> float:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(CUDA)[0] / MIB

    x = torch.zeros(1000, device=CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.add_(1)
    graphs = [torch.cuda.CUDAGraph(keep_graph=True) for _ in range(4)]
    for graph in graphs:
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(kernels):
                x.add_(1)
    steps = [free_mib()]
    for graph in graphs:
        graph.instantiate()
        assert upload(graph.raw_cuda_graph_exec(), stream.cuda_stream)
        steps.append(free_mib())
    for graph in graphs:
        graph.replay()
    after = free_mib()
    taken = [a - b for a, b in pairwise(steps)]
    print(f"executable graphs of {kernels} kernels took {taken} MiB, their first replays {steps[-1] - after}")
    assert x[0].item() == 1 + 4 * kernels
    assert max(taken) * MIB <= GRAPH_EXEC * kernels / 500
    assert steps[-1] - after <= 2, "a replay's memory was not taken when it was put on the device"


def test_kernels_of_a_graph_are_counted() -> None:
    x = torch.zeros(1000, device=CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            x.add_(1)
    assert count_kernels(graph.raw_cuda_graph()) == 3
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    assert x[0].item() == 4
