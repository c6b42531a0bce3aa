"""What a run tells while it trains: the machine's figures, the block on a terminal, lines elsewhere, nothing with quiet."""

import errno
import io
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from engine.held_out import HeldOut
from engine.metrics import MetricsSnapshot
from engine.progress import Display, block, step_line
from engine.reports import MetricsLog, make_console
from engine.run_log import RunLog
from engine.train import train
from engine.watch import Watch, device_share
from graphs.timing import StepTimes
from tests.run_helpers import LENGTHS, Killed, interrupt, kill, records, run, run_settings, training_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return training_dataset(tmp_path / "data")


RECORD: dict[str, Any] = {
    "step": 20,
    "epoch": 1,
    "loss": 2.5,
    "accuracy": 0.25,
    "accept_len": 0.75,
    "tokens_per_verification": 1.75,
    "padding": 0.125,
    "micro_batches": 10.0,
    "skipped_steps": 1,
    "tokens_per_s": 12345.6,
    "machine": {
        "seconds": 10.0,
        "device_s": {"forward and backward": 7.0, "update": 2.0},
        "host_s": {"waiting for input": 0.05},
        "memory_mib": {"device": 2048.0, "host": 512.0},
        "buckets": {"1x128x32": {"batches": 6}, "1x256x32": {"batches": 4}},
        "tokens_per_s_mean": 12000.0,
    },
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal() -> tuple[Terminal, Console]:
    file = Terminal()
    return file, Console(file=file, force_terminal=True, width=100, highlight=False, color_system=None)


def test_lines_hold_what_the_machine_did(data: Path, tmp_path: Path) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50,), first_sample=100)
    run(data, tmp_path / "run", f"data.eval_path={held_out}", "run.eval_every=4", "run.accumulation=2")
    machines = [record["machine"] for record in records(tmp_path / "run") if "loss" in record]
    buckets = [bucket for machine in machines for bucket in machine["buckets"].values()]
    assert sum(bucket["batches"] for bucket in buckets) == sum(bucket["timed"] for bucket in buckets) == 20
    assert sum(bucket["useful_tokens"] for bucket in buckets) == 2 * sum(LENGTHS)
    assert all(bucket["device_ms"] > 0 and bucket["slot_tokens"] >= bucket["useful_tokens"] for bucket in buckets)
    assert {"forward and backward", "update", "evaluation"} == {name for m in machines for name in m["device_s"]}
    asked = {"launching", "waiting for input", "evaluation", "checkpoints"}
    assert asked <= {name for m in machines for name in m["host_s"]}
    for machine in machines:
        assert 0 < device_share(machine) <= 1
        assert machine["memory_mib"]["host"] > 0 and machine["tokens_per_s_mean"] > 0


def test_speed_is_that_of_the_steps_and_the_mean_has_everything_in_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = training_dataset(tmp_path / "held-out", (50,), first_sample=100)
    evaluate = HeldOut.evaluate

    def slowly(self: HeldOut, engine: Any, step: int) -> dict[str, Any]:
        time.sleep(0.3)
        return evaluate(self, engine, step)

    monkeypatch.setattr(HeldOut, "evaluate", slowly)
    run(data, tmp_path / "run", f"data.eval_path={held_out}", "run.eval_every=4", "run.log_every=5", "run.save_every=0")
    lines = [record for record in records(tmp_path / "run") if "loss" in record]
    machines = [line["machine"] for line in lines]
    # Evaluated after steps 4, 8, 12 and 16; the last evaluation comes after the last line.
    assert [machine["aside_s"] >= 0.3 for machine in machines] == [True] * 4
    assert all(machine["aside_s"] == pytest.approx(machine["host_s"]["evaluation"]) for machine in machines)
    for line, machine in zip(lines, machines, strict=True):
        stepping_s = machine["seconds"] - machine["aside_s"]
        assert line["tokens_per_s"] == pytest.approx(line["useful_tokens"] / stepping_s)
    spent_s = sum(machine["seconds"] for machine in machines)
    tokens = sum(line["useful_tokens"] for line in lines)
    # The two clocks start one after the other.
    assert machines[-1]["tokens_per_s_mean"] == pytest.approx(tokens / spent_s, rel=0.1)


def test_a_line_waits_for_its_numbers_and_the_loop_does_not(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """As on a GPU, whose queue is behind: a line asked for is written when the next one is asked for."""
    written: list[tuple[int, int]] = []
    asking: list[int] = []
    monkeypatch.setattr(MetricsSnapshot, "ready", lambda self: False)
    ask, write = RunLog.ask, MetricsLog.write

    def asked(self: RunLog, *, step: int, epoch: int, lr: float) -> None:
        asking.append(step)
        ask(self, step=step, epoch=epoch, lr=lr)

    def wrote(self: MetricsLog, record: dict[str, Any]) -> None:
        if "loss" in record:
            written.append((record["step"], asking[-1]))
        write(self, record)

    monkeypatch.setattr(RunLog, "ask", asked)
    monkeypatch.setattr(MetricsLog, "write", wrote)
    run(data, tmp_path / "run", "run.log_every=4", "run.save_every=0")
    assert written == [(4, 8), (8, 12), (12, 16), (16, 20), (20, 20)]
    lines = [record for record in records(tmp_path / "run") if "loss" in record]
    assert sum(line["useful_tokens"] for line in lines) == 2 * sum(LENGTHS)


def test_a_generation_counts_anew() -> None:
    engine: Any = SimpleNamespace(device=torch.device("cpu"), executor=SimpleNamespace(times=StepTimes(None)))
    watch = Watch()
    for generation, spent in ((1, 3), (1, 5), (2, 2)):
        engine.generation = generation
        engine.executor.times.clear()
        for _ in range(spent):
            with engine.executor.times.measure("train 1x8x4"):
                pass
        found = watch.read(engine, {}, 0.0)
        assert found["generation"] == generation and found["device_s"]["forward and backward"] >= 0


def test_every_process_notes_how_it_came_and_went(data: Path, tmp_path: Path, after_step: Any) -> None:
    after_step(6, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "run")
    after_step(10, kill)
    with pytest.raises(Killed):
        run(data, tmp_path / "run")
    run(data, tmp_path / "run")
    events = [r for r in records(tmp_path / "run") if "event" in r]
    assert [(r["step"], r["event"], r["why"]) for r in events] == [
        (0, "started", "a new run"),
        (6, "ended", "interrupted"),
        (6, "started", "going on from step-00000006"),
        (8, "started", "going on from step-00000008"),
        (20, "ended", "finished"),
    ]
    assert events[0]["total_steps"] == 20 and events[0]["seconds"]["data"] >= 0
    assert [r["step"] for r in records(tmp_path / "run")] == sorted(r["step"] for r in records(tmp_path / "run"))


def test_elsewhere_it_is_lines(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(data, tmp_path / "run")
    told = capsys.readouterr().err
    assert "\x1b" not in told
    lines = [line for line in told.splitlines() if line.startswith("step ")]
    assert len(lines) == 7 and lines[-1] == step_line(records(tmp_path / "run")[-2], 20, 0.0)
    assert lines[0].startswith("step 3/20, epoch 1, ETA 0:0") and lines[-1].startswith(
        "step 20/20, epoch 2, ETA 0:00:00: "
    )


def test_quiet_says_nothing_and_writes_everything(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_settings(data, tmp_path / "run"), quiet=True)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    assert [r["step"] for r in records(tmp_path / "run") if "loss" in r] == [3, 6, 9, 12, 15, 18, 20]


class Gone(io.StringIO):
    """A stderr that is a terminal, or a pipe, until so many writes were made."""

    def __init__(self, error: OSError, writes: int, terminal: bool) -> None:
        super().__init__()
        self.error, self.left, self.terminal = error, writes, terminal

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("writes", [0, 4])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), BrokenPipeError(errno.EPIPE, "Broken pipe")]
)
def test_a_terminal_that_is_closed_does_not_end_the_run(
    data: Path, tmp_path: Path, error: OSError, writes: int, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stdout, gone = sys.stdout, Gone(error, writes, terminal)
    monkeypatch.setattr(sys, "stderr", gone)
    assert run(data, tmp_path / "run")["steps"] == 20
    assert gone.left < 0 and sys.stdout is stdout
    print("what a library warns of", file=sys.stderr)


def test_the_block_has_every_figure() -> None:
    file, console = on_terminal()
    console.print(block(25, 100, 3725.0, RECORD, {"1x256x32": 4, "1x128x32": 6}))
    told = file.getvalue()
    for figure in (
        "step 25/100",
        "25.0%",
        "epoch 2",
        "ETA 1:02:05",
        "loss 2.5000",
        "accept length 0.750",
        "1.750 tokens per verification",
        "1 skipped",
        "12,346 now",
        "12,000 mean",
        "padding 12.5%",
        "busy 90.0%",
        "input wait 5.00 ms a batch",
        "device 2.0 GiB, host 0.5 GiB",
        "1x128x32: 6   1x256x32: 4",
    ):
        assert figure in told, figure


def test_the_block_before_the_first_figures() -> None:
    file, console = on_terminal()
    console.print(block(0, 0, float("nan"), {}, {}))
    assert "ETA ?" in file.getvalue() and "run.log_every" in file.getvalue()


def test_on_a_terminal_figures_stay_and_lines_scroll_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.progress._SECONDS_BETWEEN", 0.0)
    file, console = on_terminal()
    display = Display(make_console(stderr=True), live=True, console=console)
    display.start()
    display.step(19, 100)
    display.figures(RECORD, 100)
    display.step(20, 100)
    display.say("step 20: held-out loss 2.0000")
    display.stop()
    display.stop()
    told = file.getvalue()
    assert "step 20: held-out loss 2.0000\n" in told.replace("\r", "")
    assert "step 20/100" in told and "1x128x32: 6" in told and step_line(RECORD, 100) not in told
    assert told.endswith("\x1b[?25h")  # the cursor is back
