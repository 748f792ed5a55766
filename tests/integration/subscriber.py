"""A router's side of KV events, written from the published schema and nothing of ours."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

WAIT_MS = 60_000  # a bound on every wait, never waited out


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    locality: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Follows one publisher and keeps an index. Blocking: call it in a thread.

    batches: as they came, gaps filled. index: medium -> hashes that are there. asked: how many replays it took.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, *, topic: bytes = b"", hwm: int = 1000) -> None:
        self._decoder = msgspec.msgpack.Decoder(Batch)
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, hwm)
        self._sub.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self._replay.connect(replay_endpoint)
        self.last = -1
        self.batches: list[Batch] = []
        self.index: dict[str | None, set[int | bytes]] = {}
        self.tokens: dict[int | bytes, tuple[int | bytes | None, list[int]]] = {}  # hash -> parent, its tokens
        self.topics: set[bytes] = set()
        self.asked = 0

    def close(self) -> None:
        self._context.destroy(0)

    def follow(self, count: int) -> None:
        """Take batches until `count` have been seen in all."""
        while len(self.batches) < count:
            self.step()

    def step(self) -> None:
        """Take one live batch, and first whatever was missed before it."""
        topic, sequence, payload = self._sub.recv_multipart()
        number = int.from_bytes(sequence, "big")
        if number <= self.last:
            return  # a replay had it already
        if number > self.last + 1:
            self.catch_up()
        if number > self.last:
            self._take(topic, number, payload)

    def catch_up(self) -> int:
        """Ask for everything since the last batch; how many batches came."""
        self.asked += 1
        came = 0
        self._replay.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            delimiter, topic, sequence, payload = self._replay.recv_multipart()
            assert delimiter == b""
            number = int.from_bytes(sequence, "big", signed=True)
            if number == -1:
                assert payload == b""
                return came
            came += 1
            if number > self.last:
                self._take(topic, number, payload)

    def live(self) -> bool:
        """Whether a live batch is there now."""
        return bool(self._sub.poll(0))

    def _take(self, topic: bytes, number: int, payload: bytes) -> None:
        self.topics.add(topic)
        self.last = number
        batch = self._decoder.decode(payload)
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
            elif isinstance(event, BlockRemoved):
                self.index.setdefault(event.medium, set()).difference_update(event.block_hashes)
            else:
                self.index.setdefault(event.medium, set()).update(event.block_hashes)
                self._describe(event)

    def _describe(self, event: BlockStored) -> None:
        if not event.token_ids:
            return
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        parent = event.parent_block_hash
        for i, hash_ in enumerate(event.block_hashes):
            self.tokens[hash_] = (parent, event.token_ids[i * event.block_size : (i + 1) * event.block_size])
            parent = hash_
