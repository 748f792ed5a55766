"""A router's side of KV events: an index of which blocks a node holds, from the two sockets of [events].

    python examples/follow_events.py EVENTS_ENDPOINT REPLAY_ENDPOINT    follows until it is interrupted
    python examples/follow_events.py    writes a block at a daemon of its own, and waits for the event

docs/events.md describes the messages. pyzmq and msgspec are all that a subscriber needs.
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

END = -1  # the number in the message that ends an answer


class Follower:
    """index: medium -> hashes of the blocks that are there now."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.index: defaultdict[str, set[int]] = defaultdict(set)
        self._next = 0  # the number of the batch that comes next
        context = zmq.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._live.subscribe(b"")
        self._live.connect(endpoint)
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)

    def close(self) -> None:
        self._live.close(0)
        self._replay.close(0)

    def events(self) -> Iterator[dict[str, Any]]:
        """Each event, once it is in the index. Never ends."""
        while True:
            yield from self._missed()  # at first, after a gap, and after a second of silence: nothing stays lost
            while self._live.poll(1000):
                _topic, number, batch = self._live.recv_multipart()
                if self._number(number) > self._next:
                    break
                yield from self._take(self._number(number), batch)

    def _missed(self) -> Iterator[dict[str, Any]]:
        self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            _empty, _topic, number, batch = self._replay.recv_multipart()
            if self._number(number) == END:
                return
            yield from self._take(self._number(number), batch)

    def _take(self, number: int, batch: bytes) -> Iterator[dict[str, Any]]:
        if number < self._next:
            return  # known already, from the other socket
        self._next = number + 1
        _time, events, _dp_rank = msgspec.msgpack.decode(batch)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.index.clear()
            elif event["type"] == "BlockStored":
                self.index[event["medium"]].update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                self.index[event["medium"]].difference_update(event["block_hashes"])
            yield event

    @staticmethod
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
                if wanted in follower.index["STORAGE"]:
                    print(event["type"], event["medium"], f"{wanted:016x}" == key[-16:])
                    break
            follower.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        for event in Follower(*sys.argv[1:3]).events():
            print(event)
    else:
        show()
