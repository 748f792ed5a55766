"""The other nodes of the pool: finds those that do not answer, and ends calls that wait for them.

    up ── a call to it takes SUSPECT_S, it does not answer a question for SILENT_S, and sends nothing else ──▶ down
    down ── it answers ──▶ up

A fault of a node concerns that node alone: while it is down, calls for its objects fail at once, each with its name,
and no other call waits. The pool's own breaker (store.py) is about the master.

The library cannot end a call. If a node's packets vanish, the library waits 60 s, four objects at a time, and then
leaves its connections to the kernel, which tries for minutes and backs off further and further: long after the node is
back, the library still waits for the next try. So once a node is down, we end our connections to it (connections.py)
until every call to it has returned. Then no transfer is left that could touch a buffer, the task has its answer, and
the first call after the node's return connects anew. A call that still hangs LEAVE_S later is left: its tasks are
answered, and it keeps its buffers until it returns (store.py).

A node that answers and is slow keeps its calls: the library's own limits are for those (client.py).
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import structlog

from transferd.errors import StorageUnavailable
from transferd.runtime.aio import Background
from transferd.runtime.clock import Clock
from transferd.storage.mooncake import connections
from transferd.storage.mooncake.connections import Address
from transferd.storage.mooncake.handshake import Gone, ask

log = structlog.get_logger(__name__)

T = TypeVar("T")

SUSPECT_S = 0.5  # a call that moves its bytes takes less; one that takes more is worth a question
SILENT_S = 2.0  # for the answer: TCP sends a lost first packet again after 1 s
ASK_AGAIN_S = 1.0  # while a node that answers is slow
PROBE_S, PROBE_TIMEOUT_S = 0.25, 1.0  # of a node that is down
CUT_S = 0.05  # between two looks for connections to end: the library makes new ones, one after the other
LEAVE_S = 1.5  # of cutting connections, which usually takes 1 s; then the tasks of the call are answered without it
DROPPED_S = 15.0  # after so long the master gives no object to a node without a process (--client_ttl=10)
MOST = 1024  # nodes that are remembered
FORGET_S = 600.0  # a node that is down is no longer asked once no call has needed it for so long

Asker = Callable[[str, float], Awaitable[frozenset[Address]]]


class OffLoop(Protocol):
    """Runs a short function off the loop."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


@dataclass(slots=True, eq=False)
class Call:
    """A native call.

    peers: the nodes that it waits for, set by its thread; empty while unknown. moves: of how many objects it uses the
    buffers.
    """

    peers: frozenset[str] = frozenset()
    moves: int = 0
    left: StorageUnavailable | None = None  # why nobody waits for its end any more
    over: asyncio.Event = field(default_factory=asyncio.Event)  # ended, or left
    timers: list[asyncio.TimerHandle] = field(default_factory=list)  # of those who look after it, until it ends
    ended: bool = False

    def end(self) -> None:
        self.ended = True
        self.over.set()
        for timer in self.timers:
            timer.cancel()

    def leave(self, why: StorageUnavailable) -> None:
        """Answer those that wait for it: it hangs."""
        if not self.ended and self.left is None:
            self.left = why
            self.over.set()


@dataclass(slots=True, eq=False)
class Peer:
    """One node. gone, since: of one that is down."""

    endpoint: str
    used: float
    gone: bool = False  # its process has ended
    since: float = 0.0  # when it went down, in monotonic seconds
    addresses: frozenset[Address] = frozenset()  # where it listens
    asking: asyncio.Future[None] | None = None
    learning: asyncio.Future[None] | None = None


class Peers:
    """All other nodes that this one has met. Its state changes on the event loop; any thread may read `down`.

    endpoint: a node as the pool names it, host:port.
    """

    def __init__(self, clock: Clock, in_thread: OffLoop, asker: Asker = ask) -> None:
        self.down: dict[str, str] = {}  # by endpoint: why
        self.doubted: set[str] = set()  # those that have not answered yet
        self._asking_all: asyncio.Future[None] | None = None
        self.opened = 0  # how often one went down
        self.cut = 0  # connections that were ended
        self._clock = clock
        self._in_thread = in_thread
        self._ask = asker
        self._known: dict[str, Peer] = {}
        self._running = Background(awaited=False)
        self._over = False

    async def verdict(self, endpoint: str) -> None:
        """Wait until it is known whether the node answers. Raises StorageUnavailable, with its name, if it is down."""
        peer = self._known.get(endpoint)
        if peer is not None and peer.asking is not None:
            await asyncio.wait([peer.asking])
        if (why := self.down.get(endpoint)) is not None:
            self._known[endpoint].used = self._clock.monotonic()
            raise StorageUnavailable(unreachable(endpoint, why))

    def met(self, endpoints: Collection[str]) -> None:
        """Remember these nodes, and ask the new ones where they listen."""
        now = self._clock.monotonic()
        for endpoint in endpoints:
            peer = self._known.get(endpoint)
            if peer is None and not self._over and self._room():
                self._known[endpoint] = peer = Peer(endpoint, now)
            if peer is not None:
                peer.used = now
                if peer.learning is None and not self._over:
                    peer.learning = self._running.begin(self._learn(peer))

    def watch(self, call: Call) -> None:
        """Look after a call that begins now, until it ends."""
        call.timers.append(asyncio.get_running_loop().call_later(SUSPECT_S, self._overdue, call))

    def put_failed(self) -> None:
        """After a copy to an unnamed node has failed: find out which nodes are down."""
        if not self._over and (self._asking_all is None or self._asking_all.done()):
            self._asking_all = self._running.begin(self._ask_all())

    def in_the_way(self) -> bool:
        """Whether the master may give an object to a node that is down. From any thread."""
        lately = self._clock.monotonic() - DROPPED_S
        peers = [self._known[endpoint] for endpoint in list(self.down)]  # those that are down stay known
        return any(not peer.gone or peer.since > lately for peer in peers)

    async def close(self) -> None:
        """Ask no node any more. Idempotent."""
        self._over = True
        await self._running.stop()

    def _room(self) -> bool:
        if len(self._known) >= MOST:
            up = [peer for peer in self._known.values() if peer.endpoint not in self.down]
            if not up:
                return False
            idle = min(up, key=lambda peer: peer.used)
            del self._known[idle.endpoint]
        return True

    def _overdue(self, call: Call) -> None:
        if not self._over:
            self._running.begin(self._look_after(call))

    # --- a call that takes long -----------------------------------------------------------------------

    async def _look_after(self, call: Call) -> None:
        while not call.ended:
            suspects = await self._suspects(call)
            await asyncio.gather(*(self._doubt(peer) for peer in suspects))
            until = self._clock.monotonic() + LEAVE_S
            while not call.ended and (down := [peer for peer in suspects if peer.endpoint in self.down]):
                await self._end_connections(down)
                await asyncio.sleep(CUT_S)
                # It waits for something that we cannot end. (A put ends, and its copies are made elsewhere.)
                if self._clock.monotonic() >= until and call.peers:
                    endpoint = down[0].endpoint
                    call.leave(StorageUnavailable(unreachable(endpoint, self.down.get(endpoint, ""))))
            await asyncio.sleep(ASK_AGAIN_S)

    async def _suspects(self, call: Call) -> list[Peer]:
        """The nodes that the call may wait for. For a put, which names none: every known node with a connection."""
        if call.peers:
            self.met(call.peers)
            return [self._known[endpoint] for endpoint in call.peers if endpoint in self._known]
        connected = await self._in_thread(connections.remote)
        return [peer for peer in self._known.values() if not connected.isdisjoint(peer.addresses)]

    async def _end_connections(self, peers: Collection[Peer]) -> None:
        addresses = frozenset[Address]().union(*(peer.addresses for peer in peers))
        self.cut += await self._in_thread(lambda: connections.end(addresses))

    # --- asking ---------------------------------------------------------------------------------------

    async def _learn(self, peer: Peer) -> None:
        """Find out where a node listens, while it answers."""
        if await self._silent(peer, SILENT_S):
            peer.learning = None  # the next call that meets it tries again

    async def _silent(self, peer: Peer, within: float) -> StorageUnavailable | None:
        """Ask a node where it listens. Returns why it does not answer; None if it does."""
        try:
            peer.addresses = await self._ask(peer.endpoint, within)
        except StorageUnavailable as error:
            if not peer.addresses and (address := _literal(peer.endpoint)) is not None:
                peer.addresses = frozenset({address})  # the library cannot get further than this one either
            return error
        return None

    async def _doubt(self, peer: Peer) -> None:
        """Ask a node; if it does not answer, it is down from then on. Simultaneous callers share one question."""
        if peer.endpoint in self.down:
            return
        if peer.asking is None:
            self.doubted.add(peer.endpoint)
            peer.asking = self._running.begin(self._find_out(peer))
        await asyncio.shield(peer.asking)

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._doubt(peer) for peer in list(self._known.values())))
        await asyncio.sleep(ASK_AGAIN_S)

    async def _find_out(self, peer: Peer) -> None:
        try:
            error = await self._silent(peer, SILENT_S)
            sends = functools.partial(connections.heard, peer.addresses, SILENT_S)
            # One that sends is not down: its network loses packets, our question among them.
            if error is not None and (isinstance(error, Gone) or not await self._in_thread(sends)):
                self._went_down(peer, error)
        finally:
            peer.asking = None
            self.doubted.discard(peer.endpoint)

    def _went_down(self, peer: Peer, error: StorageUnavailable) -> None:
        if self._over:
            return
        peer.since = self._clock.monotonic()
        self._is_down(peer, error)
        self.opened += 1
        what = "a node of the pool does not answer: its objects fail at once"
        log.warning(what, node=peer.endpoint, reason=self.down[peer.endpoint])
        self._running.begin(self._until_back(peer))

    def _is_down(self, peer: Peer, error: StorageUnavailable) -> None:
        self.down[peer.endpoint], peer.gone = str(error), isinstance(error, Gone)

    async def _until_back(self, peer: Peer) -> None:
        """Ask a node that is down until it answers, or until no call has needed it for FORGET_S."""
        while self._clock.monotonic() - peer.used < FORGET_S:
            await asyncio.sleep(PROBE_S)
            if (error := await self._silent(peer, PROBE_TIMEOUT_S)) is None:
                log.info("a node of the pool answers again", node=peer.endpoint)
                break
            self._is_down(peer, error)
        del self.down[peer.endpoint]


def unreachable(endpoint: str, why: str) -> str:
    """The error for an object that only a node has that is down."""
    return f"the Mooncake node {endpoint}, which holds it, does not answer ({why})"


def _literal(endpoint: str) -> Address | None:
    """The address in an endpoint, if it is written as numbers."""
    host, _, port = endpoint.rpartition(":")
    try:
        return str(ipaddress.ip_address(host.strip("[]"))), int(port)
    except ValueError:
        return None
