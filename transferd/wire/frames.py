"""Messages as frames: the one that a message of ours consists of, and the rest of one that is not ours."""

from __future__ import annotations

import zmq

LARGE = 64 * 1024  # bytes; below it a copy costs less than to keep the frame


def one_frame(socket: zmq.Socket[bytes]) -> bytes | memoryview:
    """The one frame that a message consists of; nothing if the peer sent several."""
    frame = socket.recv(zmq.DONTWAIT, copy=False)
    return b"" if drop_rest(socket) else content_of(frame)


def content_of(frame: zmq.Frame) -> bytes | memoryview:
    """The frame's bytes: a copy, unless it is large, or there is no memory for one. So nothing that arrived is lost.

    (`recv` with a copy takes the message off the socket before it finds that it cannot copy it.)
    """
    if len(frame) < LARGE:
        try:
            return frame.bytes
        except MemoryError:
            pass
    return frame.buffer


def drop_rest(socket: zmq.Socket[bytes]) -> int:
    """Take and drop what is left of a message; how many frames that was."""
    frames = 0
    while number_of(socket, zmq.RCVMORE):
        socket.recv(zmq.DONTWAIT)
        frames += 1
    return frames


def number_of(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value
