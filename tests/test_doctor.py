"""The doctor's questions, answered by stand-ins where this machine has no GPU."""

import json
import os
from pathlib import Path

import pytest
import torch

from bench.cli import main
from engine import doctor, doctor_gpu
from engine.doctor_gpu import Gpu, works_here
from engine.doctor_host import disk_speed, extras, locked_memory, settings_found
from engine.gpu_holders import memory_holders

MIB = 2**20
H200 = Gpu("NVIDIA H200", "9.0", 141 * 2**30, 100 * 2**30, 227 * 1024, 132, "nothing is held")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_says_what_the_cpu_can_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--disk", str(tmp_path), "--json"]) == 0
    printed, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
    figures = json.loads(line)
    assert figures["gpus"] == [] and figures["measured"] == []
    works = figures["works"]
    assert works["train, eval, demo"]["works"] and not works["capture and replay"]["works"]
    assert figures["software"]["torch"] == torch.__version__
    assert figures["disk"]["write_mib_s"] > 0 and figures["disk"]["read_mib_s"] > 0
    assert list(tmp_path.iterdir()) == []
    assert "no GPU that torch can use" in printed and "What works on the CPU" in printed


@pytest.mark.usefixtures("no_gpu")
def test_the_current_folders_disk_is_measured_where_it_can_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor.run_doctor()["disk"]["write_mib_s"] > 0
    assert "disk of the current folder: writes " in capsys.readouterr().out and list(tmp_path.iterdir()) == []

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(doctor, "disk_speed", refuse)
    assert doctor.run_doctor()["disk"] == {}
    assert "the current folder cannot be written to (Permission denied); --disk names" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
def test_a_folder_that_is_none_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--disk", str(tmp_path / "none")]) == 1
    out, err = capsys.readouterr()
    assert "expected a folder to measure the disk of, found none" in err and not out, "said before anything is measured"


def test_a_gpu_is_shown_with_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_gpus", lambda: [H200])
    monkeypatch.setattr(doctor, "software_fields", lambda device: {"gpu": H200.name})
    monkeypatch.setattr(doctor_gpu, "c_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    figures = doctor.run_doctor(measure=False)
    assert all(found["works"] for found in figures["works"].values())
    assert "100.0 of 141.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kib", "words"), [(227, "the large tiles"), (99, "the small tiles"), (64, 'set model.attention = "flex"')]
)
def test_shared_memory_decides_the_attention(monkeypatch: pytest.MonkeyPatch, kib: int, words: str) -> None:
    monkeypatch.setattr(doctor_gpu, "c_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    gpu = Gpu("NVIDIA T4", "7.5", MIB, MIB, kib * 1024, 40, "")
    works = works_here([gpu], {})
    assert words in works['model.attention = "triton"'].why
    assert works['model.attention = "triton"'].works == (kib >= 99)
    assert not works['run.precision = "bf16"'].works and not works['run.precision = "fp8"'].works


def test_what_stands_in_the_way_of_kernels_and_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(doctor_gpu, "c_compiler", lambda: "")
    triton, flex = (f'model.attention = "{name}"' for name in ("triton", "flex"))
    assert "install gcc or set CC" in works_here([H200], {})[triton].why
    assert "TRITON_INTERPRET is set" in works_here([H200], {"TRITON_INTERPRET": "1"})[triton].why
    monkeypatch.setattr(doctor_gpu, "c_compiler", lambda: "/usr/bin/gcc")
    assert "would not be compiled" in works_here([H200], {"TORCHDYNAMO_DISABLE": "1"})[flex].why
    assert not works_here([H200], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})["capture and replay"].works


def test_who_holds_the_memory() -> None:
    lines = (
        "GPU-aa-bb, 77, python, train.py, 1024",
        f"GPU-aa-bb, {os.getpid()}, python, [N/A]",
        "GPU-cc-dd, 99, x, 5",
        "",
    )
    answer = "\n".join(lines)
    told = memory_holders("aa-bb", 3000 * MIB, lambda: answer)
    assert told.startswith("3,000 MiB are held: python, train.py (pid 77) 1,024 MiB; ")
    assert f"python (pid {os.getpid()}, this one) an untold amount" in told and "(pid 99" not in told
    assert "by no process that can be seen" in memory_holders("ee", 0, lambda: answer)
    assert "nvidia-smi would tell" in memory_holders("aa-bb", 0, lambda: None)


def test_the_verdict_on_every_setting() -> None:
    def verdicts(**env: str) -> dict[str, str]:
        return {setting.name: setting.verdict for setting in settings_found(env)}

    assert verdicts() == {"PYTORCH_ALLOC_CONF": "good", "CUDA_MODULE_LOADING": "good"}
    expandable = "expandable_segments:True,max_split_size_mb:128"
    assert verdicts(PYTORCH_CUDA_ALLOC_CONF=expandable)["PYTORCH_CUDA_ALLOC_CONF"] == "no gain"
    assert verdicts(PYTORCH_ALLOC_CONF=expandable, NCCL_GRAPH_REGISTER="1")["PYTORCH_ALLOC_CONF"] == "hurts"
    assert verdicts(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")["PYTORCH_CUDA_ALLOC_CONF"] == "hurts"
    found = verdicts(
        CUDA_MODULE_LOADING="EAGER", CUDA_LAUNCH_BLOCKING="1", TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES=""
    )
    assert found["CUDA_MODULE_LOADING"] == found["CUDA_LAUNCH_BLOCKING"] == found["CUDA_VISIBLE_DEVICES"] == "hurts"
    assert "TRITON_INTERPRET" not in found
    assert verdicts(CUDA_VISIBLE_DEVICES="0,1")["CUDA_VISIBLE_DEVICES"] == "good"


def test_disk_limits_and_extras(tmp_path: Path) -> None:
    speed = disk_speed(tmp_path, mib=4)
    assert speed.write_mib_s > 0 and speed.free_gib > 0 and not list(tmp_path.iterdir())
    told = locked_memory()
    assert told["told"].startswith("no limit" if told["soft_bytes"] is None else "at most")
    packages = {
        "transformers [hf]",
        "pyarrow [arrow]",
        "matplotlib [plots]",
        "tensorboard [tensorboard]",
        "wandb [wandb]",
    }
    assert set(extras()) == packages
