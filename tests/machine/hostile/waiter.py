"""A user that makes the daemon wait, for ever: `python -m tests.machine.hostile.waiter UID ENDPOINT SESSION`.

It asks, on as many connections as it takes, when a task is settled that was pushed in another client's session. The
daemon answers once that client is gone. Prints how many questions wait, and leaves when its input ends.
"""

from __future__ import annotations

import contextlib
import sys

from tests.machine.hostile.accounts import become
from tests.machine.hostile.raw_peer import RawPeer
from transferd.daemon.server import MAX_WAITING_PER_CLIENT, MAX_WAITING_REQUESTS
from transferd.wire import protocol as wire


def wait(endpoint: str, session: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_WAITING_REQUESTS // MAX_WAITING_PER_CLIENT + 2):
            peer = stack.enter_context(RawPeer(endpoint))
            peer.greet()
            peer.ask(wire.Hello())
            for number in range(MAX_WAITING_PER_CLIENT):
                peer.send(wire.encode_request(number + 2, wire.Settled("t", session)))
            peer.ask(wire.Hello(), 1000)  # it has read them all
        print("waiting", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    uid, endpoint, session = sys.argv[1:]
    become(int(uid), int(uid), [])
    wait(endpoint, int(session))
