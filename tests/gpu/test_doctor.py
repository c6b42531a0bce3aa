"""The doctor on a machine with a GPU: what it measures in processes of their own."""

from engine.doctor import run_doctor


def test_the_probe_replays_the_eager_step_under_every_setting() -> None:
    figures = run_doctor()
    assert figures["gpus"][0]["shared_memory"] >= 48 * 1024
    assert [variant.get("equal") for variant in figures["measured"]] == [True, True, True], figures["measured"]
    assert figures["works"]["capture and replay"]["works"]
