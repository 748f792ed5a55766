"""Peers at `pd.listen` that hand over nothing: plain sockets, because the protocol there is frames on TCP."""

from __future__ import annotations

import contextlib
import socket
import time

from transferd.storage.peer.messages import Want, encode

MIB = 1024**2
MOST = 256 * MIB  # 64 MiB of what arrives, 128 MiB each of what waits and what is not read; the rest is the allocator's
LONGEST_NAME = 1024  # of a transfer
QUIET_S = 1.0  # a daemon that has read nothing for so long reads no more

Address = tuple[str, int]


def peers(address: Address, count: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(count)]


def push(peer: socket.socket, payload: bytes) -> None:
    """Send until the daemon reads no more, or ends the connection."""
    peer.settimeout(QUIET_S)
    rest = memoryview(payload)
    with contextlib.suppress(TimeoutError, ConnectionError):
        while rest:
            rest = rest[peer.send(rest) :]


def wait(address: Address, stack: contextlib.ExitStack) -> None:
    """Receivers that wait for their senders. Each names few objects, with long names."""
    few = peers(address, 4, stack)
    for number in range(60):
        push(few[number % 4], encode(Want(f"t{number}", 0, 1, ["x" * (8 * MIB)], "engine")))


def never_arrive(address: Address, stack: contextlib.ExitStack) -> None:
    """Messages of which a part arrives."""
    part = encode(Want("t", 0, 1, ["x" * (8 * MIB)], "engine"))[: 4 * MIB]
    sent = dict.fromkeys(peers(address, 300, stack), 0)
    for peer in sent:
        peer.setblocking(False)
    since = time.monotonic()
    while time.monotonic() - since < QUIET_S:
        for peer in sent:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                count = peer.send(part[sent[peer] :])
                sent[peer] += count
                since = time.monotonic() if count else since
        time.sleep(0.01)


def never_read(address: Address, stack: contextlib.ExitStack) -> None:
    """Each Want of a rank that is not there is refused, and the refusal repeats the transfer's name."""
    want = encode(Want("t" * LONGEST_NAME, 99, 1, [], "engine"))
    asked = want * (56 * MIB // len(want))
    for peer in peers(address, 6, stack):
        push(peer, asked)
