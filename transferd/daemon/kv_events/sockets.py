"""The sockets of KV events: a PUB socket for new batches, a ROUTER socket for replays.

    PUB      [topic, sequence, batch]; the sequence counts batches from 0, 8 bytes big-endian
    ROUTER   request [sequence]                    the first batch to replay, 8 bytes big-endian
             answers [topic, sequence, batch] …    the batches that are still kept, in order
                     [topic, -1, ""]               the end
             (after the empty delimiter that REQ sockets add and DEALER sockets must add)

These are vLLM's frames (its replay answers contain the topic since 0.26).

Nothing here ever waits. PUB drops batches that a slow subscriber does not read in time; the subscriber sees
the gap in the sequence and asks the ROUTER. The batches kept for replay are bounded in number and in bytes.
Replays are sent a few batches at a time, between other work of the loop. If the peer has gone or does not
read, its replay ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import structlog
import zmq

from transferd.config import EventsSection
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.descriptors import first_refused
from transferd.wire.connection_limit import ConnectionLimit
from transferd.wire.endpoint import EndpointLock
from transferd.wire.kv_events import KvEvent, encode_batch
from transferd.wire.transport import Channel, set_common_options

log = structlog.get_logger(__name__)

SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
LIVE_HWM = 1000  # batches that may wait for one subscriber; the replay buffer has the rest
LINGER_MS = 250  # how long close() waits for subscribers that do not read
REPLAY_STEP = 32  # batches sent at a time: well under a millisecond of the loop
MAX_PEERS = 64  # peers with replays at once; a request of one more is ignored, and the peer asks again
MAX_REPLAYS_PER_PEER = 4  # pending replays of one peer; one more is ignored likewise
MAX_REQUEST_BYTES = 256


class _SentBatch(NamedTuple):
    """One batch that was sent and is kept. Its frame belongs to libzmq, so sending it again copies no bytes."""

    sequence: int
    frame: zmq.Frame
    nbytes: int


class EventSockets:
    """Both sockets, on the running loop, from `start` to `close`. Owns them."""

    def __init__(
        self,
        config: EventsSection,
        *,
        socket_mode: int = 0o660,
        max_connections: int = 4096,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """max_connections: the limit of each socket (connection_limit.py)."""
        self._config = config
        self._mode = socket_mode
        self._max_connections = max_connections
        self._limits: list[ConnectionLimit] = []
        self._clock = clock
        self._topic = config.topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pub: zmq.Socket[bytes] | None = None
        self._router: Channel | None = None
        self._locks: list[EndpointLock] = []
        self._kept: deque[_SentBatch] = deque()
        self._kept_bytes = 0
        self._sequence = 0  # the next batch's number
        # Peers in the order of their turns, and the next batch of each replay that they have requested.
        self._replays: OrderedDict[bytes, deque[int]] = OrderedDict()
        self._step: asyncio.Handle | None = None
        self._events = 0
        self._replayed = 0
        self._broken_off = 0
        self.endpoint = config.endpoint
        self.replay_endpoint = config.replay_endpoint

    def start(self) -> None:
        """Bind both sockets, or none. Raises ConfigError naming `events.endpoint` or `events.replay_endpoint`."""
        try:
            self._open_pub()
            if self._config.replay_endpoint:
                self._open_router()
        except BaseException:
            self.close()
            raise

    def _open_pub(self) -> None:
        self._context = zmq.Context()
        self._pub = socket = self._context.socket(zmq.PUB)
        set_common_options(socket, [self._config.endpoint], LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, LIVE_HWM)
        self.endpoint = self._bind(socket, self._config.endpoint, "events.endpoint")

    def _open_router(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            set_common_options(socket, [self._config.replay_endpoint], LINGER_MS)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that has gone, or does not read, is an error
            socket.setsockopt(zmq.SNDHWM, self._config.buffer + 1)  # one whole replay and its end
            socket.setsockopt(zmq.RCVHWM, MAX_REPLAYS_PER_PEER)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            self.replay_endpoint = self._bind(socket, self._config.replay_endpoint, "events.replay_endpoint")
        except BaseException:
            self._close_limits()
            socket.close(0)
            context.term()
            raise
        self._router = Channel(context, socket, self._asked)

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str, key: str) -> str:
        self._limits.append(ConnectionLimit(socket.context, socket, first_refused(self._max_connections)))
        lock = EndpointLock(endpoint, key)
        self._locks.append(lock)
        return lock.bind(socket, self._mode)

    def refused(self) -> Counter[str]:
        """Connections refused since the start, by reason."""
        return sum((limit.refused for limit in self._limits), Counter())

    def close(self) -> None:
        """Stop at once; libzmq has LINGER_MS to deliver what was sent. Idempotent."""
        if self._step is not None:
            self._step.cancel()
            self._step = None
        self._replays.clear()
        self._close_limits()
        router, self._router = self._router, None
        if router is not None:
            router.close()
        pub, self._pub = self._pub, None
        if pub is not None:
            pub.close()
        if self._context is not None:
            self._context.term()
            self._context = None
        for lock in self._locks:
            lock.release()
        self._locks.clear()
        self._kept.clear()

    def _close_limits(self) -> None:
        for limit in self._limits:
            limit.close()  # before its socket is closed; its counts stay

    # --- new batches --------------------------------------------------------------------------------

    def publish(self, events: Sequence[KvEvent], dp_rank: int | None = None) -> None:
        """Publish one batch and keep it. Does nothing before `start` and after `close`.

        dp_rank: the engine's; None for events.dp_rank.
        """
        if self._pub is None or not events:
            return
        payload = encode_batch(self._clock.wall(), events, self._config.dp_rank if dp_rank is None else dp_rank)
        kept = _SentBatch(self._sequence, zmq.Frame(payload, copy=True), len(payload))
        self._sequence += 1
        self._events += len(events)
        self._keep(kept)
        self._pub.send_multipart(self._frames(kept), zmq.DONTWAIT, copy=False)

    def _keep(self, kept: _SentBatch) -> None:
        self._kept.append(kept)
        self._kept_bytes += kept.nbytes
        while len(self._kept) > self._config.buffer or self._kept_bytes > self._config.buffer_bytes:
            self._kept_bytes -= self._kept.popleft().nbytes

    def _frames(self, kept: _SentBatch) -> list[bytes | zmq.Frame]:
        return [self._topic, kept.sequence.to_bytes(SEQUENCE_BYTES, "big"), kept.frame]

    # --- replays ------------------------------------------------------------------------------------

    def _asked(self, socket: zmq.Socket[bytes]) -> None:
        """Read exactly one request. Raises zmq.Again if there is none."""
        frames = [socket.recv(zmq.DONTWAIT)]
        while socket.getsockopt(zmq.RCVMORE):
            frames.append(socket.recv(zmq.DONTWAIT)[:MAX_REQUEST_BYTES])
            del frames[4:]  # a peer may send any number of frames; four are already one too many
        peer, *request = frames
        if len(request) != 2 or request[0] or len(request[1]) != SEQUENCE_BYTES:
            log.warning("malformed request for a KV event replay", frames=[len(frame) for frame in request])
            return
        waiting = self._replays.get(peer)
        if len(self._replays) >= MAX_PEERS if waiting is None else len(waiting) >= MAX_REPLAYS_PER_PEER:
            self._broken_off += 1
            return
        self._replays.setdefault(peer, deque()).append(int.from_bytes(request[1], "big"))
        self._step_soon()

    def _step_soon(self) -> None:
        if self._step is None:
            self._step = asyncio.get_running_loop().call_soon(self._send_some)

    def _send_some(self) -> None:
        """Send a few batches to the peer whose turn it is, and pass the turn on."""
        self._step = None
        peer, waiting = self._replays.popitem(last=False)
        if not self._continue(peer, waiting):
            self._broken_off += len(waiting)
        elif waiting:
            self._replays[peer] = waiting
        if self._replays:
            self._step_soon()

    def _continue(self, peer: bytes, waiting: deque[int]) -> bool:
        """Send a step of the peer's first replay, and remove the replay at its end. False: the peer accepts no more."""
        oldest = self._sequence - len(self._kept)
        for _ in range(REPLAY_STEP):
            waiting[0] = sequence = max(waiting[0], oldest)
            over = sequence >= self._sequence
            body = [self._topic, END, b""] if over else self._frames(self._kept[sequence - oldest])
            if not self._answer(peer, body):
                return False
            if over:
                self._replayed += 1
                waiting.popleft()
                return True
            waiting[0] += 1
        return True

    def _answer(self, peer: bytes, body: Sequence[bytes | zmq.Frame]) -> bool:
        assert self._router is not None
        try:
            self._router.socket.send_multipart([peer, b"", *body], zmq.DONTWAIT, copy=False)
        except zmq.Again:  # the peer does not read
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the peer has gone
                raise
            return False
        finally:
            self._router.check_soon()
        return True

    def statistics(self) -> dict[str, Any]:
        return {
            "batches": self._sequence,
            "events": self._events,
            "kept": len(self._kept),
            "kept_bytes": self._kept_bytes,
            "replays": self._replayed,
            "replays_broken_off": self._broken_off,
        }
