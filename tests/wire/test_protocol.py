"""The wire format: what is read back is what was written, and no bytes at all can do worse than be refused."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.bodies import BODIES, built, tag_of
from transferd.client.launch import running
from transferd.errors import ProtocolError
from transferd.tasks import (
    ErrorInfo,
    RankResult,
    ReadStorageTask,
    Status,
    SwapOutTask,
    TaskResult,
    TokenIds,
    WriteStorageTask,
)
from transferd.wire import malformed
from transferd.wire import protocol as wire

pack = msgspec.msgpack.encode
CODES = {"malformed", "unsupported_version", "unknown_type", "bad_value", "too_large", "out_of_memory"}
TASKS = [kind for kind in BODIES if {"task_id", "timeout"} <= {field.name for field in msgspec.structs.fields(kind)}]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)
timeouts = st.floats(0.001, 1e6)
sessions = st.integers(0, 2**52)


def refusal(data: bytes, max_message: int | None = None) -> wire.Malformed:
    with pytest.raises(wire.Malformed) as caught:
        wire.decode_request(data, max_message)
    assert caught.value.reason in CODES
    return caught.value


def message(body: Any, seq: Any = 7, ack: Any = False) -> bytes:
    return b"\x01" + pack([seq, ack, body])


@pytest.mark.parametrize("kind", BODIES, ids=tag_of)
@settings(max_examples=40)  # of each kind
@given(st.data(), st.integers(0, 2**63 - 1), st.booleans(), sessions)
def test_a_request_is_read_as_it_was_written(
    kind: type, draw: st.DataObject, seq: int, ack: bool, session: int
) -> None:
    body = draw.draw(built(kind))
    assert wire.decode_request(wire.encode_request(seq, body, ack=ack, session=session)) == wire.Request(
        seq, ack, body, session
    )


rank_results = st.builds(RankResult, rank=st.integers(0, 63), status=st.sampled_from(Status), blocks=st.integers(0, 9))
errors = st.builds(ErrorInfo, text, text)
results = st.builds(
    TaskResult,
    task_id=text,
    status=st.sampled_from(Status),
    block_ids=ids,
    ranks=st.lists(rank_results, max_size=3),
    error=st.none() | errors,
    retry_after=st.none() | timeouts,
    bytes=st.integers(0, 2**60),
    generation=text,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=10,
)
replies = st.one_of(
    st.builds(wire.Welcome, text, st.booleans(), text, text, st.integers(0, 2**40), sessions),
    st.builds(wire.Accepted),
    st.builds(wire.TaskProgress, layers=st.integers(0, 2**31)),
    st.builds(wire.Value, values),
    st.builds(wire.Refused, errors),
    st.builds(wire.Result, results),
)


@given(st.integers(0, 2**63 - 1), replies)
def test_a_reply_is_read_as_it_was_written(seq: int, body: wire.ReplyBody) -> None:
    assert wire.decode_reply(wire.encode_reply(seq, body)) == wire.ReplyEnvelope(seq, body)


@pytest.mark.parametrize("kind", BODIES, ids=tag_of)
def test_each_request_has_a_row_in_the_docs_and_that_of_a_control_request_each_of_its_fields(kind: type) -> None:
    with open("docs/protocol.md", encoding="utf-8") as file:
        rows = [line.split(" | ", 1) for line in file if line.startswith("| `")]
    mine = [rest for types, rest in rows if f"`{tag_of(kind)}`" in types]
    assert len(mine) == 1, f"{tag_of(kind)} has {len(mine)} rows in docs/protocol.md"
    if kind in wire.CONTROLS:
        assert set(kind.__struct_fields__) <= set(re.findall(r"`(\w+)`", mine[0]))


def test_the_worked_example_of_the_documentation_is_true_to_the_byte() -> None:
    task = WriteStorageTask(task_id="t1", timeout=5.0, keys=["a"], gpu_block_ids=[3], token_ids=TokenIds([1, 513]))
    payload = wire.encode_request(1, task, ack=True, session=9)
    assert payload.hex(" ") == documented("request")
    result = TaskResult(task_id="t1", status=Status.OK, block_ids=[3], bytes=4096, boot_id="b")
    assert wire.encode_reply(1, wire.Result(result)).hex(" ") == documented("reply")


def test_the_handshake_of_the_documentation_is_what_a_daemon_says(tmp_path: Path) -> None:
    hello, welcome = bytes.fromhex(documented("hello")), bytes.fromhex(documented("welcome"))
    request = wire.decode_request(hello, 2**20)
    assert (request.seq, request.body, request.session) == (1, wire.Hello(), wire.ANY_SESSION)
    said = wire.decode_reply(welcome)
    assert isinstance(said.body, wire.Welcome)
    with running({"cache": {}, "metrics": {"listen": ""}}, tmp_path) as daemon, zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(daemon.endpoint)
        socket.send(hello)
        assert socket.poll(30_000)
        answer = socket.recv()
        socket.close()
    found = wire.decode_reply(answer)
    assert isinstance(found.body, wire.Welcome)
    own = {"boot_id": "b", "session": 9, "version": "0.1.0", "process": said.body.process}
    assert list(found.body.process) == list(said.body.process)
    assert found.body.process["pid"] == daemon.pid
    assert msgspec.structs.replace(found.body, **own) == said.body
    assert list(msgspec.msgpack.decode(answer[1:])[1]) == list(msgspec.msgpack.decode(welcome[1:])[1])


def documented(name: str) -> str:
    """The bytes under `<!-- name -->` in docs/protocol.md: the first column of the code block there."""
    with open("docs/protocol.md", encoding="utf-8") as file:
        block = file.read().split(f"<!-- {name} -->")[1].split("```")[1]
    return " ".join(line.split("  ")[0].strip() for line in block.splitlines()[1:] if line.strip())


def test_block_ids_may_be_numpy_integers() -> None:
    odd: Any = [np.int64(4), np.int32(5), np.uint8(6)]
    array: Any = np.arange(3)
    task = SwapOutTask(task_id="t", gpu_block_ids=array, cpu_block_ids=odd)
    body = wire.decode_request(wire.encode_request(1, task)).body
    assert body == SwapOutTask(task_id="t", gpu_block_ids=[0, 1, 2], cpu_block_ids=[4, 5, 6])


@pytest.mark.parametrize("ids", [[1, 2, 70000], np.array([1, 2, 70000], dtype=np.uint64)])
def test_token_ids_travel_as_raw_little_endian_integers(ids: Any) -> None:
    payload = wire.encode_request(1, ReadStorageTask(task_id="t", keys=["k"], gpu_block_ids=[0], token_ids=ids))
    assert b"4" + np.array([1, 2, 70000], dtype="<i4").tobytes() in payload
    body = typing.cast("ReadStorageTask", wire.decode_request(payload).body)
    assert body.token_ids == TokenIds([1, 2, 70000])


# --- refusals -------------------------------------------------------------------------------------

GOOD = {"type": "write", "task_id": "x", "keys": ["k"], "gpu_block_ids": [1]}


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("gpu_block_ids", ["a"], "Expected `int`, got `str` - at `$.gpu_block_ids[0]`"),
        ("gpu_block_ids", [1.5], "Expected `int`, got `float` - at `$.gpu_block_ids[0]`"),
        ("gpu_block_ids", None, "Expected `array`, got `None` - at `$.gpu_block_ids`"),
        ("keys", [b"k"], "Expected `str`, got `bytes` - at `$.keys[0]`"),
        ("timeout", "soon", "Expected `float`, got `str` - at `$.timeout`"),
        ("token_ids", [1, 2], "Expected `bytes`, got `list` - at `$.token_ids`"),
        (
            "token_ids",
            b"4abc",
            "token_ids must be one byte '4' or '8' followed by whole integers of that many bytes - at `$.token_ids`",
        ),
        (
            "token_ids",
            b"",
            "token_ids must be one byte '4' or '8' followed by whole integers of that many bytes - at `$.token_ids`",
        ),
        ("flush_cache_exists", 1, "Expected `bool | null`, got `int` - at `$.flush_cache_exists`"),
    ],
)
def test_a_task_with_a_wrong_field_is_refused_by_its_name(field: str, value: Any, sentence: str) -> None:
    error = refusal(message({**GOOD, field: value}))
    assert (error.reason, str(error)) == ("bad_value", sentence)
    assert (error.seq, error.task_id) == (7, "x")


@pytest.mark.parametrize("field", ["task_id", "keys"])
def test_a_task_without_a_field_is_refused_by_the_missing_name(field: str) -> None:
    error = refusal(message({name: value for name, value in GOOD.items() if name != field}))
    assert (error.reason, error.seq) == ("bad_value", 7)
    assert field in str(error)


@pytest.mark.parametrize("body", [{"type": "teleport", "task_id": "x"}, {"task_id": "x"}, {"type": 3, "task_id": "x"}])
def test_an_unknown_type_is_refused_and_the_task_named(body: dict[str, Any]) -> None:
    error = refusal(message(body))
    assert (error.reason, error.seq, error.task_id) == ("unknown_type", 7, "x")


@pytest.mark.parametrize("kind", TASKS, ids=tag_of)
def test_a_malformed_task_of_a_known_type_is_not_of_an_unknown_type(kind: type) -> None:
    assert refusal(message({"type": tag_of(kind), "task_id": "x", "timeout": "soon"})).reason == "bad_value"


@pytest.mark.parametrize(
    "task",
    [
        ReadStorageTask(task_id="x", keys=["a"], gpu_block_ids=[1], token_ids=TokenIds([1, 2]), salt="tenant"),
        ReadStorageTask(task_id="x", keys=["a"], gpu_block_ids=[1], prefix=False, salt="tenant"),
        WriteStorageTask(task_id="x", keys=["a"], gpu_block_ids=[1], token_ids=TokenIds([1, 2]), salt="tenant"),
    ],
)
def test_a_salted_task_has_a_type_of_its_own_that_an_older_daemon_does_not_know(
    task: ReadStorageTask | WriteStorageTask,
) -> None:
    """An ignored salt would give one tenant's blocks to another."""
    body = msgspec.msgpack.decode(wire.encode_request(7, task)[1:])[2]
    assert body["type"] == f"{task.kind}_salted"
    read = wire.decode_request(wire.encode_request(7, task)).body
    assert isinstance(read, type(task))
    assert msgspec.structs.asdict(read) == msgspec.structs.asdict(task)
    usual = msgspec.structs.replace(task, salt="")
    assert msgspec.msgpack.decode(wire.encode_request(7, usual)[1:])[2]["type"] != body["type"]


def test_a_sparse_read_has_a_type_of_its_own_that_an_older_daemon_does_not_know() -> None:
    """An ignored field would have it load the leading blocks alone, and say `partial` or `miss`."""
    task = ReadStorageTask(task_id="x", keys=["a", "b"], gpu_block_ids=[1, 2], prefix=False)
    body = msgspec.msgpack.decode(wire.encode_request(7, task)[1:])[2]
    assert body["type"] == "read_sparse"
    read = wire.decode_request(wire.encode_request(7, task)).body
    assert isinstance(read, ReadStorageTask)
    assert not read.prefix
    assert msgspec.structs.asdict(read) == msgspec.structs.asdict(task)
    usual = msgspec.structs.replace(task, prefix=True)
    assert msgspec.msgpack.decode(wire.encode_request(7, usual)[1:])[2]["type"] == "read"


def test_a_task_that_asks_for_no_parts_says_nothing_of_them() -> None:
    """As from a client that does not know them; and whoever asks, with `prefix` false, asks for both."""
    task = ReadStorageTask(task_id="x", keys=["a"], gpu_block_ids=[1], prefix=False)
    assert "by_parts" not in msgspec.msgpack.decode(wire.encode_request(7, task)[1:])[2]
    asks = msgspec.structs.replace(task, by_parts=True)
    read = wire.decode_request(wire.encode_request(7, asks)).body
    assert isinstance(read, ReadStorageTask)
    assert (read.prefix, read.by_parts) == (False, True)


class NoMemory:
    """In the place of a decoder that finds no memory for what it decodes."""

    def decode(self, _: object) -> object:
        raise MemoryError


@pytest.mark.parametrize("body", [SwapOutTask(task_id="t", gpu_block_ids=[1], cpu_block_ids=[2]), wire.Match(["k"])])
def test_a_message_that_there_is_no_memory_for_is_not_malformed_and_still_named(
    body: wire.Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = wire.encode_request(7, body)
    monkeypatch.setattr(wire, "_request_decoder", NoMemory())
    refused = refusal(data)
    assert (refused.reason, refused.seq) == ("out_of_memory", 7)
    assert refused.task_id == ("t" if isinstance(body, SwapOutTask) else None)
    monkeypatch.setattr(malformed, "_loose_decoder", NoMemory())
    assert refusal(data).reason == "out_of_memory"


@pytest.mark.parametrize("first", [0, 2, 0x93, 255])
def test_another_version_is_refused_in_ours(first: int) -> None:
    error = refusal(bytes([first]) + message(GOOD)[1:])
    assert (error.reason, str(error)) == (
        "unsupported_version",
        f"unsupported protocol version {first}; this end speaks version 1",
    )


def test_a_message_past_the_limit_is_refused_and_still_named() -> None:
    data = message({**GOOD, "keys": ["k" * 200]})
    error = refusal(data, 100)
    assert (error.reason, error.seq, error.task_id) == ("too_large", 7, "x")
    assert str(error) == f"the message has {len(data)} bytes, the limit is 100 (tuning.server.max_message)"
    assert wire.decode_request(data, len(data)).seq == 7


def test_a_field_that_is_not_known_is_ignored_for_the_sake_of_later_versions() -> None:
    assert wire.decode_request(message({**GOOD, "colour": "red"})).body == WriteStorageTask(
        task_id="x", keys=["k"], gpu_block_ids=[1]
    )
    assert wire.decode_request(b"\x01" + pack([7, False, {"type": "bye"}, 0, "later"])).body == wire.Bye()


TEXT_THAT_IS_NONE = (
    b"\x01\x93\x07\xc2\x84\xa4type\xa5write\xa7task_id\xa1x\xa4keys\x91\xa1\xff\xadgpu_block_ids\x91\x01"
)


@pytest.mark.parametrize(
    ("data", "seq"),
    [
        (b"", 0),
        (b"\x01", 0),
        (b"\x01\xc1", 0),
        (b"\x01" + pack({"seq": 7}), 0),
        (b"\x01" + pack([7, False]), 0),
        (b"\x01" + pack(["seven", False, 5]), 0),
        (b"\x01" + pack([7, False, 5]), 7),
        (message(GOOD) + b"\x00", 0),
        (message(GOOD)[:-1], 0),
        (TEXT_THAT_IS_NONE, 7),
        (b"\x01" + b"\x91" * 100_000, 0),  # nesting without end
        (b"\x01\x93\x07\xc2" + b"\x91" * 100_000, 0),
        (b"\x01\x93\x07\xc2\x82\xa4type\xa5write\xa9token_ids" + b"\x91" * 100_000, 0),
        (b"\x01\xdd\xff\xff\xff\xff", 0),  # headers that announce the world
        (b"\x01\x93\x07\xc2\xdf\xff\xff\xff\xff", 0),
        (b"\x01\x93\x07\xc2\x82\xa4type\xa5write\xa4keys\xdd\xff\xff\xff\xff", 0),
        (b"\x01\x93\x07\xc2\x82\xa4type\xa5write\xa9token_ids\xc6\xff\xff\xff\xff", 0),
        (b"\x01\x93\x07\xc2\x82\xa4type\xa7swap_in\xadswap_node_ids\xdd\xff\xff\xff\xff", 0),
    ],
)
def test_bytes_that_are_no_message_are_malformed(data: bytes, seq: int) -> None:
    error = refusal(data)
    assert (error.reason, error.seq) == ("malformed", seq)


@given(st.binary(max_size=200))
@example(b"\x01")
def test_no_bytes_raise_anything_but_a_refusal(data: bytes) -> None:
    for payload in (data, b"\x01" + data, b"\x01\x93\x07\xc2" + data):
        survive(wire.decode_request, payload)
        survive(wire.decode_reply, payload)


def survive(decode: Callable[[bytes], object], data: bytes) -> None:
    """Anything but a ProtocolError goes through and fails the test."""
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode(data), wire.Request | wire.ReplyEnvelope)


@given(st.data(), st.sampled_from(BODIES).flatmap(built))
def test_no_damage_to_a_good_message_raises_anything_but_a_refusal(data: st.DataObject, body: wire.Body) -> None:
    payload = bytearray(wire.encode_request(7, body, ack=True, session=3))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"])):
            case "flip":
                payload[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del payload[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                payload[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                payload[at:at] = payload[at : at + 8]
        if not payload:
            break
    survive(wire.decode_request, bytes(payload))


# A message of 8 MiB of empty lists is half a gigabyte as Python objects.
BOMBS = """
import resource, sys
from transferd.wire import malformed
from transferd.wire import protocol as wire
lists = b"\\xdd\\x00\\x80\\x00\\x00" + b"\\x90" * (8 << 20)
head = b"\\x01\\x93\\x07\\xc2"
bombs = [
    b"\\x01" + lists,
    head + lists,
    head + b"\\x82\\xa4type\\xa5write\\xa9token_ids" + lists,
    head + b"\\x82\\xa9token_ids" + lists + b"\\xa4type\\xa5write",
    head + b"\\x82\\xa4type" + lists + b"\\xa7task_id\\xa1x",
    head + b"\\x83\\xa4type\\xa5write\\xa7task_id" + lists + b"\\xa4keys\\x90",
    b"\\x01\\x93" + lists + b"\\xc2\\x81\\xa4type\\xa3bye",
]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for limit in (None, 1 << 20):
    for bomb in bombs:
        try:
            wire.decode_request(bomb, limit)
        except wire.Malformed:
            continue
        sys.exit("a bomb was taken for a request")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_message_of_empty_lists_costs_about_its_own_size_to_refuse() -> None:
    done = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 1024, "KiB of memory"
