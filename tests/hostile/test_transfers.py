"""Peers at `pd.listen`, where daemons hand over blocks to each other: real daemons, plain sockets.

The socket has no authentication, so whatever comes in takes bounded memory, and honest handovers go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import pytest

from tests.integration.caches import fill, snapshot, wipe
from tests.integration.test_handover import TOKENS, Side, pair
from transferd.cli.pool.master import master_executable
from transferd.storage.peer.messages import Want, encode

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]

MIB = 1024**2
MOST = 384 * MIB  # 64 MiB of what arrives, 128 MiB each of what waits and what is not read; the rest is the allocator's
BLOCKS = [1, 2, 3, 4, 5, 6]


def resident(node: Side) -> int:
    status = Path(f"/proc/{node.daemon.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024


def address(node: Side) -> tuple[str, int]:
    host, _, port = node.client.pd_address.rpartition(":")
    return host, int(port)


def peers(node: Side, count: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(address(node), timeout=5)) for _ in range(count)]


def push(peer: socket.socket, payload: bytes) -> None:
    """Send as much as the daemon reads within a second, or until it ends the connection."""
    peer.settimeout(1.0)
    with contextlib.suppress(TimeoutError, ConnectionError):
        peer.sendall(payload)


async def hands_over(prefill: Side, decode: Side) -> None:
    request = f"honest-{time.monotonic_ns()}"
    fill(prefill.caches, BLOCKS, seed=3)
    wipe(decode.caches, BLOCKS)
    await asyncio.gather(
        prefill.client.write_all(request, TOKENS, BLOCKS),
        decode.client.read_all(request, TOKENS, BLOCKS, peer=prefill.client.pd_address),
    )
    assert snapshot(decode.caches, BLOCKS) == snapshot(prefill.caches, BLOCKS)


def wait(node: Side, stack: contextlib.ExitStack) -> None:
    """Receivers that wait for their senders. Each names few objects, with long names."""
    few = peers(node, 4, stack)
    for number in range(60):
        push(few[number % 4], encode(Want(f"t{number}", 0, 1, ["x" * (8 * MIB)], "engine")))


def never_arrive(node: Side, stack: contextlib.ExitStack) -> None:
    """Messages of which a part arrives."""
    part = encode(Want("t", 0, 1, ["x" * (8 * MIB)], "engine"))[: 4 * MIB]
    sent = dict.fromkeys(peers(node, 150, stack), 0)
    for peer in sent:
        peer.setblocking(False)
    since = time.monotonic()
    while time.monotonic() - since < 1.0:  # until the daemon reads no more
        for peer in sent:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                count = peer.send(part[sent[peer] :])
                sent[peer] += count
                since = time.monotonic() if count else since
        time.sleep(0.01)


def never_read(node: Side, stack: contextlib.ExitStack) -> None:
    """Each Want of a rank that is not there is refused, and the refusal repeats the transfer's name."""
    asked = encode(Want("t" * MIB, 99, 1, [], "engine")) * 60
    for peer in peers(node, 12, stack):
        push(peer, asked)


async def test_peers_that_hand_over_nothing_take_bounded_memory(tmp_path: Path) -> None:
    async with pair("direct", None, tmp_path) as (prefill, decode):
        await hands_over(prefill, decode)
        for attack in (wait, never_arrive, never_read):
            before = resident(prefill)
            with contextlib.ExitStack() as stack:
                await asyncio.to_thread(attack, prefill, stack)
                assert resident(prefill) - before < MOST, attack.__doc__
                await hands_over(prefill, decode)
            await hands_over(prefill, decode)
