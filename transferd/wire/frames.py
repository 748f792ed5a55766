"""Reads messages of one frame, and drops the remaining frames of longer ones."""

from __future__ import annotations

import zmq

LARGE = 64 * 1024  # bytes; below this a copy costs less than keeping the frame


def one_frame(socket: zmq.Socket[bytes]) -> bytes | memoryview:
    """Receive a message of one frame; return b"" if it has several."""
    return content_of(socket, socket.recv(zmq.DONTWAIT, copy=False))


def content_of(socket: zmq.Socket[bytes], frame: zmq.Frame) -> bytes | memoryview:
    """The bytes of a message, of which this is the first frame; b"" if it has several, whose rest is dropped.

    Copies them; if they are many, or memory is short, returns a view instead, so that no message is lost. (A copying
    `recv` removes the message from the socket before it runs out of memory for the copy.)
    """
    if frame.more:
        drop_rest(socket)
        return b""
    if len(frame) < LARGE:
        try:
            return frame.bytes
        except MemoryError:
            pass
    return frame.buffer


def drop_rest(socket: zmq.Socket[bytes]) -> None:
    """Drop the remaining frames of a message."""
    while number_of(socket, zmq.RCVMORE):
        socket.recv(zmq.DONTWAIT)


def number_of(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value
