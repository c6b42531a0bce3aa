"""Clock and power beside the times: what nvidia-smi says is read, and where it says nothing that is said."""

import stat
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.chip import ChipLog, Sample, parse, summary, sustained

CPU = torch.device("cpu")
# Its output is buffered as any program's is: only a terminal gets its lines one by one.
FAKE = """#!{python}
import sys, time
query = next(word for word in sys.argv if word.startswith("--query-gpu="))
assert sys.argv[1:3] == ["-i", "GPU-12345678-aaaa"], sys.argv
assert "--format=csv,noheader,nounits" in sys.argv
if {old} and "event_reasons" in query:
    print('Field "clocks_event_reasons.active" is not a valid field to query.')
    sys.exit(2)
line = "1410, 1980, 698.12, 700.00, 61, 0x0000000000000004"
print(line)
if "-lms" in sys.argv:
    while True:
        time.sleep(0.01)
        print(line)
"""


def fake(folder: Path, *, old: bool = False, text: str = FAKE) -> str:
    program = folder / "nvidia-smi"
    program.write_text(text.format(python=sys.executable, old=old))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_a_line_of_nvidia_smi() -> None:
    assert parse("1410, 1980, 698.12, 700.00, 61, 0x0000000000000084\n", 2.0) == Sample(
        2.0, 1410, 1980, 698.12, 700, 61, 0x84
    )
    assert parse("1410, 1980, [N/A], [Not Supported], 61, [N/A]", 2.0) == Sample(2.0, 1410, 1980, None, None, 61, None)
    for line in ("", "No devices were found", 'Field "x" is not a valid field to query.', "[N/A], , , , , "):
        assert parse(line, 2.0) is None


def test_what_is_said_of_many_samples() -> None:
    lines = (
        "1400, 1980, 700, 700, 60, 0x4",
        "1300, 1980, 690, 700, 64, 0x4",
        "1980, 1980, 200, 700, 62, 0x0",
        "1500, 1980, 650, 700, 63, 0x80",
    )
    samples = [sample for line in lines if (sample := parse(line, 0.0))]
    assert summary(samples) == {
        "samples": 4,
        "clock_mhz": 1450,
        "max_clock_mhz": 1980,
        "power_w": 670,
        "power_limit_w": 700,
        "temperature_c": 64,
        "power_capped_share": 0.75,
        "reasons": {"software power cap": 0.5, "hardware power brake": 0.25},
    }
    assert summary([Sample(0.0, 1980, None, None, None, None, None)])["power_capped_share"] is None


@pytest.mark.parametrize("old", [False, True])
def test_samples_of_the_seconds_that_are_timed(tmp_path: Path, old: bool) -> None:
    with ChipLog("12345678-aaaa", fake(tmp_path, old=old)) as log:
        found = sustained(lambda: time.sleep(0.001), CPU, log, settle_s=0.05, seconds=0.5)
        before = log.figures(0.0, 1.0)
    assert (found["clock_mhz"], found["power_w"], found["power_capped_share"]) == (1410, 698.12, 1.0)
    assert found["ms"] >= 1 and found["samples"] >= 1
    assert before == {"skipped": "no sample in 1.00 s"}
    assert log._process is not None and log._process.poll() is not None


def test_where_nvidia_smi_says_nothing(tmp_path: Path) -> None:
    with ChipLog("12345678-aaaa", str(tmp_path / "none")) as log:
        figures = sustained(lambda: None, CPU, log, settle_s=0.001, seconds=0.001)
    assert figures["ms"] > 0 and figures["skipped"] == f"no {tmp_path / 'none'} here"
    with ChipLog("12345678-aaaa", fake(tmp_path, text="#!{python}\nprint('No devices were found')\n")) as log:
        assert log.figures(0.0, 1.0)["skipped"].endswith("does not tell clock and power")
