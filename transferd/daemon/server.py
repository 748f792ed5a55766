"""The daemon's side of the wire: decodes, routes, answers. Decides nothing about tasks.

Bad input is answered with a typed refusal and counted; it never reaches the coordinator. Clients are
known by the name their connection has; one that is silent for `client_timeout` has gone. While no
client is known, no timer runs.

Each client has a session (see protocol.py), from its first message until it has gone. An answer that
could not be handed to it begins a new one: the client then knows that it must ask again, and does.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from transferd.errors import InvariantError, OutOfMemory, RequestError, TransferError
from transferd.observability.recorder import Recorder
from transferd.runtime.bucket import Bucket
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.version import VERSION
from transferd.tasks import ErrorInfo, Status, Task, TaskResult, TokenIds
from transferd.tiers.base import DeviceHandle
from transferd.wire import protocol as wire
from transferd.wire.credentials import process_of
from transferd.wire.transport import ServerTransport

log = structlog.get_logger(__name__)

MAX_WAITING_REQUESTS = 1024  # match, pause and other requests that wait for something, at once, of all clients
MAX_WAITING_PER_CLIENT = 256  # so that one client cannot take all places
MAX_WAITING_BYTES = 256 * 1024**2  # memory of what they ask with; one alone may be larger
KEY_BYTES = 64  # of a key in memory, besides its text
# What moves, changes and waits for nothing.
OBSERVERS_MAY = (wire.Hello, wire.Bye, wire.Stats, wire.Explain, wire.Tasks, wire.Clients)


class Cache(Protocol):
    """What the server asks of the ranks' memory; see cache_memory.py."""

    @property
    def missing(self) -> list[int]: ...
    @property
    def why(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    def handle(self, client: bytes, rank: int, epoch: int) -> DeviceHandle: ...
    def detach(self, client: bytes, rank: int) -> object: ...
    async def offer(self, client: bytes, rank: int, handle: DeviceHandle, epoch: int) -> str | None: ...
    async def clear(self) -> int: ...
    async def restore(self, generation: str | None, *, same_weights: bool = False) -> int: ...


class Listing(Protocol):
    """What the server asks for lists; see listing.py."""

    def tasks(self, which: str, limit: int) -> list[dict[str, Any]]: ...
    def clients(self, limit: int) -> list[dict[str, Any]]: ...


class Coordinator(Protocol):
    """What the server asks of the core; see coordinator.py."""

    @property
    def cache(self) -> Cache: ...
    @property
    def ready(self) -> bool: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def generation(self) -> str: ...
    def submit(self, client: bytes, seq: int, task: Task) -> bool: ...
    def cancel(self, task_id: str) -> bool: ...
    async def match(self, keys: list[str]) -> int: ...
    async def match_tokens(self, path: TokenIds, start: int) -> int: ...
    def locate(self, path: TokenIds) -> dict[str, dict[str, int]]: ...
    async def pause(self, client: bytes, holder: str) -> None: ...
    def resume(self, holder: str) -> object: ...
    async def drain(self, client: bytes, holder: str) -> None: ...
    def set_generation(self, generation: str) -> object: ...
    def client_gone(self, client: bytes) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def explain(self, task_id: str) -> dict[str, Any]: ...


@dataclass(slots=True, eq=False)
class _Client:
    """A peer that is known. Its number in the world is bounded by connections, which descriptors bound."""

    first_session: int  # of this connection; its sessions since then have greater numbers
    session: int
    came_at: float
    seen_at: float
    observer: bool = False  # may only look
    waiting: set[asyncio.Task[None]] = field(default_factory=set)  # its requests that wait for something


class Server:
    """Speaks the protocol with every client of one transport. Owns the transport from `start` to `close`."""

    def __init__(
        self,
        transport: ServerTransport,
        coordinator: Coordinator,
        *,
        clock: Clock = SYSTEM_CLOCK,
        max_message: int = 64 * 1024**2,
        client_timeout: float = 5.0,
        observer_rate: float = 100.0,
        recorder: Recorder | None = None,
        listing: Listing | None = None,
        block_size: int = 0,
        pd_mode: str = "storage",
        pd_address: Callable[[], str] = str,
    ) -> None:
        """observer_rate: requests a second of all clients together that may only look.

        block_size, pd_mode, pd_address: told to clients in the Welcome.
        """
        self._recorder = recorder if recorder is not None else Recorder(capacity=1)
        self._listing = listing
        self._transport = transport
        self._coordinator = coordinator
        self._clock = clock
        self._max_message = max_message
        self._client_timeout = client_timeout
        self._looks = Bucket(observer_rate, burst=2 * observer_rate)
        self._block_size = block_size
        self._pd_mode = pd_mode
        self._pd_address = pd_address
        self._clients: dict[bytes, _Client] = {}
        self._lost = 0  # clients that fell silent without a Bye
        self._sessions: Iterator[int] = itertools.count(1)
        self._reaper: asyncio.TimerHandle | None = None
        self._reap_due = 0.0
        self._waiting: set[asyncio.Task[None]] = set()
        self._waiting_bytes = 0
        self._rejects: Counter[str] = Counter()
        self._messages = 0
        self._undeliverable = 0
        self._handlers: dict[type, Callable[[bytes, int, Any], None]] = {
            wire.Hello: self._hello,
            wire.Bye: self._bye,
            wire.Cancel: lambda peer, seq, m: self._value(peer, seq, self._coordinator.cancel(m.task_id)),
            wire.Match: self._match,
            wire.Locate: lambda peer, seq, m: self._value(peer, seq, self._coordinator.locate(m.token_ids)),
            wire.Pause: lambda peer, seq, m: self._later(peer, seq, self._coordinator.pause(peer, _holder(peer, m))),
            wire.Resume: lambda peer, seq, m: self._value(peer, seq, self._coordinator.resume(_holder(peer, m))),
            wire.Drain: lambda peer, seq, m: self._later(peer, seq, self._coordinator.drain(peer, _holder(peer, m))),
            wire.SetGeneration: lambda peer, seq, m: self._value(
                peer, seq, self._coordinator.set_generation(m.generation)
            ),
            wire.Stats: lambda peer, seq, _: self._value(peer, seq, self._coordinator.stats()),
            wire.Explain: lambda peer, seq, m: self._value(peer, seq, self._coordinator.explain(m.task_id)),
            wire.Attach: self._attach,
            wire.Tasks: lambda peer, seq, m: self._value(peer, seq, self._lists.tasks(m.which, m.limit)),
            wire.Clients: lambda peer, seq, m: self._value(peer, seq, self._lists.clients(m.limit)),
            wire.Detach: lambda peer, seq, m: self._value(peer, seq, self._coordinator.cache.detach(peer, m.rank)),
            wire.Offer: self._offer,
            wire.ClearCache: lambda peer, seq, _: self._later(peer, seq, self._coordinator.cache.clear()),
            wire.RestoreCache: lambda peer, seq, m: self._later(
                peer, seq, self._coordinator.cache.restore(m.generation, same_weights=m.same_weights)
            ),
        }

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        # Numbers that a daemon before or after this one does not use, and that fit an int of any language.
        self._sessions = itertools.count((zlib.crc32(self._coordinator.boot_id.encode()) << 20) + 1)
        self._transport.start(self._received)

    def deliver(self, client: bytes, seq: int, result: TaskResult) -> None:
        """Send one terminal result to the client that waits for it; one that has gone costs nothing.

        Raises what sending raises; the client then asks again, as for any answer that was lost.
        """
        try:
            self._send(client, seq, wire.Result(result))
        except Exception:
            self._answer_lost(client, seq)
            raise

    def announce_epoch(self) -> None:
        """Make every client say Hello, so that it learns from the Welcome at once that the cache was cleared."""
        again = wire.Refused(ErrorInfo(wire.STALE_SESSION, "the cache was cleared; say Hello"))
        for peer in list(self._clients):
            self._send(peer, 0, again)

    async def close(self) -> None:
        """Stop listening; what was sent is handed out within the transport's linger."""
        if self._reaper is not None:
            self._reaper.cancel()
        for task in self._waiting:
            task.cancel()
        if self._waiting:
            await asyncio.wait(self._waiting)
        self._transport.close()

    def statistics(self) -> dict[str, Any]:
        return {
            "clients": len(self._clients),
            "clients_lost": self._lost,
            "waiting": len(self._waiting),
            "waiting_bytes": self._waiting_bytes,
            "messages": self._messages,
            "undeliverable": self._undeliverable,
            "rejects": dict(self._rejects),
        }

    def clients(self, limit: int) -> list[dict[str, Any]]:
        """At most so many of those who are connected, and since when; uid and pid where the socket knows them."""
        now, rows = self._clock.monotonic(), []
        for peer, client in itertools.islice(self._clients.items(), limit):
            who = self._transport.describe(peer)
            uid, pid = process_of(who)
            times = {"connected_s": now - client.came_at, "silent_s": now - client.seen_at}
            rows.append(
                {"client": peer.hex(), "peer": who, "uid": uid, "pid": pid, "observer": client.observer} | times
            )
        return rows

    @property
    def _lists(self) -> Listing:
        if self._listing is None:
            raise RequestError("this daemon keeps no lists", code="no_lists")
        return self._listing

    # --- receiving ----------------------------------------------------------------------------------

    def _received(self, peer: bytes, payload: bytes | memoryview) -> None:
        self._messages += 1
        try:
            request = wire.decode_request(payload, self._max_message)
        except wire.Malformed as error:
            self._refuse(peer, error)
            return
        client = self._clients.get(peer) or self._meet(peer)
        client.seen_at = self._clock.monotonic()
        seq, body = request.seq, request.body
        if client.observer and not self._observer_may(peer, seq, body):
            return
        # A Bye is heard in any session of its connection: an answer that found nobody any more has begun the newest.
        oldest = client.first_session if isinstance(body, wire.Bye) else client.session
        if not oldest <= request.session <= client.session and request.session != wire.ANY_SESSION:
            self._refuse(peer, wire.Malformed("of an earlier session; say Hello", code=wire.STALE_SESSION, seq=seq))
            return
        try:
            if not isinstance(body, Task):
                self._handlers[type(body)](peer, seq, body)
            elif self._coordinator.submit(peer, seq, body) and request.ack:
                self._send(peer, seq, wire.Accepted())
        except TransferError as error:
            self._refused(peer, seq, error)
        except Exception as error:  # noqa: BLE001 - the request is answered, whatever it ran into
            self._failed(peer, seq, error)

    def _observer_may(self, peer: bytes, seq: int, body: wire.Body) -> bool:
        """Whether a client that may only look may ask this, now. False: it has been told that not."""
        if not isinstance(body, OBSERVERS_MAY):
            what = "who connects here may only look: ping, stats, explain, tasks, clients"
            task_id = body.task_id if isinstance(body, Task) else None
            self._refuse(peer, wire.Malformed(what, code="forbidden", seq=seq, task_id=task_id))
            return False
        if isinstance(body, wire.Bye) or self._looks.take(self._clock.monotonic()):
            return True
        self._rejects["too_often"] += 1
        self._warn(peer, "too_often")
        self._refused(peer, seq, TransferError("observers have asked too often; try again later", code="too_often"))
        return False

    def _refuse(self, peer: bytes, error: wire.Malformed) -> None:
        """A task that could not be read ends here; anything else is refused."""
        self._rejects[error.reason] += 1
        self._recorder.aside(error.task_id or "", "bad message", error.reason, peer)
        if error.reason != wire.STALE_SESSION:  # what a good client runs into when its connection broke
            self._warn(peer, error.reason)
        info = ErrorInfo(error.reason, str(error))
        if error.task_id is None:
            permanent = error.reason not in (wire.STALE_SESSION, OutOfMemory.code)
            self._send(peer, error.seq, wire.Refused(info, permanent=permanent))
            return
        result = TaskResult(
            task_id=error.task_id,
            status=Status.FAILED if error.reason == OutOfMemory.code else Status.REJECTED,
            error=info,
            generation=self._coordinator.generation,
            boot_id=self._coordinator.boot_id,
        )
        self._send(peer, error.seq, wire.Result(result))

    def _warn(self, peer: bytes, reason: str) -> None:
        log.warning("request refused", reason=reason, client=peer.hex(), peer=self._transport.describe(peer))

    def _hello(self, peer: bytes, seq: int, _: wire.Hello) -> None:
        core, cache = self._coordinator, self._coordinator.cache
        welcome = wire.Welcome(
            boot_id=core.boot_id,
            ready=core.ready,
            version=VERSION,
            generation=core.generation,
            max_message=self._max_message,
            session=self._clients[peer].session,
            block_size=self._block_size,
            pd_mode=self._pd_mode,
            pd_address=self._pd_address(),
            missing=cache.missing,
            why="" if core.ready else cache.why or "the daemon is stopping, or a rank has died",
            epoch=cache.epoch,
        )
        self._send(peer, seq, welcome)

    def _attach(self, peer: bytes, seq: int, attach: wire.Attach) -> None:
        cache = self._coordinator.cache
        handle = cache.handle(peer, attach.rank, attach.epoch)
        epoch = {"boot_id": self._coordinator.boot_id, "epoch": cache.epoch}
        self._value(peer, seq, {"kind": handle.kind, "data": handle.data} | epoch)

    def _offer(self, peer: bytes, seq: int, offer: wire.Offer) -> None:
        handle = DeviceHandle(offer.kind, wire.handle_data(offer))
        self._later(peer, seq, self._coordinator.cache.offer(peer, offer.rank, handle, offer.epoch))

    def _bye(self, peer: bytes, _seq: int, _: wire.Bye) -> None:
        self._recorder.aside("", "client left", peer)
        self._forget(peer)

    def _match(self, peer: bytes, seq: int, match: wire.Match) -> None:
        by_keys, path = match.keys, match.token_ids
        core = self._coordinator
        work = core.match(by_keys) if path is None else core.match_tokens(path, match.start)
        nbytes = sum(map(len, by_keys)) + KEY_BYTES * len(by_keys) if path is None else path.array.nbytes
        self._later(peer, seq, work, nbytes)

    # --- answering ----------------------------------------------------------------------------------

    def _send(self, peer: bytes, seq: int, body: wire.ReplyBody) -> None:
        if not self._transport.send(peer, wire.encode_reply(seq, body)):
            self._answer_lost(peer, seq)

    def _answer_lost(self, peer: bytes, seq: int) -> None:
        """Begin a new session: the client finds its own to be over, and asks again for what it waits for."""
        self._undeliverable += 1
        client = self._clients.get(peer)
        if client is not None:
            client.session = next(self._sessions)
            self._recorder.aside("", "answer lost", peer, seq, client.session)

    def _value(self, peer: bytes, seq: int, value: Any) -> None:
        try:
            self._send(peer, seq, wire.Value(value))
        except (TypeError, ValueError, OverflowError) as error:
            log.error("an answer cannot be put on the wire", problem=str(error))
            self._refused(peer, seq, InvariantError(f"the answer cannot be put on the wire: {error}"))

    def _refused(self, peer: bytes, seq: int, error: TransferError) -> None:
        permanent = isinstance(error, RequestError)
        if isinstance(error, InvariantError):
            self._recorder.failure("", str(error))
        self._send(peer, seq, wire.Refused(ErrorInfo(error.reason, str(error)), permanent=permanent))

    def _later(self, peer: bytes, seq: int, work: Coroutine[Any, Any, Any], nbytes: int = 0) -> None:
        """Answer when `work` is done; bounded in number and in bytes. nbytes: what `work` holds until then."""
        if self._waiting_bytes and self._waiting_bytes + nbytes > MAX_WAITING_BYTES:
            work.close()
            told = f"requests that wait hold {self._waiting_bytes} bytes already; ask again later"
            raise TransferError(told, code="too_many_requests")
        client = self._clients[peer]
        for waiting, limit in ((client.waiting, MAX_WAITING_PER_CLIENT), (self._waiting, MAX_WAITING_REQUESTS)):
            if len(waiting) >= limit:
                work.close()
                raise TransferError(f"{limit} requests are waiting already", code="too_many_requests")
        task = asyncio.get_running_loop().create_task(self._answer(peer, seq, work))
        self._waiting.add(task)
        client.waiting.add(task)
        self._waiting_bytes += nbytes
        task.add_done_callback(functools.partial(self._answered, peer, seq, client, work, nbytes))

    async def _answer(self, peer: bytes, seq: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._value(peer, seq, await work)
        except TransferError as error:
            self._refused(peer, seq, error)

    def _answered(
        self,
        peer: bytes,
        seq: int,
        client: _Client,
        work: Coroutine[Any, Any, Any],
        nbytes: int,
        task: asyncio.Task[None],
    ) -> None:
        self._waiting_bytes -= nbytes
        self._waiting.discard(task)
        client.waiting.discard(task)
        work.close()  # of a task that was cancelled before its first step, it was never begun
        if task.cancelled():
            if peer in self._clients:  # else nobody is left to hear it
                self._refused(peer, seq, TransferError("the daemon is shutting down", code="shutdown"))
        elif (error := task.exception()) is not None:
            self._failed(peer, seq, error)

    def _failed(self, peer: bytes, seq: int, error: BaseException) -> None:
        """Refuse what raised no error of ours: the machine is out of memory, or we have a bug."""
        if isinstance(error, MemoryError):
            log.error("out of memory for a request", client=peer.hex())
            self._refused(peer, seq, OutOfMemory("no memory to carry it out; try again later"))
            return
        log.error("a request failed in a way it must not", exc_info=error)
        self._refused(peer, seq, InvariantError(f"{type(error).__name__}: {error}"))

    # --- who is there -------------------------------------------------------------------------------

    def _meet(self, peer: bytes) -> _Client:
        session = next(self._sessions)
        now = self._clock.monotonic()
        client = _Client(session, session, now, now, self._transport.observes(peer))
        self._clients[peer] = client
        self._recorder.aside("", "client came", peer, client.session)
        if self._reaper is None:
            self._look_later()
        return client

    def _forget(self, peer: bytes) -> None:
        client = self._clients.pop(peer, None)
        if client is None:
            return
        for task in client.waiting:
            task.cancel()
        self._coordinator.client_gone(peer)

    def _look_later(self) -> None:
        delay = self._client_timeout / 2
        self._reap_due = self._clock.monotonic() + delay
        self._reaper = asyncio.get_running_loop().call_later(delay, self._reap)

    def _reap(self) -> None:
        self._reaper = None
        now = self._clock.monotonic()
        # Late: this process was held up, and what clients said meanwhile lies unread in the socket.
        if now - self._reap_due < self._client_timeout / 4:
            silent = [peer for peer, client in self._clients.items() if now - client.seen_at > self._client_timeout]
            for peer in silent:
                log.warning("client gone", client=peer.hex(), silent_s=round(now - self._clients[peer].seen_at, 3))
                self._recorder.aside("", "client silent", peer)
                self._lost += 1
                self._forget(peer)
        if self._clients:
            self._look_later()


def _holder(peer: bytes, body: wire.Pause | wire.Resume | wire.Drain) -> str:
    """Whose pause it is: a client's own name for itself outlives its connection, a connection's name does not."""
    return body.holder or peer.hex()
