"""docs/tutorial.md as it stands: every block in order, in an empty folder, on the CPU with a tiny target."""

import contextlib
import io
import json
import math
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from engine.conversations import parse_record
from engine.decode_prompts import one_thread
from tests.pages import NOT_RUN, ROOT, blocks, commands

pytest.importorskip("transformers")
from tests.tutorial_target import save_tutorial_target

PAGE = ROOT / "docs" / "tutorial.md"
# What is another thing here than on the page.
INSTEAD = {
    "Qwen/Qwen3-0.6B": "tiny-qwen3",
    '"tiny-qwen3", 256, 16': '"tiny-qwen3", 64, 16',  # new tokens of an answer
    "token_budget = 32768": "token_budget = 2048",  # a row a step
    "--max-new-tokens 128": "--max-new-tokens 32",
    "3e-4": "5e-3",  # a tiny drafter learns at once
}
STEPS_AFTER_THE_INTERRUPT = 60


def substituted(text: str) -> str:
    for old, new in INSTEAD.items():
        text = text.replace(old, new)
    return text


@dataclass
class Reader:
    """Somebody who follows the page in `folder`: what was typed, and what was answered to it."""

    folder: Path
    typed: list[tuple[str, ...]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    training: subprocess.Popen[str] | None = None

    def follow(self) -> None:
        """The whole page."""
        for block in blocks(PAGE):
            text = substituted(block.text)
            if block.file is not None:
                Path(block.file).write_text(text)
            elif block.language == "bash":
                for words in commands(text):
                    if not any(tuple(words[: len(start)]) == start for start in NOT_RUN):
                        self.type(words)

    def type(self, words: list[str]) -> None:
        """One command. `train run.toml` runs in the background at first; the second one comes after Ctrl-C."""
        self.typed.append(tuple(words))
        if words == ["dflash-engine", "train", "run.toml"]:
            if self.training is None:
                self.training = subprocess.Popen(
                    [sys.executable, "-c", "import sys; from bench.cli import main; sys.exit(main())", *words[1:]],
                    env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(self.folder)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
                self.wait_for(lambda record: "loss" in record)
                return
            self.wait_for(lambda record: record.get("event") == "reconfigured")
            self.training.send_signal(signal.SIGINT)
            said = self.training.communicate(timeout=60)[1]
            assert self.training.returncode == 130, said
            steps = self.records()[-1]["step"] + STEPS_AFTER_THE_INTERRUPT
            words = [*words, "--set", f"run.max_steps={steps}"]
        if words[0] == "dflash-engine":
            told = io.StringIO()
            with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                code = main(words[1:])
            self.answers[" ".join(words[1:])] = told.getvalue()
            assert code == 0, (words, told.getvalue())
        elif words[0] == "python":
            runpy.run_path(words[1], run_name="__main__")
        else:
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            self.answers[" ".join(words)] = done.stdout

    def records(self) -> list[dict[str, Any]]:
        """metrics.jsonl so far; a line that is being written is not read."""
        file = self.folder / "runs/first/metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, found: Callable[[dict[str, Any]], bool]) -> None:
        """Until metrics.jsonl has such a line."""
        assert self.training is not None
        while not any(map(found, self.records())):
            assert self.training.poll() is None, self.training.communicate()[1]
            time.sleep(0.05)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("tutorial")
    save_tutorial_target(folder / "tiny-qwen3")
    found = Reader(folder)
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        try:
            found.follow()
        finally:
            if found.training is not None and found.training.poll() is None:
                found.training.kill()
                found.training.communicate()
        yield found


def test_every_command_of_the_page_was_typed(reader: Reader) -> None:
    words = {" ".join(typed[1:3]) for typed in reader.typed if typed[0] == "dflash-engine"}
    steps = ("doctor", "data extract", "data inspect", "graphs build", "graphs status", "train run.toml")
    measured = ("plan --config", "report runs/first", "eval runs/first", "export runs/first")
    assert words == {*steps, *measured}
    text = PAGE.read_text(encoding="utf-8")
    assert all(old in text or old.startswith('"tiny') for old in INSTEAD)


def test_the_run_went_as_the_page_says(reader: Reader) -> None:
    records = reader.records()
    losses = [record["loss"] for record in records if "loss" in record]
    vocabulary = json.loads((reader.folder / "tiny-qwen3/config.json").read_text())["vocab_size"]
    assert 0.8 * math.log(vocabulary) < losses[0] < 2 * math.log(vocabulary)
    assert losses[-1] < 0.8 * losses[0]
    (change,) = [record for record in records if record.get("event") == "reconfigured"]
    changed = {one["setting"]: one["new"] for one in change["changes"]}
    assert changed == {"optimizer.lr": 5e-3, "buckets.max_buckets": 2} and change["why"] == "recapture"
    explained = reader.answers["train run.toml --explain --set optimizer.lr=5e-3 --set buckets.max_buckets=2"]
    assert "one new generation of graphs" in explained
    starts = [record["why"] for record in records if record.get("event") == "started"]
    assert len(starts) == 2 and starts[0] == "a new run" and starts[1].startswith("going on from step-")
    assert "eval_accept_len" in records[-2] or "eval_accept_len" in records[-1]
    assert (reader.folder / "runs/first/report.html").is_file()


def test_the_text_is_the_targets_own_and_the_drafter_is_of_use(reader: Reader) -> None:
    (told,) = (text for command, text in reader.answers.items() if "--prompts" in command)
    figures = dict(line.rsplit(maxsplit=1) for line in told.splitlines() if len(line.split()) == 2)
    assert figures["differing_tokens"] == "0" and figures["prompts"] == "4"
    assert 1 < float(figures["tokens_per_verification"]) <= 16


def test_the_servers_are_told_what_was_exported(reader: Reader) -> None:
    config = json.loads((reader.folder / "my-drafter/config.json").read_text())
    vllm, sglang = (block.text for block in blocks(PAGE) if block.text.startswith(("vllm", "python -m sglang")))
    ((*_, spoken, _, _, _, _),) = commands(vllm)
    assert json.loads(spoken) == {
        "method": "dflash",
        "model": "my-drafter",
        "num_speculative_tokens": config["block_size"] - 1,
    }
    ((*_, folder, _, tokens),) = commands(sglang)
    assert folder == "my-drafter" and int(tokens) == config["block_size"]
    serving = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert all(text.replace("Qwen3-0.6B", "Qwen3-8B") in serving for text in (vllm, sglang))


def test_the_line_of_a_conversation_is_one() -> None:
    (line,) = (block.text for block in blocks(PAGE) if block.language == "json")
    messages = parse_record(line.encode()).messages
    assert messages is not None and [message["role"] for message in messages] == ["user", "assistant"]
