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
import contextlib
import functools
import ipaddress
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import structlog

from transferd.errors import StorageUnavailable
from transferd.runtime.clock import Clock
from transferd.runtime.compat import wait_for
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
    """A native call that moves bytes. peers: the nodes that it waits for, set by its thread; empty while unknown."""

    peers: frozenset[str] = frozenset()
    left: StorageUnavailable | None = None  # why nobody waits for its end any more
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _over: asyncio.Event = field(default_factory=asyncio.Event)  # ended, or left

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self) -> None:
        self._ended.set()
        self._over.set()

    def leave(self, why: StorageUnavailable) -> None:
        """Answer those that wait for it: it hangs."""
        if not self.ended and self.left is None:
            self.left = why
            self._over.set()

    async def over(self) -> None:
        """Wait until it has ended, or was left."""
        await self._over.wait()

    async def ends(self, within: float) -> bool:
        """Wait for its end. Returns False if it still runs after `within` seconds."""
        with contextlib.suppress(TimeoutError):
            await wait_for(self._ended.wait(), within)
        return self.ended


@dataclass(slots=True, eq=False)
class Peer:
    """One node."""

    endpoint: str
    used: float
    why: str = ""  # why it is down; "" while it is up
    gone: bool = False  # its process has ended
    since: float = 0.0  # when it went down, in monotonic seconds
    addresses: frozenset[Address] = frozenset()  # where it listens
    asking: asyncio.Task[None] | None = None
    learning: asyncio.Task[object] | None = None


class Peers:
    """All other nodes that this one has met. Its state changes on the event loop; any thread may read `down`.

    endpoint: a node as the pool names it, host:port.
    """

    def __init__(self, clock: Clock, in_thread: OffLoop, asker: Asker = ask) -> None:
        self.down: dict[str, str] = {}  # by endpoint: why
        self.doubted: set[str] = set()  # those that have not answered yet
        self._asking_all: asyncio.Task[object] | None = None
        self.opened = 0  # how often one went down
        self.cut = 0  # connections that were ended
        self._clock = clock
        self._in_thread = in_thread
        self._ask = asker
        self._known: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._over = False

    def check(self, endpoint: str) -> None:
        """Raise StorageUnavailable, with the node's name, if it is down."""
        if (why := self.down.get(endpoint)) is not None:
            self._known[endpoint].used = self._clock.monotonic()
            raise StorageUnavailable(unreachable(endpoint, why))

    async def verdict(self, endpoint: str) -> None:
        """Wait until it is known whether the node answers; then `check`."""
        peer = self._known.get(endpoint)
        if peer is not None and peer.asking is not None:
            await asyncio.wait([peer.asking])
        self.check(endpoint)

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
                    peer.learning = self._begin(self._learn(peer))

    def watch(self, call: Call) -> asyncio.TimerHandle:
        """Look after a call that begins now, until it ends. Cancel the handle when it has ended."""
        return asyncio.get_running_loop().call_later(SUSPECT_S, self._overdue, call)

    def put_failed(self) -> None:
        """After a copy to an unnamed node has failed: find out which nodes are down."""
        if not self._over and (self._asking_all is None or self._asking_all.done()):
            self._asking_all = self._begin(self._ask_all())

    def in_the_way(self) -> bool:
        """Whether the master may give an object to a node that is down. From any thread."""
        lately = self._clock.monotonic() - DROPPED_S
        peers = [self._known[endpoint] for endpoint in list(self.down)]  # those that are down stay known
        return any(not peer.gone or peer.since > lately for peer in peers)

    async def close(self) -> None:
        """Ask no node any more. Idempotent."""
        self._over = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _room(self) -> bool:
        if len(self._known) >= MOST:
            up = [peer for peer in self._known.values() if not peer.why]
            if not up:
                return False
            idle = min(up, key=lambda peer: peer.used)
            del self._known[idle.endpoint]
        return True

    def _overdue(self, call: Call) -> None:
        if not call.ended and not self._over:
            self._begin(self._look_after(call))

    def _begin(self, work: Awaitable[object]) -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- a call that takes long -----------------------------------------------------------------------

    async def _look_after(self, call: Call) -> None:
        while not call.ended:
            suspects = await self._suspects(call)
            await asyncio.gather(*(self._doubt(peer) for peer in suspects))
            until = self._clock.monotonic() + LEAVE_S
            while not call.ended and (down := [peer for peer in suspects if peer.why]):
                await self._end_connections(down)
                await call.ends(CUT_S)
                # It waits for something that we cannot end. (A put ends, and its copies are made elsewhere.)
                if self._clock.monotonic() >= until and call.peers:
                    call.leave(StorageUnavailable(unreachable(down[0].endpoint, down[0].why)))
            await call.ends(ASK_AGAIN_S)

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
        try:
            self._heard(peer, await self._ask(peer.endpoint, SILENT_S))
        except StorageUnavailable:
            self._heard(peer, None)
            peer.learning = None  # the next call that meets it tries again

    def _heard(self, peer: Peer, addresses: frozenset[Address] | None) -> None:
        if addresses is not None:
            peer.addresses = addresses
        elif not peer.addresses and (address := _literal(peer.endpoint)) is not None:
            peer.addresses = frozenset({address})  # the library cannot get further than this one either

    async def _doubt(self, peer: Peer) -> None:
        """Ask a node; if it does not answer, it is down from then on. Simultaneous callers share one question."""
        if peer.why:
            return
        if peer.asking is None:
            self.doubted.add(peer.endpoint)
            peer.asking = asyncio.ensure_future(self._find_out(peer))
        await asyncio.shield(peer.asking)

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._doubt(peer) for peer in list(self._known.values())))
        await asyncio.sleep(ASK_AGAIN_S)

    async def _find_out(self, peer: Peer) -> None:
        try:
            self._heard(peer, await self._ask(peer.endpoint, SILENT_S))
        except StorageUnavailable as error:
            self._heard(peer, None)
            sends = functools.partial(connections.heard, peer.addresses, SILENT_S)
            # One that sends is not down: its network loses packets, our question among them.
            if isinstance(error, Gone) or not await self._in_thread(sends):
                self._went_down(peer, error)
        finally:
            peer.asking = None
            self.doubted.discard(peer.endpoint)

    def _went_down(self, peer: Peer, error: StorageUnavailable) -> None:
        if self._over:
            return
        peer.why, peer.gone, peer.since = str(error), isinstance(error, Gone), self._clock.monotonic()
        self.down[peer.endpoint] = peer.why
        self.opened += 1
        log.warning("a node of the pool does not answer: its objects fail at once", node=peer.endpoint, reason=peer.why)
        self._begin(self._until_back(peer))

    async def _until_back(self, peer: Peer) -> None:
        """Ask a node that is down until it answers, or until no call has needed it for FORGET_S."""
        while self._clock.monotonic() - peer.used < FORGET_S:
            await asyncio.sleep(PROBE_S)
            try:
                self._heard(peer, await self._ask(peer.endpoint, PROBE_TIMEOUT_S))
            except StorageUnavailable as error:
                peer.why, peer.gone = str(error), isinstance(error, Gone)
                self.down[peer.endpoint] = peer.why
                continue
            log.info("a node of the pool answers again", node=peer.endpoint)
            break
        self.down.pop(peer.endpoint, None)
        peer.why, peer.gone = "", False


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
