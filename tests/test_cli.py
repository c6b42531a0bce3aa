"""The command line: help without torch, exit codes, one line for an error, JSON last. The work itself is replaced."""

import json
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from engine.cli import cli

ROOT = Path(__file__).parent.parent
WORK = {
    "demo": ("engine.demo", "run_demo", ["demo"]),
    "plan": ("engine.planning", "show_plan", ["plan", "data"]),
    "train": ("engine.train", "train", ["train", "--set", "data.path=data"]),
    "graphs status": ("engine.graphs_status", "show_status", ["graphs", "status", "--set", "data.path=data"]),
    "graphs build": ("engine.graphs_build", "build_graphs", ["graphs", "build", "--set", "data.path=data"]),
    "export": ("engine.export", "export_drafter", ["export", "run", "out"]),
    "doctor": ("engine.doctor", "run_doctor", ["doctor"]),
    "report": ("engine.report_page", "write_report", ["report", "run"]),
    "eval": ("engine.evaluate", "evaluate_drafter", ["eval", "drafter", "data"]),
    "data inspect": ("engine.inspection", "inspect_dataset", ["data", "inspect", "data"]),
    "data convert": ("engine.convert", "convert_dataset", ["data", "convert", "data", "out"]),
    "bench buckets": ("bench.buckets", "run", ["bench", "buckets", "--mixture"]),
    "bench input": ("bench.input", "run", ["bench", "input"]),
    "bench contention": ("bench.contention", "run", ["bench", "contention"]),
    "bench start": ("bench.start", "run", ["bench", "start"]),
    "bench ops": ("bench.ops", "run", ["bench", "ops", "--workload", "W1"]),
    "bench step": ("bench.step", "run", ["bench", "step", "--workload", "W1"]),
}


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], list[str]]:
    """Puts a function where a command finds its work, and returns a command line that gets there."""

    def put(command: str, function: Callable[..., Any]) -> list[str]:
        module, name, args = WORK[command]
        stand_in = types.ModuleType(module)
        setattr(stand_in, name, function)
        monkeypatch.setitem(sys.modules, module, stand_in)
        return list(args)

    return put


Replace = Callable[[str, Callable[..., Any]], list[str]]


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("group", [[], ["data"], ["graphs"], ["bench"]])
def test_lists_of_commands_are_whole_sentences(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*group, "--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2]
    assert "..." not in listed, "a command's first sentence is too long for the list: give it a short_help"


def test_help_of_every_command_is_complete_and_needs_no_torch() -> None:
    program = """
import sys
import click
from bench.cli import main
from engine.cli import cli

def commands(group, words):
    yield words
    for name, command in group.commands.items():
        yield from commands(command, [*words, name]) if isinstance(command, click.Group) else [[*words, name]]

for words in commands(cli, []):
    assert main([*words, "--help"]) == 0, words
loaded = {"torch", "triton", "numpy", "safetensors", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in ("demo", "--seed", "--no-resume", "SECTION.KEY=VALUE", "--verify", "--temperature", "[W1|W2|W3|tiny]"):
        assert word in done.stdout


def test_every_parameter_has_help() -> None:
    def commands(group: Any) -> Any:
        for command in group.commands.values():
            yield command
            yield from commands(command) if hasattr(command, "commands") else ()

    for command in commands(cli):
        assert command.help, command.name
        for parameter in command.params:
            assert parameter.param_type_name == "argument" or parameter.help, (command.name, parameter.name)


@pytest.mark.parametrize("command", WORK)
def test_json_is_the_last_line(command: str, replace: Replace, capsys: pytest.CaptureFixture[str]) -> None:
    def work(*args: object, **kwargs: object) -> dict[str, Any]:
        print("for people")
        return {"loss": 1.5}

    args = replace(command, work)
    assert main(args) == 0
    assert capsys.readouterr().out == "for people\n"
    assert main([*args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"loss": 1.5}


def test_ctrl_c_that_a_library_turned_into_an_error_of_its_own(
    replace: Replace, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*args: object, **kwargs: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of an object") from None

    args = replace("plan", work)
    assert main(args) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_settings_reach_the_training(replace: Replace, tmp_path: Path) -> None:
    seen: list[Any] = []

    def work(settings: Any, *, resume: bool, config: Any, quiet: bool, profile: Path | None) -> dict[str, Any]:
        assert not quiet and profile is None
        seen.append((settings, resume, config and config.path))
        return {}

    config = tmp_path / "run.toml"
    config.write_text('[data]\npath = "a"\n[run]\nseed = 7\n')
    args = replace("train", work)
    assert main(args) == 0
    assert main(["train", str(config), "--set", "run.seed=8", "--no-resume"]) == 0
    assert [(settings.data.path, settings.run.seed, resume, path) for settings, resume, path in seen] == [
        ("data", 0, True, None),
        ("a", 8, False, config),
    ]


def test_check_is_a_setting_that_another_number_replaces(replace: Replace, tmp_path: Path) -> None:
    seen: list[int] = []

    def work(settings: Any, **_: Any) -> dict[str, Any]:
        seen.append(settings.run.check_every)
        return {}

    args = replace("train", work)
    config = tmp_path / "run.toml"
    config.write_text('[data]\npath = "a"\n')
    assert main(args) == main([*args, "--check"]) == main([*args, "--check", "--set", "run.check_every=3"]) == 0
    assert main(["train", str(config), "--check"]) == 0
    assert seen == [0, 20, 3, 20]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("expected 3,\n  found 4."), 1, "error: expected 3, found 4."),
        (FileNotFoundError(2, "No such file or directory", "x/dataset.json"), 1, "error: x/dataset.json: No such file"),
        (MemoryError("bucket 1x128x8 needs 3 GiB"), 1, "error: bucket 1x128x8 needs 3 GiB"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, line: str, replace: Replace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(replace("train", failing(error))) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(line) and captured.err.count("\n") == 1


def test_json_has_no_nan(replace: Replace, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"loss": float("nan"), "final": {"loss": [float("inf"), 1.5]}}
    assert main([*replace("train", lambda *args, **kwargs: figures), "--json"]) == 0
    assert capsys.readouterr().out == '{"loss": null, "final": {"loss": [null, 1.5]}}\n'


def test_faults_of_ours_keep_their_traceback(replace: Replace) -> None:
    with pytest.raises(KeyError):
        main(replace("train", failing(KeyError("x"))))


def test_traceback_on_request(replace: Replace, monkeypatch: pytest.MonkeyPatch) -> None:
    args = replace("train", failing(ValueError("x")))
    with pytest.raises(ValueError, match="x"):
        main(["--traceback", *args])
    monkeypatch.setenv("DFLASH_TRACEBACK", "1")
    with pytest.raises(ValueError, match="x"):
        main(args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "trian"),
        (["train", "--nope"], "--nope"),
        (["export", "run"], "Missing argument 'OUT'"),
        (["train"], "data.path: expected a dataset's folder, found nothing"),
        (["train", "absent.toml"], "absent.toml: expected a settings file, found none"),
        (["train", "--set", "run.sed=1"], "unknown setting run.sed; the nearest is run.seed"),
        (["bench", "buckets"], "either DATA or --mixture, found neither"),
        (["bench", "buckets", "data", "--mixture"], "either DATA or --mixture, found both"),
        (["bench", "buckets", "data", "--workload", "W1"], "at most one --workload, with --mixture"),
        (["bench", "step", "--workload", "W4"], "W4"),
        (["demo", "--device", "tpu"], "tpu"),
    ],
)
def test_bad_usage_is_two(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
