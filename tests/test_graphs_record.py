"""graphs.json: written whole, and trusted only as it was written."""

import json
from pathlib import Path

import pytest

from engine.graphs_record import bucket_figures, print_record, worth_it
from engine.reports import make_console
from graphs.fingerprint import Fingerprint
from graphs.record import FILE, VERSION, BucketRecord, GraphFigures, Record, RecordError, read_record, write_record

FIELDS = Fingerprint.of({"bucket": "1x128x32", "torch": "2.11"})
GRAPH = GraphFigures("train 1x128x32", 321, 64.0, 1.5, 2.0, 0.1)
RECORD = Record(
    generation=3,
    buckets=(
        BucketRecord("1x128x32", FIELDS, "replayed", (GRAPH,), "equal bits", 0.2, 12.0, 9.0, 8.0, 0.5, 60.0),
        BucketRecord("1x256x32", FIELDS.with_field("bucket", "1x256x32"), "replayed", ()),
    ),
    others=(GraphFigures("update", None, 0.0, 0.0, 0.1, 0.1),),
    phases_s=(("compile", 1.0), ("capture", 0.5)),
    kernels_compiled=7,
    reserved_mib=2000.0,
    exec_estimate_mib=24.0,
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert read_record(folder) is None
    path = write_record(folder, RECORD)
    assert path == folder / FILE
    assert read_record(folder) == RECORD
    found = json.loads(path.read_text())
    assert found["buckets"][0]["host_ms_saved"] == 7.5
    assert found["buckets"][0]["graphs"][0]["nodes"] == 321
    assert found["buckets"][0]["fingerprint"]["torch"] == "2.11"
    write_record(folder, Record(4, ()))
    assert read_record(folder) == Record(4, ())
    assert [file.name for file in folder.iterdir()] == [FILE], "no temporary file stays"


def test_a_write_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(tmp_path, RECORD)

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_record(tmp_path, Record(4, ()))
    assert read_record(tmp_path) == RECORD
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_a_truncated_file_is_not_trusted(tmp_path: Path) -> None:
    path = write_record(tmp_path, RECORD)
    whole = path.read_bytes()
    for end in (0, 1, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:end])
        with pytest.raises(
            RecordError, match=r"graphs\.json: expected what was written .*truncated.*; build them again"
        ):
            read_record(tmp_path)


def test_another_version_and_changed_content_are_not_trusted(tmp_path: Path) -> None:
    path = write_record(tmp_path, RECORD)
    whole = path.read_text()
    path.write_text(whole.replace(f'"version": {VERSION}', '"version": 99'))
    with pytest.raises(RecordError, match=f"found version 99, not {VERSION}"):
        read_record(tmp_path)
    path.write_text(whole.replace("2.11", "2.12"))
    with pytest.raises(RecordError, match="changed after it was written"):
        read_record(tmp_path)
    for other in ("[]", "{}", "3"):
        path.write_text(other)
        with pytest.raises(RecordError, match="found something else"):
            read_record(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="bytes that are no text in UTF-8"):
        read_record(tmp_path)


def test_a_bucket_counts_as_verified_under_its_own_fingerprint_alone() -> None:
    assert RECORD.verified_before("1x128x32", False, FIELDS) == "equal bits"
    assert RECORD.verified_before("1x128x32", False, FIELDS.with_field("torch", "2.12")) == ""
    assert (
        RECORD.verified_before("1x128x32", False, FIELDS.with_field("torch", "2.12"), ignore=("torch",)) == "equal bits"
    )
    assert RECORD.verified_before("1x256x32", False, FIELDS.with_field("bucket", "1x256x32")) == ""
    assert RECORD.verified_before("9x9x9", False, FIELDS) == ""


# Is it worth it?


def measured(eager_ms: float | None, replay_ms: float | None, eager_host_ms: float = 8.0) -> BucketRecord:
    times = {"eager_ms": eager_ms, "replay_ms": replay_ms, "eager_host_ms": eager_host_ms, "replay_host_ms": 0.5}
    return BucketRecord("1x128x32", FIELDS, "replayed", (GRAPH,), "equal bits", **times)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bucket", "words"),
    [
        (measured(12.0, 9.0), "1.33 times as fast"),
        (measured(9.1, 9.0), "no gain on the device; frees 7.5 ms of the host"),
        (measured(8.0, 9.0), "no gain on the device; frees 7.5 ms of the host"),
        (measured(9.0, 9.0, eager_host_ms=0.4), "no gain"),
        (measured(None, 9.0), "no eager step fits beside the pool"),
        (measured(None, None), "not measured"),
        (BucketRecord("1x128x32", FIELDS, "called", (), why="it waits"), "called"),
    ],
)
def test_what_replaying_a_bucket_gains_is_told(
    bucket: BucketRecord, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert worth_it(bucket) == bucket_figures(bucket)["worth"] == words
    print_record(Record(1, (bucket,)), make_console())
    assert words in capsys.readouterr().out
