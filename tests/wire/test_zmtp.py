"""ZMTP without sockets: bytes may arrive in any pieces, and nonsense is a ZmtpError."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.wire import zmtp
from transferd.wire.zmtp import (
    ASSEMBLED,
    COMMAND,
    GREETING_BYTES,
    LONG,
    MORE,
    MOST_COMMAND,
    Frames,
    NotAllowed,
    Null,
    ZmtpError,
    check_greeting,
    command,
    greeting,
    header,
    parse_command,
    parse_properties,
    properties,
)

DEALERS = frozenset((b"DEALER",))
BODIES = st.one_of(st.binary(max_size=300), st.integers(0, 3 * ASSEMBLED).map(lambda size: bytes([size % 256]) * size))


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def read(pieces: list[bytes], limit: int = 1 << 20) -> list[tuple[int, bytes]]:
    """The frames of these pieces, received as a connection does."""
    frames, found = Frames(limit), []
    for received in pieces:
        piece = received
        while piece:
            space = frames.space
            if space is None:
                frames.feed(piece)
                piece = b""
            else:
                count = min(len(space), len(piece))
                space[:count] = piece[:count]
                frames.filled(count)
                piece = piece[count:]
            while (frame := frames.next()) is not None:
                found.append((frame[0], bytes(frame[1])))
            if frames.wanted:
                frames.begin()
    return found


@given(st.lists(st.tuples(st.sampled_from((0, MORE, COMMAND)), BODIES), max_size=8), st.lists(st.integers(0, 10**6)))
def test_frames_are_the_same_in_whatever_pieces_they_arrive(sent: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(header(flags, len(body)) + body for flags, body in sent)
    assert read(split(data, cuts)) == sent
    assert read([data]) == sent


@given(st.binary(max_size=200), st.lists(st.integers(0, 10**6)))
def test_arbitrary_bytes_decode_to_frames_or_raise_a_protocol_error(data: bytes, cuts: list[int]) -> None:
    outcomes = []
    for pieces in ([data], split(data, cuts)):
        try:
            outcomes.append(read(pieces, limit=4096))
        except ZmtpError:
            outcomes.append([])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("size", [0, 1, 255, 256, ASSEMBLED, ASSEMBLED + 1, 100_000])
def test_a_short_frame_may_have_a_long_header(size: int) -> None:
    body = bytes(size)
    assert read([bytes((LONG,)) + size.to_bytes(8, "big") + body]) == [(0, body)]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x08\0", "flags 0x08"),
        (b"\x05\0", "flags 0x05"),
        (b"\x80\0", "flags 0x80"),
        (b"\x0a", ""),
        (b"\x0a\0", "flags 0x0a"),
        (bytes((LONG,)) + (2**63).to_bytes(8, "big"), "9223372036854775808 bytes, the limit is 1000"),
        (bytes((LONG,)) + (1001).to_bytes(8, "big"), "1001 bytes, the limit is 1000"),
    ],
)
def test_a_malformed_frame_is_refused_before_its_body_arrives(data: bytes, problem: str) -> None:
    frames = Frames(1000)
    frames.feed(data)
    if not problem:
        assert frames.next() is None
        return
    with pytest.raises(ZmtpError, match=problem):
        frames.next()


def test_a_command_is_never_large() -> None:
    frames = Frames(1 << 20)
    frames.feed(header(COMMAND, MOST_COMMAND + 1))
    with pytest.raises(ZmtpError, match="a command has 8193 bytes"):
        frames.next()


def test_a_large_frame_takes_memory_only_at_begin() -> None:
    frames = Frames(1 << 30)
    frames.feed(bytes((LONG,)) + (1 << 30).to_bytes(8, "big") + b"abc")
    assert frames.next() is None
    assert (frames.wanted, frames.space) == (1 << 30, None)
    frames.begin()
    assert frames.space is not None
    assert len(frames.space) == (1 << 30) - 3


# --- greetings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", [b"NULL", b"CURVE"])
def test_every_beginning_of_a_greeting_passes(mechanism: bytes) -> None:
    whole = greeting(mechanism, as_server=False)
    assert len(whole) == GREETING_BYTES
    for length in range(len(whole) + 1):
        check_greeting(whole[:length], mechanism)
    frames = Frames()
    for byte in whole:
        assert not frames.greeting(mechanism)
        frames.feed(bytes((byte,)))
    assert frames.greeting(mechanism)
    frames.feed(header(COMMAND, 1) + b"x")
    assert frames.next() == (COMMAND, b"x")


@pytest.mark.parametrize(
    ("spoilt", "problem"),
    [
        (b"GET / HTTP/1.1\r\n", "this is not ZMTP"),
        (b"\xff" + bytes(8) + b"\x7e", "this is not ZMTP"),
        (b"\xff" + bytes(8) + b"\x7f\x02", "ZMTP 2 is too old; ZMTP 3.0 or later is needed"),
        (greeting(b"PLAIN", as_server=False), "the mechanism is b'PLAIN'; NULL is needed here"),
    ],
)
def test_a_wrong_greeting_is_refused_as_soon_as_it_shows(spoilt: bytes, problem: str) -> None:
    with pytest.raises(ZmtpError, match=problem):
        check_greeting(spoilt, b"NULL")


# --- commands ---------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=255), st.binary(max_size=50))
def test_a_command_is_read_as_it_was_written(name: bytes, data: bytes) -> None:
    assert parse_command(command(name, data)) == (name, data)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_decode_to_a_command_or_raise_a_protocol_error(body: bytes) -> None:
    try:
        name, data = parse_command(body)
    except ZmtpError:
        return
    assert command(name, data) == body


@given(st.dictionaries(st.binary(min_size=1, max_size=20).map(bytes.lower), st.binary(max_size=300), max_size=5))
def test_properties_are_read_as_they_were_written(values: dict[bytes, bytes]) -> None:
    assert parse_properties(properties(values)) == values


@given(st.binary(max_size=100))
def test_arbitrary_bytes_decode_to_properties_or_raise_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ZmtpError):
        found = parse_properties(data)
        assert sum(5 + len(name) + len(value) for name, value in found.items()) <= len(data)
        assert all(name and name == name.lower() for name in found)


def test_a_handshake_ends_with_ready() -> None:
    null = Null(b"ROUTER", DEALERS, "")
    answer = null.receive(command(b"READY", properties({b"socket-TYPE": b"DEALER", b"Identity": b"\0abcd"})))
    name, data = parse_command(answer)
    assert (null.done, name, parse_properties(data)) == (True, b"READY", {b"socket-type": b"ROUTER", b"identity": b""})


@pytest.mark.parametrize(
    "body",
    [
        command(b"HELLO", b""),
        command(b"READY", b""),
        command(b"READY", properties({b"Socket-Type": b"SUB"})),
        command(b"READY", properties({b"Socket-Type": b"DEALER"})[:-1]),
        b"",
        b"\x05",
        b"\x09READY",
    ],
)
def test_anything_else_is_no_handshake(body: bytes) -> None:
    null = Null(b"ROUTER", DEALERS, "")
    with pytest.raises(ZmtpError):
        null.receive(body)
    assert not null.done


def test_a_forbidden_user_is_refused_once_the_handshake_is_good() -> None:
    null = Null(b"ROUTER", DEALERS, "unknown_user")
    with pytest.raises(NotAllowed, match="unknown_user"):
        null.receive(command(b"READY", properties({b"Socket-Type": b"DEALER"})))
    assert not null.done
    assert zmtp.ERROR_400 == b"\x05ERROR\x03400"
