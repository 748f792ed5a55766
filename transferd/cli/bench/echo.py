"""The bare transport as a limit: a ZeroMQ ROUTER in its own process that returns each message."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from transferd.runtime.address import socket_path

PAYLOAD = b"x" * 200  # about as long as a one-block task
PATIENCE_MS = 30_000  # the time limit of one echo

_PROGRAM = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
while True:
    frames = socket.recv_multipart()
    socket.send_multipart(frames)
"""


class Echo:
    """A DEALER connected to that process. Its calls block, so measure it between other rows, not at the same time."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def round_trip_us(self, messages: int) -> float:
        """Median microseconds from send to receive, one message at a time."""
        trips: list[float] = []
        for _ in range(messages):
            before = time.perf_counter()
            self._socket.send(PAYLOAD)
            self._socket.recv()
            trips.append(time.perf_counter() - before)
        return statistics.median(trips) * 1e6

    def rate(self, messages: int, in_flight: int) -> float:
        """Round trips per second, with `in_flight` messages at a time."""
        before = time.perf_counter()
        for _ in range(in_flight):
            self._socket.send(PAYLOAD)
        for _ in range(messages - in_flight):
            self._socket.recv()
            self._socket.send(PAYLOAD)
        for _ in range(in_flight):
            self._socket.recv()
        return messages / (time.perf_counter() - before)


@contextlib.contextmanager
def echo(directory: Path) -> Iterator[Echo]:
    """Start the process on a unix socket in `directory`; stop it at the end."""
    with socket_path(directory, "echo.sock") as path:
        yield from _echo(f"ipc://{path}")


def _echo(endpoint: str) -> Iterator[Echo]:
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, endpoint])
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        socket.connect(endpoint)
        try:
            yield Echo(socket)
        finally:
            socket.close(0)
    finally:
        process.kill()
        process.wait()
        context.term()
