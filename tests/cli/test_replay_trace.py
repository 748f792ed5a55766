"""Reading traces: what is taken, what is refused, and with which words."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.cli.replay.trace import TraceRequest, generated_workload, parse_trace, read_trace
from transferd.errors import RequestError

LINE = '{"timestamp": 27, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}'


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    (request,) = read_trace(write(tmp_path / "t.jsonl", LINE))
    assert request == TraceRequest(hash_ids=(0, 1, 2), timestamp=27.0, input_length=6758, output_length=500)


def test_blank_lines_and_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", "", LINE, "  ", '{"hash_ids": [], "more": {"x": 1}}', "")
    assert [request.hash_ids for request in read_trace(trace)] == [(0, 1, 2), ()]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp": 1}',
        '{"hash_ids": "12"}',
        '{"hash_ids": [1.5]}',
        '{"hash_ids": ["1"]}',
        '{"hash_ids": [true]}',
        '{"hash_ids": [-1]}',
        '{"hash_ids": null}',
        '{"hash_ids": [1], "timestamp": "soon"}',
    ],
)
def test_a_line_that_is_no_request_is_named_with_file_and_number(tmp_path: Path, line: str) -> None:
    trace = write(tmp_path / "t.jsonl", LINE, "", line, LINE)
    with pytest.raises(RequestError, match=r"t\.jsonl:3: not a trace line: ") as raised:
        read_trace(trace)
    assert raised.value.reason == "bad_trace"


def test_bytes_that_are_not_text_are_a_bad_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(LINE.encode() + b"\n\xff\xfe\n")
    with pytest.raises(RequestError, match=r":2: "):
        read_trace(trace)


def test_a_limit_reads_no_line_behind_it(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path / "t.jsonl", LINE, LINE, "rubbish"), limit=2)) == 2


def test_parsing_is_streaming() -> None:
    def lines() -> Iterator[bytes]:
        yield LINE.encode()
        raise AssertionError("a second line was asked for")

    assert next(parse_trace(lines(), "t")).hash_ids == (0, 1, 2)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_trace_without_requests_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(RequestError, match="the trace contains no requests"):
        read_trace(write(tmp_path / "t.jsonl", content))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no\.jsonl: cannot be read: No such file"):
        read_trace(tmp_path / "no.jsonl")
    with pytest.raises(RequestError, match="cannot be read"):
        read_trace(tmp_path)


@given(ids=st.lists(st.lists(st.integers(0, 2**64 - 1)), min_size=1, max_size=20))
def test_a_written_trace_reads_back_the_same(ids: list[list[int]]) -> None:
    lines = [json.dumps({"hash_ids": chain}).encode() for chain in ids]
    assert [list(request.hash_ids) for request in parse_trace(lines, "t")] == ids


@given(seed=st.integers(0, 2**32), requests=st.integers(1, 60))
def test_a_generated_workload_is_conversations_over_shared_prompts(seed: int, requests: int) -> None:
    workload = generated_workload(seed, requests)
    assert workload == generated_workload(seed, requests)
    assert len(workload) == requests
    parent: dict[int, int | None] = {}
    for request in workload:
        assert len(set(request.hash_ids)) == len(request.hash_ids) > 0
        for before, content in zip((None, *request.hash_ids), request.hash_ids, strict=False):
            assert parent.setdefault(content, before) == before, "equal ids mean equal prefixes"
    assert len({request.hash_ids[0] for request in workload}) <= 3


def test_a_path_that_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(RequestError, match=f"{path}: cannot be read: not a regular file"):
            read_trace(path)


def test_a_shells_pipe_is_read_like_a_file() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, f"{LINE}\n{LINE}\n".encode())
        os.close(writing)
        assert len(read_trace(Path(f"/dev/fd/{reading}"))) == 2
    finally:
        os.close(reading)
