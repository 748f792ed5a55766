"""Messages off a socket: whole, or nothing; and never lost because there is no memory for a copy."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq

from transferd.wire.transport import one_frame

LARGE = 64 * 1024


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://frames")
        other.connect("inproc://frames")
        yield one, other


@pytest.mark.parametrize("nbytes", [0, 1, LARGE - 1, LARGE, 3 * LARGE])
def test_a_message_comes_out_whole_whatever_its_size(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], nbytes: int
) -> None:
    sent = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)
    pair[0].send(sent)
    pair[1].poll(10_000)
    assert bytes(one_frame(pair[1])) == sent


def test_a_message_of_several_frames_is_nothing_and_the_next_one_is_whole(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    pair[0].send_multipart([b"a", b"b", b"c"])
    pair[0].send(b"next")
    pair[1].poll(10_000)
    assert one_frame(pair[1]) == b""
    assert one_frame(pair[1]) == b"next"


class Uncopied:
    """A small frame, and no memory to copy it."""

    more = False

    def __init__(self, content: bytes) -> None:
        self.buffer = memoryview(content)

    def __len__(self) -> int:
        return len(self.buffer)

    @property
    def bytes(self) -> bytes:
        raise MemoryError


def test_a_frame_that_cannot_be_copied_is_read_where_it_is() -> None:
    socket = SimpleNamespace(recv=lambda *_, **__: Uncopied(b"hello"))
    assert bytes(one_frame(socket)) == b"hello"  # type: ignore[arg-type]
