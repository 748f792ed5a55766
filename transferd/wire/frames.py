"""Messages as frames: the one that a message of ours consists of, and the rest of one that is not ours."""

from __future__ import annotations

import zmq


def one_frame(socket: zmq.Socket[bytes]) -> bytes:
    """The one frame that a message consists of; nothing if the peer sent several."""
    payload = socket.recv(zmq.DONTWAIT)
    return b"" if drop_rest(socket) else payload


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
