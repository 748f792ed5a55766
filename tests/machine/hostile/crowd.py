"""A user with many connections: `python -m tests.machine.hostile.crowd UID ENDPOINT COUNT [BYTES]`.

BYTES: each connection announces a message of that length and never sends it all. Prints how many were let in, and
stays until its input ends.
"""

from __future__ import annotations

import contextlib
import struct
import sys

from tests.machine.hostile.accounts import become
from tests.machine.hostile.raw_peer import LONG, RawPeer


def crowd(endpoint: str, count: int, announced: int) -> None:
    with contextlib.ExitStack() as stack:
        there = 0
        for _ in range(count):
            with contextlib.suppress(OSError):
                peer = stack.enter_context(RawPeer(endpoint))
                peer.greet()
                there += 1
                if announced:
                    peer.socket.sendall(bytes([LONG]) + struct.pack(">Q", announced) + bytes(1000))
        print(there, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    uid, endpoint, count, *more = sys.argv[1:]
    become(int(uid), int(uid), [])
    crowd(endpoint, int(count), int(more[0]) if more else 0)
