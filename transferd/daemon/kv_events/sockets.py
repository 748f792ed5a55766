"""The sockets of KV events: a PUB socket for new batches, a ROUTER socket for replays.

    PUB      [topic, sequence, batch]; the sequence counts batches from the microseconds of the clock at the start on,
             8 bytes big-endian
    ROUTER   request [sequence]                    the first batch to replay, 8 bytes big-endian
             answers [topic, sequence, batch] …    the batches that are still kept, in order
                     [topic, -1, ""]               the end
             (after the empty delimiter that REQ sockets add and DEALER sockets must add)
             request [-2]                          a snapshot, and the batches after it
             answers [topic, -2, S]                the snapshot covers every batch before number S, 8 bytes big-endian
                     [topic, -2, batch] …          what is announced: hashes by medium (snapshot.py)
                     [topic, sequence, batch] …    the batches from S on, then the end, as above

These are vLLM's frames (its replay answers contain the topic since 0.26), but for the snapshot, which is ours. A
publisher without it reads -2 as a number that it has not reached, and answers with the end alone.

Numbers only grow, also over restarts: a subscriber that drops whatever has a number below the last one would otherwise
hear nothing of a new daemon until that has sent as many batches as the old one. So the new daemon's first batch is a
gap, and the replay begins with AllBlocksCleared. An empty batch follows a new subscription, so that whoever joins late
sees a gap, and requests a replay, at once and not with the next event.

Both speak ZMTP themselves (wire/connection.py), not by libzmq, which bounds neither subscriptions nor who ends it.

Nothing here ever waits. Batches that a slow subscriber does not read in time are dropped; the subscriber finds
the gap in the sequence and requests a replay. The batches kept for replay are bounded in number and in bytes.
Replays are sent a few batches at a time, between other work of the loop, and as fast as the peer reads. If it
reads nothing for REPLAY_PATIENCE_S, its connection ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from transferd.config.sections import EventsSection, ServerSection
from transferd.daemon.kv_events.snapshot import Announcements, Snapshot
from transferd.runtime.aio import Background, Timer, resolve
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import wait_for
from transferd.runtime.loop_turns import OneATurn
from transferd.wire.acceptor import Acceptor
from transferd.wire.connection import Door, ZmtpConnection
from transferd.wire.kv_events import KvEvent, encode_batch
from transferd.wire.transport import ROUTED
from transferd.wire.zmtp import COMMAND, MORE, parse_command

log = structlog.get_logger(__name__)

SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
SNAPSHOT = (-2).to_bytes(SEQUENCE_BYTES, "big", signed=True)
LIVE_UNREAD = 16 * 1024**2  # bytes of batches that may wait for one subscriber; the replay buffer has the rest
REPLAY_STEP = 32  # batches sent at a time: well under a millisecond of the loop
MAX_PEERS = 64  # peers with replays at once; a request of one more is ignored, and the peer asks again
MAX_REPLAYS_PER_PEER = 4  # pending replays of one peer; one more is ignored likewise
MAX_REQUEST_BYTES = 256
MAX_SUBSCRIPTION = 4096  # bytes
REPLAY_UNREAD = 1024**2  # bytes that wait for a peer before its replay does
REPLAY_PATIENCE_S = 10.0
GREET_EVERY_S = 1.0  # between two empty batches, so that subscriptions do not push other batches out of the buffer
SUBSCRIBERS = frozenset((b"SUB", b"XSUB"))


class _Replay(NamedTuple):
    """A peer's request for a replay that is not fully answered."""

    answers: Iterator[list[bytes]]  # the frames of each; [] while the next one is not ready
    snapshot: Snapshot | None = None  # sent before the batches


@dataclass(eq=False, repr=False)
class EventSockets:
    """Both sockets, on the running loop, from `start` to `close`. Owns them.

    server: has the mode of their files, and how many connections each may have.
    """

    config: EventsSection
    server: ServerSection = field(default_factory=ServerSection)
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        config = self.config
        self._topic = config.topic.encode()
        self._closed = False
        self._pub: Acceptor | None = None
        self._router: Acceptor | None = None
        # For each subscriber, how often it has subscribed to each beginning of our topic, by its length.
        self._subscribed: dict[ZmtpConnection, Counter[int]] = {}
        self._kept: deque[bytes] = deque()  # the newest batches
        self._kept_bytes = 0
        self._first = int(self.clock.wall() * 1_000_000)  # the first batch's number
        self._sequence = self._first  # the next batch's number
        self._greeted = -GREET_EVERY_S  # when an empty batch was sent last, in monotonic seconds
        self._greeting = Timer()
        self._requests: dict[ZmtpConnection, list[bytes]] = {}  # the frames of one that have arrived
        self._replays: dict[ZmtpConnection, deque[_Replay]] = {}  # those that each peer has requested
        self._serving = Background(awaited=False)  # one for each of these peers
        self._turns = OneATurn()
        self._behind: dict[ZmtpConnection, asyncio.Future[None]] = {}  # of these peers, those that must read first
        self._announcements: list[Announcements] = []
        self._counts = Counter(events=0, replays=0, snapshots=0, replays_broken_off=0)
        self.endpoint = config.endpoint
        self.replay_endpoint = config.replay_endpoint

    def start(self) -> None:
        """Bind both sockets, or none. Raises ConfigError naming `events.endpoint` or `events.replay_endpoint`."""
        config, mode, most = self.config, int(self.server.socket_mode, 8), self.server.max_connections
        try:
            door = Door(b"PUB", SUBSCRIBERS, MAX_SUBSCRIPTION, self._subscribe, unread=LIVE_UNREAD)
            self._pub = Acceptor(most, MAX_SUBSCRIPTION, self._unsubscribed)
            self.endpoint = self._pub.listen(config.endpoint, "events.endpoint", door, mode)
            if config.replay_endpoint:
                door = Door(b"ROUTER", ROUTED, MAX_REQUEST_BYTES, self._requested)
                self._router = Acceptor(most, MAX_REQUEST_BYTES, self._left, self._caught_up)
                key = "events.replay_endpoint"
                self.replay_endpoint = self._router.listen(config.replay_endpoint, key, door, mode)
        except BaseException:
            self.close()
            raise

    def refused(self) -> Counter[str]:
        """Connections refused since the start, by reason."""
        return sum((acceptor.refused for acceptor in (self._pub, self._router) if acceptor is not None), Counter())

    def close(self) -> None:
        """Stop at once; subscribers have LINGER_S to read what was sent. Idempotent."""
        self._greeting.cancel()
        for acceptor in (self._router, self._pub):
            if acceptor is not None:
                acceptor.close()
        self._closed = True
        self._kept.clear()

    def include(self, announcements: Announcements) -> None:
        """Have snapshots include what this engine has announced, until `exclude`."""
        self._announcements.append(announcements)

    def exclude(self, announcements: Announcements) -> None:
        """Leave an engine out of the next snapshots. Idempotent."""
        if announcements in self._announcements:
            self._announcements.remove(announcements)

    # --- subscribers --------------------------------------------------------------------------------

    def _subscribe(self, connection: ZmtpConnection, flags: int, body: bytes | memoryview) -> None:
        """Note a subscription or its end. Only beginnings of our topic are kept: few, however many are sent."""
        if flags & COMMAND:
            name, prefix = parse_command(bytes(body))
            more = {b"SUBSCRIBE": 1, b"CANCEL": -1}.get(name, 0)
        else:  # from a peer of ZMTP 3.0
            more, prefix = {1: 1, 0: -1}.get(body[0] if body else -1, 0), bytes(body[1:])
        if not more or not self._topic.startswith(prefix):
            return
        if more > 0 and connection not in self._subscribed:
            self._greet_soon()
        counts = self._subscribed.setdefault(connection, Counter())
        counts[len(prefix)] += more
        if counts[len(prefix)] <= 0:
            del counts[len(prefix)]
        if not counts:
            del self._subscribed[connection]

    def _unsubscribed(self, connection: ZmtpConnection) -> None:
        self._subscribed.pop(connection, None)

    def _greet_soon(self) -> None:
        if not (self._greeting or self._closed):
            wait = self._greeted + GREET_EVERY_S - self.clock.monotonic()
            self._greeting.set(max(0.0, wait), self._greet)

    def _greet(self) -> None:
        self._greeted = self.clock.monotonic()
        self._send((), self.config.dp_rank)

    # --- new batches --------------------------------------------------------------------------------

    def publish(self, events: Sequence[KvEvent], dp_rank: int) -> None:
        """Publish one batch of an engine and keep it. Does nothing before `start` and after `close`."""
        if self._pub is not None and not self._closed and events:
            self._send(events, dp_rank)

    def _send(self, events: Sequence[KvEvent], dp_rank: int) -> None:
        payload = encode_batch(self.clock.wall(), events, dp_rank)
        frames = self._frames(self._sequence, payload)
        self._sequence += 1
        self._counts["events"] += len(events)
        self._kept.append(payload)
        self._kept_bytes += len(payload)
        while len(self._kept) > self.config.buffer or self._kept_bytes > self.config.buffer_bytes:
            self._kept_bytes -= len(self._kept.popleft())
        for connection in list(self._subscribed):
            connection.send(*frames)

    def _frames(self, sequence: int, payload: bytes) -> list[bytes]:
        return [self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload]

    # --- replays ------------------------------------------------------------------------------------

    def _requested(self, connection: ZmtpConnection, flags: int, body: bytes | memoryview) -> None:
        """Collect the frames of a request."""
        if flags & COMMAND:
            return
        frames = self._requests.setdefault(connection, [])
        frames.append(bytes(body))
        del frames[3:]  # a peer may send any number of frames; three are already one too many
        if not flags & MORE:
            self._asked(connection, self._requests.pop(connection))

    def _asked(self, connection: ZmtpConnection, request: list[bytes]) -> None:
        if len(request) != 2 or request[0] or len(request[1]) != SEQUENCE_BYTES:
            log.warning("malformed request for a KV event replay", frames=[len(frame) for frame in request])
            return
        waiting = self._replays.get(connection)
        if len(self._replays) >= MAX_PEERS if waiting is None else len(waiting) >= MAX_REPLAYS_PER_PEER:
            self._counts["replays_broken_off"] += 1
            return
        if waiting is None:
            waiting = self._replays[connection] = deque()
            self._serving.begin(self._serve(connection, waiting))
        waiting.append(self._new_replay(request[1]))

    def _new_replay(self, wanted: bytes) -> _Replay:
        number = int.from_bytes(wanted, "big")
        # Whether batches that the peer has not seen are not kept any more.
        lost = bool(self._announcements) and self._first < self._oldest > number
        if wanted != SNAPSHOT and not lost:
            return _Replay(self._batches(number))
        snapshot = self._useful_snapshot() or self._take_snapshot()
        numbered = wanted != SNAPSHOT
        if numbered and number + snapshot.count > snapshot.sequence:  # it has no numbers for them
            return _Replay(self._batches(number))
        self._counts["snapshots"] += 1
        before = self._snapshot_answers(snapshot, numbered=numbered)
        return _Replay(itertools.chain(before, self._batches(snapshot.sequence)), snapshot)

    def _snapshot_answers(self, snapshot: Snapshot, *, numbered: bool) -> Iterator[list[bytes]]:
        """The answers that are a snapshot. numbered: as ordinary batches.

        They break off once batches after it are gone. The peer finds the gap, and requests another snapshot.
        """
        start = snapshot.sequence.to_bytes(SEQUENCE_BYTES, "big")
        numbers = itertools.count(snapshot.sequence - snapshot.count)
        for payload in snapshot.batches() if numbered else itertools.chain([start], snapshot.hashes()):
            if snapshot.sequence < self._oldest:
                return
            if payload is None:
                yield []
            else:
                yield self._frames(next(numbers), payload) if numbered else [self._topic, SNAPSHOT, payload]

    def _batches(self, number: int) -> Iterator[list[bytes]]:
        """The answers that are batches, from this number on, and the end."""
        while (number := max(number, self._oldest)) < self._sequence:
            yield self._frames(number, self._kept[number - self._oldest])
            number += 1
        yield [self._topic, END, b""]

    def _useful_snapshot(self) -> Snapshot | None:
        """A snapshot that is being sent to another peer, so that many requests at once cost the memory of one."""
        sent = (replay.snapshot for waiting in self._replays.values() for replay in waiting)
        return next((snapshot for snapshot in sent if snapshot and snapshot.sequence >= self._oldest), None)

    def _take_snapshot(self) -> Snapshot:
        # First, because the engines publish what is pending before they answer.
        announced = [part for announcements in self._announcements for part in announcements()]
        return Snapshot(self._sequence, announced, self.clock.wall())

    @property
    def _oldest(self) -> int:
        """The number of the oldest batch that is kept; of the next one, if none is."""
        return self._sequence - len(self._kept)

    async def _serve(self, connection: ZmtpConnection, waiting: deque[_Replay]) -> None:
        """Answer a peer's requests, a few batches in a turn of the loop, and as fast as the peer reads."""
        while waiting:
            await self._turns.turn()
            for count, frames in enumerate(waiting[0].answers, 1):
                if frames:
                    connection.send(b"", *frames)
                if connection.unread > REPLAY_UNREAD:
                    await self._until_read(connection)
                if count % REPLAY_STEP == 0:
                    await self._turns.turn()
                if connection.closed:  # perhaps meanwhile: `_left` has counted this replay
                    return
            waiting.popleft()
            self._counts["replays"] += 1
        del self._replays[connection]

    async def _until_read(self, connection: ZmtpConnection) -> None:
        """Wait until the peer has read what it got. If it reads nothing for a while, its connection ends."""
        connection.flush()
        if connection.unread > REPLAY_UNREAD:
            read = self._behind[connection] = asyncio.get_running_loop().create_future()
            try:
                await wait_for(read, REPLAY_PATIENCE_S)
            except TimeoutError:
                connection.break_off("unread_answers")
            finally:
                del self._behind[connection]

    def _caught_up(self, connection: ZmtpConnection) -> None:
        if (read := self._behind.get(connection)) is not None:
            resolve(read, None)

    def _left(self, connection: ZmtpConnection) -> None:
        self._requests.pop(connection, None)
        self._counts["replays_broken_off"] += len(self._replays.pop(connection, ()))
        self._caught_up(connection)

    def statistics(self) -> dict[str, int]:
        kept = {"kept": len(self._kept), "kept_bytes": self._kept_bytes}
        return {"batches": self._sequence - self._first, **kept, **self._counts}
