"""A router's side of KV events: an index of which blocks a node holds, from the two sockets of [events].

    python examples/follow_events.py EVENTS_ENDPOINT REPLAY_ENDPOINT    follows until it is interrupted
    python examples/follow_events.py    writes a block at a daemon of its own, and waits for the event

docs/events.md describes the messages. pyzmq and msgspec are all that a subscriber needs.

A subscriber is right as long as it has every batch since a snapshot, in order. Whenever that is in doubt, it starts
over with another snapshot: after each new connection, when the numbers go back (another daemon), and when the batches
that it missed are not kept any more.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

END = -1  # the number in the message that ends an answer
SNAPSHOT = -2  # requests everything that is announced now
WAIT_MS = 1000  # for an answer; and after so long a silence we look whether we missed the last batches
Index = defaultdict[int, defaultdict[str, set[int]]]


class Follower:
    """index: engine (its dp_rank) -> medium -> hashes of the blocks that are there now."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.index: Index = defaultdict(lambda: defaultdict(set))
        self._replay_endpoint = replay_endpoint
        self._next: int | None = None  # the number of the batch that comes next; None before a snapshot
        self._has_snapshots = True  # vLLM, and transferd before 0.3, have none
        self._ahead: dict[int, bytes] = {}  # batches of a replay that the live socket will bring as well
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(b"")
        self._connections = self._live.get_monitor_socket(int(zmq.EVENT_HANDSHAKE_SUCCEEDED))
        self._live.connect(endpoint)

    def close(self) -> None:
        self._live.disable_monitor()
        self._connections.close(0)
        self._live.close(0)

    def events(self) -> Iterator[dict[str, Any]]:
        """Each event, once it is in the index. Never ends."""
        while True:
            yield from self.step()

    def step(self) -> Iterator[dict[str, Any]]:
        """Take the next batch, or find after a second that there is none."""
        connected = False
        while self._connections.poll(0):
            connected |= parse_monitor_message(self._connections.recv_multipart())["event"] > 0
        if connected:  # perhaps to another daemon, and perhaps we missed batches
            yield from self._start_over()
        if self._live.poll(WAIT_MS):
            _topic, number, batch = self._live.recv_multipart()
            yield from self._heard(_number(number), batch)
        elif self._next is not None:
            yield from self._replay(self._next)

    def _heard(self, number: int, batch: bytes) -> Iterator[dict[str, Any]]:
        if self._next is None:
            yield from self._start_over()  # the last snapshot did not arrive
        elif number < self._next and self._ahead.get(number) != batch:  # another daemon
            yield from self._start_over()
        elif number > self._next:
            yield from self._replay(self._next)
        if number == self._next:
            yield from self._take(number, batch)
        self._ahead = {ahead: one for ahead, one in self._ahead.items() if ahead > number}

    def _replay(self, start: int) -> Iterator[dict[str, Any]]:
        """Take the batches from this one on."""
        for number, batch in self._answers(start):
            if number != self._next and self._has_snapshots:  # the batches before it are lost for good
                yield from self._start_over()
                return
            if number != self._next:
                self.index.clear()
            self._ahead[number] = batch
            yield from self._take(number, batch)

    def _start_over(self) -> Iterator[dict[str, Any]]:
        """Forget everything, and take a snapshot and the batches after it."""
        self.index.clear()
        self._ahead.clear()
        self._next, self._has_snapshots = None, True
        for number, batch in self._answers(SNAPSHOT):
            if self._next is None:
                self._next = int.from_bytes(batch, "big")
            elif number == SNAPSHOT:
                yield from self._apply(batch)
            elif number == self._next:
                self._ahead[number] = batch
                yield from self._take(number, batch)
            else:  # the snapshot is too old already
                yield from self._start_over()
                return

    def _answers(self, wanted: int) -> Iterator[tuple[int, bytes]]:
        """The answers to one request, on a connection of its own: those of an earlier one cannot get between them."""
        with self._context.socket(zmq.DEALER) as asking:
            asking.linger = 0
            asking.connect(self._replay_endpoint)
            asking.send_multipart([b"", wanted.to_bytes(8, "big", signed=True)])
            while asking.poll(WAIT_MS):
                *_, number, batch = asking.recv_multipart()
                if _number(number) == END:
                    break
                yield _number(number), batch
            else:
                self._next = None  # no answer: nothing is known, until the next batch or connection
                return
            if self._next is None:
                self._next, self._has_snapshots = 0, False

    def _take(self, number: int, batch: bytes) -> Iterator[dict[str, Any]]:
        self._next = number + 1
        yield from self._apply(batch)

    def _apply(self, batch: bytes) -> Iterator[dict[str, Any]]:
        _time, events, engine = msgspec.msgpack.decode(batch)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.index.pop(engine, None)  # this engine's alone
            elif event["type"] == "BlockStored":
                self.index[engine][event["medium"]].update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                self.index[engine][event["medium"]].difference_update(event["block_hashes"])
            yield event

    def holds(self, medium: str, block: int) -> bool:
        """Whether any engine has this block there."""
        return any(block in media[medium] for media in self.index.values())


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


async def write(endpoint: str, key: str) -> None:
    from transferd import Client, Status, WriteStorageTask

    async with Client(endpoint, connect_timeout=60.0) as client:
        await client.attach(0)  # tasks of an engine that has not attached its memory are rejected
        result = await client.submit(WriteStorageTask(task_id=key[:8], keys=[key], gpu_block_ids=[3]))
        assert result.status is Status.OK, result


def show() -> None:
    """Write a block at a daemon of our own, and wait for the event that says so."""
    from transferd.blocks.keys import block_keys
    from transferd.client.launch import running

    (key,) = block_keys(range(16), 16)
    with tempfile.TemporaryDirectory() as directory:
        events = {"endpoint": f"ipc://{directory}/events", "replay_endpoint": f"ipc://{directory}/replay"}
        cache = {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 64, "block_size": 16, "device_blocks": 16}
        tree = {"events": events, "cache": cache, "storage": {"backend": "memory"}}
        with running(tree, Path(directory)) as daemon:
            follower = Follower(events["endpoint"], events["replay_endpoint"])
            asyncio.run(write(daemon.endpoint, key))
            wanted = int(key[-16:], 16)  # a SHA-256 is announced by its last 8 bytes
            for event in follower.events():
                if follower.holds("STORAGE", wanted):
                    print(event["type"], event["medium"], f"{wanted:016x}" == key[-16:])
                    break
            follower.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        for event in Follower(*sys.argv[1:3]).events():
            print(event)
    else:
        show()
