"""Sends a daemon what it should never be sent: `python -m tests.machine.fuzz.attacker ENDPOINT MESSAGES SEED`.

Four peers take turns: one that reads its answers, one that does not, one that leaves and comes back, and one
that sends several frames at a time. Beside them, some speak no ZeroMQ at all. Prints one JSON object: how many
messages were sent, and how many of them the daemon must have read.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from tests.machine.fuzz.frames import Frames
from transferd.wire import protocol as wire

PATIENCE_S = 60
TURN = 500  # messages
DRAIN_EVERY = 50


class Peer:
    """One raw connection. `sync` proves that everything sent on it was read."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, PATIENCE_S * 1000)
        self.socket.connect(endpoint)
        self._syncs = 0

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def drain(self) -> None:
        """Read what has arrived."""
        while self.socket.poll(0):
            self.socket.recv_multipart()

    def sync(self) -> None:
        """Say Hello and read until it is answered. Raises RuntimeError when that takes too long.

        Hello is said again when nothing comes: the answer to somebody who has not read for long is dropped.
        """
        for _ in range(PATIENCE_S):
            self._syncs += 1
            seq = 2**50 + self._syncs
            self.send(wire.encode_request(seq, wire.Hello()))
            while self.socket.poll(1000):
                if wire.decode_reply(self.socket.recv()).seq == seq:
                    return
        raise RuntimeError("the daemon does not answer")

    def close(self) -> None:
        self.socket.close(0)


@contextmanager
def stranger(endpoint: str, noise: bytes) -> Iterator[None]:
    """Somebody who speaks no ZeroMQ, and stays for a while."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(endpoint.removeprefix("ipc://"))
        raw.sendall(noise)
        yield


def attack(endpoint: str, messages: int, seed: int) -> dict[str, int]:
    """Send so many messages in turns of TURN."""
    frames, sent = Frames(seed), 0
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader, silent, many = (Peer(context, endpoint) for _ in range(3))
    strangers = 0
    while sent < messages:
        turn = sent // TURN % 5
        if turn == 4:
            with stranger(endpoint, frames.chance.randbytes(frames.chance.randrange(200))):
                strangers += 1
                guest = Peer(context, endpoint)
                sent += _turn(guest, frames)
                guest.sync()
                guest.close()
        elif turn == 3:
            for _ in range(TURN):
                many.send(*(frames.draw()[:50] for _ in range(frames.chance.randrange(2, 5))))
            sent += TURN
            many.drain()
        else:
            sent += _turn(silent if turn == 2 else reader, frames, reads=turn != 2)
    for peer in (reader, silent, many):
        peer.sync()
        peer.close()
    context.term()
    return {"sent": sent, "requests": frames.passed, "strangers": strangers}


def _turn(peer: Peer, frames: Frames, *, reads: bool = True) -> int:
    for number in range(TURN):
        peer.send(frames.draw())
        if reads and number % DRAIN_EVERY == 0:
            peer.drain()
    return TURN


if __name__ == "__main__":
    print(json.dumps(attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
