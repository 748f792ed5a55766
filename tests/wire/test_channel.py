"""One socket on the loop: every message is read, whatever consumed the signal that announced it, and nobody starves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest
import zmq

from transferd.runtime.compat import timeout
from transferd.wire.transport import DRAIN_LIMIT, Channel


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        for socket in (ours, theirs):
            socket.setsockopt(zmq.LINGER, 0)
        ours.bind("inproc://channel")
        theirs.connect("inproc://channel")
        yield ours, theirs


class Reads:
    """Messages in the order of their arrival, and how many each turn of the loop brought."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.by_turn = [0]
        asyncio.get_running_loop().call_soon(self._next_turn)

    def __call__(self, socket: zmq.Socket[bytes]) -> None:
        self.heard.append(socket.recv(zmq.DONTWAIT))
        self.by_turn[-1] += 1

    def _next_turn(self) -> None:
        self.by_turn.append(0)
        asyncio.get_running_loop().call_soon(self._next_turn)

    async def until(self, count: int) -> None:
        async with timeout(30):
            while len(self.heard) < count:  # noqa: ASYNC110 - libzmq has no event to wait for
                await asyncio.sleep(0)


@pytest.mark.parametrize("count", [1, 2, DRAIN_LIMIT, DRAIN_LIMIT + 1, DRAIN_LIMIT + 2, 10 * DRAIN_LIMIT])
async def test_a_burst_is_read_in_order_and_leaves_the_loop_its_turns(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], count: int
) -> None:
    reads = Reads()
    channel = Channel(pair[0], reads)
    await asyncio.sleep(0)
    messages = [str(i).encode() for i in range(count)]
    for message in messages:
        pair[1].send(message)
    await reads.until(count)
    assert reads.heard == messages
    assert max(reads.by_turn) <= DRAIN_LIMIT + 1  # the one that the signal announced, and a check's
    channel.close()


async def test_the_first_message_of_a_wake_up_is_read_without_a_question(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, asked = Reads(), []
    channel = Channel(pair[0], reads)
    await asyncio.sleep(0)
    monkeypatch.setattr(channel, "_events", lambda: asked.append(len(reads.heard)) or 0)
    pair[1].send(b"one")
    await reads.until(1)
    await asyncio.sleep(0)
    assert asked == [1]
    channel.close()


async def test_a_message_is_read_although_a_send_has_consumed_its_signal(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    """A send handles libzmq's commands, the one that announces a message included, so the descriptor stays silent."""
    reads = Reads()
    channel = Channel(pair[0], reads)
    await asyncio.sleep(0.01)
    for i in range(200):
        pair[1].send(str(i).encode())
        channel.send(b"between", zmq.DONTWAIT)
        assert cast("int", pair[0].getsockopt(zmq.EVENTS)) & zmq.POLLIN  # now it has no signal left
        channel.check_soon()
        await reads.until(i + 1)
        assert pair[1].recv() == b"between"
    assert reads.heard == [str(i).encode() for i in range(200)]
    channel.close()


async def test_a_wake_up_for_nothing_is_no_error_and_the_next_message_arrives(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    reads = Reads()
    channel = Channel(pair[0], reads)
    channel._wake()
    assert reads.heard == []
    pair[1].send(b"later")
    await reads.until(1)
    channel.close()
    channel._wake()  # a wake-up that was on its way when the channel was closed
