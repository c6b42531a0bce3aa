"""The doctor on a machine with a GPU: what it finds, and what it measures in processes of their own."""

import os

import torch

from engine.doctor import run_doctor
from engine.doctor_variants import BASE, measure_variants, worth_setting
from engine.process_settings import without


def test_the_machine_is_described() -> None:
    figures = run_doctor(measure=False)
    gpu = figures["gpus"][0]
    assert gpu["shared_memory"] >= 48 * 1024 and 0 < gpu["free_bytes"] <= gpu["total_bytes"]
    assert figures["software"]["driver"] != "none" and figures["software"]["cuda"] == torch.version.cuda
    assert figures["works"]["capture and replay"]["works"] and figures["measured"] == []


def test_the_probe_replays_the_eager_step_under_every_setting() -> None:
    measured = measure_variants(env=without(os.environ), rounds=1)
    assert [variant["name"] for variant in measured] == [
        BASE,
        "CUDA_MODULE_LOADING=LAZY",
        "CUDA_MODULE_LOADING=EAGER",
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
    ]
    assert [variant.get("equal") for variant in measured] == [True] * 4, measured
    assert all(variant["memory_mib"] > variant["outside_mib"] > 0 for variant in measured)
    assert worth_setting(measured).keys() <= {"CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF"}
