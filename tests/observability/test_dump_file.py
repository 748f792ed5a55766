"""Dumps of the flight recorder: whole or absent, bounded in number, readable again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from transferd.errors import RequestError
from transferd.observability import dump_file as dumps
from transferd.observability.recorder import FIELDS, Note

NOTES = [
    Note(10.0, "t1", "admitted", {"blocks": 2, "client": b"17"}),
    Note(10.5, "", "pause", {}),
    Note(11.0, "t1", "copy", {"rank": 1, "blocks": 2}),
]


def header(wall: float = 1_700_000_000.25, reason: str = "signal") -> dict[str, Any]:
    return {"wall": wall, "monotonic": 12.0, "pid": 77, "reason": reason, "boot_id": "b", "threads": {}}


def test_a_dump_is_json_lines_as_documented_and_is_read_back(tmp_path: Path) -> None:
    path = dumps.write_dump(tmp_path / "flight", header(), NOTES, keep=3)
    assert path.name == "flight-20231114T221320.250000Z-77-signal.jsonl"
    assert path.stat().st_mode & 0o777 == 0o640
    first, *lines = map(json.loads, path.read_text().splitlines())
    assert (first["format"], first["format_version"], first["notes"]) == ("transferd-flight", 1, 3)
    assert lines[0] == {"at": 10.0, "task": "t1", "what": "admitted", "blocks": 2, "client": "17"}
    dump = dumps.read_dump(path)
    assert dump.header["boot_id"] == "b"
    assert dump.notes[1:] == NOTES[1:]


@pytest.mark.parametrize("what", FIELDS)
def test_every_kind_of_note_is_read_back_as_it_was(what: str) -> None:
    note = Note(1.0, "t", what, {field: f"its {field}" for field in FIELDS[what]}, "e")
    assert dumps.decode_note(dumps.encode_note(note)) == note


def test_of_a_directory_the_newest_dump_is_read(tmp_path: Path) -> None:
    for wall in (3e8, 1e8, 2e8):
        dumps.write_dump(tmp_path, header(wall), NOTES, keep=3)
    assert dumps.read_dump(tmp_path).header["wall"] == 3e8


def test_only_the_newest_stay_and_half_written_ones_of_a_killed_daemon_go(tmp_path: Path) -> None:
    (tmp_path / ".flight-19990101T000000.000000Z-1-signal.jsonl.part").write_text("half")
    (tmp_path / "notes-of-the-operator.txt").write_text("keep me")
    for i in range(5):
        dumps.write_dump(tmp_path, header(1e9 + i), NOTES, keep=2)
    kept = sorted(os.listdir(tmp_path))
    assert len(kept) == 3
    assert kept[0].startswith("flight-20010909T014643")
    assert kept[2] == "notes-of-the-operator.txt"


def test_a_dump_that_cannot_be_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        dumps.write_dump(tmp_path, header(), NOTES, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_no_unicode_does_not_cost_the_dump(tmp_path: Path) -> None:
    odd = [Note(1.0, "half \ud800 pair", "error", {"problem": "\udcff"})]
    dump = dumps.read_dump(dumps.write_dump(tmp_path, header(), odd, keep=2))
    assert dump.notes[0].task_id == "half \ud800 pair"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a flight recorder dump"),
        (b"hello", "not a flight recorder dump"),
        (b'{"format": "else"}\n', "not a flight recorder dump"),
        (
            b'{"format": "transferd-flight", "format_version": 9}\n',
            "dump format version 9 is not supported; this transferd reads 1",
        ),
        (b'{"format": "transferd-flight", "format_version": 1}\n{"at": 1.0}\n', "not a flight recorder dump"),
        (b'{"format": "transferd-flight", "format_version": 1}\n[]\n', "not a flight recorder dump"),
        (b"\xff\xfe", "not a flight recorder dump"),
    ],
)
def test_a_file_that_is_not_a_dump_is_refused_in_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=problem) as refused:
        dumps.read_dump(path)
    assert "\n" not in str(refused.value)


def test_a_missing_file_and_an_empty_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nowhere: cannot be read: No such file"):
        dumps.read_dump(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="the directory contains no dump"):
        dumps.read_dump(tmp_path)


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RequestError, match=r"fifo: not a .*not a regular file"):
        dumps.read_dump(tmp_path / "fifo")
