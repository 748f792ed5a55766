"""The daemon's side of the wire: decodes, routes, answers. Decides nothing about tasks.

Bad input is answered with a typed refusal and counted; it never reaches the coordinator. liveness.py detects lost
clients.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from transferd.config import DEFAULT_ENGINE
from transferd.control.gate import MOST_HOLDS
from transferd.daemon.belonging import CONTROL
from transferd.daemon.clients import Clients, KnownClient
from transferd.daemon.engine import HostedEngine
from transferd.daemon.engines import Engines
from transferd.daemon.listing import Listing
from transferd.daemon.liveness import Liveness
from transferd.daemon.lookup import keys_bytes
from transferd.errors import InvariantError, OutOfMemory, RequestError, TransferError
from transferd.observability.recorder import Recorder
from transferd.observability.report import ServerReport
from transferd.runtime.bucket import Bucket
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.version import VERSION
from transferd.tasks import NOT_STORED, ErrorInfo, Status, Task, TaskResult
from transferd.tiers.base import DeviceHandle
from transferd.tiers.offered import PEER
from transferd.wire import protocol as wire
from transferd.wire.codes import CODES

log = structlog.get_logger(__name__)

MAX_WAITING_REQUESTS = 1024  # requests of all clients that wait for something, such as match and pause
MAX_WAITING_PER_CLIENT = 256  # so that one client cannot take all places
FEW_WAITING = 64  # so many of a user's requests may wait even if other users have taken all places
MAX_WAITING_BYTES = 256 * 1024**2  # memory of the waiting requests' arguments; one that is alone may be larger
FEW_BYTES = 16 * 1024**2  # so much of a user's may wait even if other users have taken all of that; or one request
# Requests that move no bytes, change no state and wait for no event.
OBSERVERS_MAY = (wire.Hello, wire.Bye, wire.Stats, wire.Explain, wire.ListTasks, wire.ListClients)
HOLD = (Task, wire.Attach)  # requests that keep an engine while its client lives; so does an accepted offer
KEEP_OUT = {wire.Offer: "offer refused", wire.Register: "registration refused"}  # logged: the engine has no cache
TRIED_AGAIN = ("unsealed", "starting", "engine_exists", "shutdown")  # clients retry by themselves, so no line is logged
TURNED_AWAY_EVERY_S = 10.0  # between log lines about tasks that clients turned away, after the first ones
OTHER_CONNECTION = "from a session of another connection; send Hello"
NEED_NO_ENGINE = (
    *OBSERVERS_MAY,
    wire.Register,
    wire.Settled,
    wire.Purge,
    wire.Warm,
    wire.ChangeLevel,
    wire.MakeCopies,
)  # its engine may have left
Work = Coroutine[Any, Any, Any]


@dataclass(frozen=True, slots=True)
class Greeting:
    """The constant part of every Welcome."""

    max_message: int = 64 * 1024**2  # the most bytes of a request
    pd_mode: str = "storage"
    pd_address: Callable[[], str] = str  # where other daemons reach this one; known once it is open
    process: dict[str, Any] = field(default_factory=dict)  # the daemon's, so that clients can notice that it has ended


class Server:
    """Speaks the protocol with every client of one transport. Owns the transport from `start` to `close`."""

    def __init__(
        self,
        clients: Clients,
        engines: Engines,
        *,
        greeting: Greeting,
        stats: Callable[[], Any],
        explain: Callable[[str, str, str], dict[str, Any]],
        client_timeout: float = 5.0,
        observer_rate: float = 100.0,
        clock: Clock = SYSTEM_CLOCK,
        recorder: Recorder | None = None,
        listing: Listing,
        hello_arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """Receive nothing before `start`.

        observer_rate: requests per second for all observers.
        hello_arrived: called for each Hello of a client.
        explain: returns a task's story; takes its id, its engine or "", and the client's engine; raises RequestError.
        """
        self._recorder = recorder if recorder is not None else Recorder(capacity=1)
        self._listing, self._hello_arrived = listing, hello_arrived
        self._transport = clients.transport
        self._clients, self._engines = clients, engines
        self._report, self._story = stats, explain
        self._greeting = greeting
        self._max_message = greeting.max_message
        self._looks = Bucket(observer_rate, burst=2 * observer_rate)
        self._now = clock.monotonic
        self._liveness = Liveness(clients, client_timeout, self._now, self._recorder, self._forget)
        self._waiting: set[asyncio.Task[None]] = set()
        self._waiting_of: Counter[int | None] = Counter()  # by user id
        self._waiting_bytes = 0
        self._bytes_of: Counter[int | None] = Counter()  # by user id
        self._rejects: Counter[str] = Counter()
        self._turned_away: Counter[str] = Counter()
        self._not_stored: Counter[str] = Counter()
        self._turned_away_lines = Bucket(1 / TURNED_AWAY_EVERY_S, burst=3)
        self._messages = 0
        self._send = clients.send
        self._handlers = self._table()

    def _table(self) -> dict[type, Callable[[bytes, int, Any], None]]:
        """The handler of each control request."""
        return {
            wire.Hello: self._hello,
            wire.Bye: self._bye,
            wire.Cancel: self._cancel,
            wire.Settled: self._settled,
            wire.Match: self._match,
            wire.Exists: self._exists,
            wire.Locate: self._locate,
            wire.Pause: self._pause,
            wire.Resume: self._resume,
            wire.Drain: self._drain,
            wire.SetGeneration: self._set_generation,
            wire.ClosedGenerations: self._closed_generations,
            wire.Stats: self._stats,
            wire.Explain: self._explain,
            wire.Attach: self._attach,
            wire.ListTasks: self._tasks,
            wire.ListClients: self._list_clients,
            wire.Detach: self._detach,
            wire.Offer: self._offer,
            wire.ClearCache: self._clear_cache,
            wire.RestoreCache: self._restore_cache,
            wire.Register: self._register,
            wire.Unregister: self._unregister,
            wire.Purge: self._purge,
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
            wire.Prefetch: self._prefetch,
            wire.Warm: self._warm,
            wire.ChangeLevel: self._change_level,
            wire.MakeCopies: self._make_copies,
        }

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        self._transport.left = self._disconnected
        self._transport.start(self._received)

    async def close(self) -> None:
        """Stop listening. The transport's linger bounds the time to deliver what was sent."""
        self._liveness.close()
        for task in self._waiting:
            task.cancel()
        if self._waiting:
            await asyncio.wait(self._waiting)
        self._transport.close()

    def statistics(self) -> ServerReport:
        return ServerReport(
            clients=self._clients.connected,
            clients_lost=self._liveness.lost,
            waiting=len(self._waiting),
            waiting_bytes=self._waiting_bytes,
            messages=self._messages,
            undeliverable=self._clients.undeliverable,
            rejects=dict(self._rejects),
            turned_away=dict(self._turned_away),
            not_stored=dict(self._not_stored),
        )

    # --- receiving ----------------------------------------------------------------------------------

    def _received(self, peer: bytes, payload: bytes | memoryview) -> None:
        self._messages += 1
        try:
            request = wire.decode_request(payload, self._max_message)
        except wire.Malformed as error:
            self._refuse(peer, error)
            return
        client = self._clients.get(peer) or self._meet(peer)
        client.seen_at = self._now()
        seq, body = request.seq, request.body
        if client.observer and not self._observer_may(peer, seq, body):
            return
        client.behind = request.session not in (client.session, wire.ANY_SESSION)
        if client.behind:
            if not client.first_session <= request.session < client.session:
                self._refuse(peer, wire.Malformed(OTHER_CONNECTION, code=wire.STALE_SESSION, seq=seq))
                return
            self._clients.tell_of_session(peer)
        if not client.belongs and not isinstance(body, NEED_NO_ENGINE) and not self._bound(peer, client, seq, body):
            return
        if not client.holds and isinstance(body, HOLD):
            self._liveness.watch_process(peer)
            self._engines.hold(client)
        try:
            if not isinstance(body, Task):
                self._engines.acts.asked(peer, seq, client, body)
                self._handlers[type(body)](peer, seq, body)
            elif client.engine.coordinator.submit(peer, seq, body, again=client.behind) and request.ack:  # type: ignore[union-attr]
                self._send(peer, seq, wire.Accepted())
        except TransferError as error:
            self._refused(peer, seq, error, type(body), again=client.behind)
        except Exception as error:  # noqa: BLE001 - the request is answered, whatever it ran into
            self._failed(peer, seq, error, again=client.behind)

    def _observer_may(self, peer: bytes, seq: int, body: wire.Body) -> bool:
        """Whether an observer may make this request now. If not, it gets a refusal."""
        if not isinstance(body, OBSERVERS_MAY):
            what = "observers may only use ping, stats, explain, tasks and clients"
            task_id = body.task_id if isinstance(body, Task) else None
            self._refuse(peer, wire.Malformed(what, code="forbidden", seq=seq, task_id=task_id))
            return False
        if isinstance(body, wire.Bye) or self._looks.take(self._now()):
            return True
        self._rejects["too_often"] += 1
        self._warn(peer, "too_often")
        self._refused(peer, seq, TransferError("observers have asked too often; try again later", code="too_often"))
        return False

    def _bound(self, peer: bytes, client: KnownClient, seq: int, body: wire.Body) -> bool:
        """Whether this client may make this request of its engine. If not, it gets a refusal."""
        try:
            self._engines.bound(peer, client, control=isinstance(body, CONTROL))
        except RequestError as error:
            task_id = body.task_id if isinstance(body, Task) else None
            if not client.behind:
                self._refuse(peer, wire.Malformed(str(error), code=error.reason, seq=seq, task_id=task_id))
            return False
        return True

    def _refuse(self, peer: bytes, error: wire.Malformed) -> None:
        """Answer a bad message: with a result if it is a task, else with a refusal."""
        self._rejects[error.reason] += 1
        client = self._clients.get(peer)
        bound = None if client is None else client.engine  # any client may name any engine and any task
        recorder = self._recorder if bound is None else bound.recorder
        recorder.aside("" if bound is None else error.task_id or "", "bad message", error.reason, peer)
        if not (stale := error.reason == wire.STALE_SESSION):  # happens to good clients after a broken connection
            self._warn(peer, error.reason)
        info = ErrorInfo(error.reason, str(error))
        if error.task_id is None:
            refused = wire.Refused(info, permanent=not stale and error.reason != OutOfMemory.code)
            (self._clients.refuse_stale if stale else self._send)(peer, error.seq, refused)
            return
        result = TaskResult(
            task_id=error.task_id,
            status=Status.FAILED if error.reason == OutOfMemory.code else Status.REJECTED,
            error=info,
            generation=self._generation(peer),
            boot_id=self._clients.boot_id,
        )
        self._send(peer, error.seq, wire.Result(result))

    def _generation(self, peer: bytes) -> str:
        """The generation of this client's engine; before its first Hello, that of the default engine."""
        client = self._clients.get(peer)
        engine = self._engines.own if client is None else client.engine
        return "" if engine is None else engine.coordinator.generation

    def _warn(self, peer: bytes, reason: str) -> None:
        who = {"engine": self._clients.engine_of(peer), "client": peer.decode()}
        log.warning("request refused", reason=reason, **who, peer=self._clients.where(peer))

    # --- requests -----------------------------------------------------------------------------------

    def _hello(self, peer: bytes, seq: int, hello: wire.Hello) -> None:
        self._hello_arrived()
        client, greeting = self._clients[peer], self._greeting
        client.hello_requested = False
        if client.session not in client.welcomed:
            client.welcomed.append(client.session)
        self._engines.join(peer, client, hello.engine, hello.registration, hello)
        if hello.turned_away and not client.observer:  # an observer pushes no tasks, and must not move counters
            self._count_turned_away(peer, client, hello.turned_away)
        if not client.observer:
            self._not_stored += {reason: hello.not_stored.get(reason, 0) for reason in NOT_STORED}
        epoch, registration, registered = self._engines.known_to(client)
        engine = client.engine
        welcome = wire.Welcome(
            boot_id=self._clients.boot_id,
            ready=client.belongs and engine is not None and engine.coordinator.ready,
            version=VERSION,
            generation="" if engine is None else engine.coordinator.generation,
            max_message=greeting.max_message,
            session=client.session,
            block_size=0 if engine is None else engine.block_size,
            pd_mode=greeting.pd_mode,
            pd_address=greeting.pd_address(),
            missing=engine.cache.missing if engine is not None and client.belongs else [],
            why=self._why_not_ready(client),
            epoch=epoch,
            engine=client.engine_name,
            registration=registration,
            registered=registered,
            process=greeting.process,
            configured=engine.configured if engine is not None and client.belongs else None,
            identity=None if engine is None else engine.identity,
            refused=client.refused,
            ended=client.ended,
            many=wire.MOST_IDS,
        )
        self._send(peer, seq, welcome)

    def _count_turned_away(self, peer: bytes, client: KnownClient, by_code: dict[str, int]) -> None:
        """Count the tasks that a client has rejected itself, which the daemon has never seen."""
        counts = Counter[str]()
        for code, count in by_code.items():
            counts[code if code in CODES else "error"] += count
        self._turned_away += counts
        client.turned_away += counts.total()
        if self._turned_away_lines.take(self._now()):
            who = {"engine": client.engine_name, "client": peer.decode()}
            log.warning("client turned tasks away", codes=dict(counts), **who, peer=self._clients.where(peer))

    def _why_not_ready(self, client: KnownClient) -> str:
        engine = client.engine
        if engine is None or not client.belongs:
            return self._engines.absent(client)
        return engine.why_not_ready

    def _register(self, peer: bytes, seq: int, asked: wire.Register) -> None:
        self._liveness.watch_process(peer)
        self._later(peer, seq, self._engines.register(peer, self._clients[peer], asked), kind=wire.Register)

    def _unregister(self, peer: bytes, seq: int, _: wire.Unregister) -> None:
        self._later(peer, seq, self._engines.unregister(self._engine(peer)))

    def _engine(self, peer: bytes) -> HostedEngine:
        """The engine that a client speaks for; `_received` has checked that there is one."""
        engine = self._clients[peer].engine
        assert engine is not None
        return engine

    def _bye(self, peer: bytes, _seq: int, _: wire.Bye) -> None:
        self._recorder.aside("", "client left", peer)
        self._forget(peer)

    def _cancel(self, peer: bytes, seq: int, cancel: wire.Cancel) -> None:
        engine, cancelled = self._engine(peer), False
        for task_id in (cancel.task_id, *cancel.task_ids):
            there = engine.coordinator.cancel(task_id)
            cancelled = self._engines.prefetches.cancel(engine, task_id) or there or cancelled
        self._value(peer, seq, cancelled)

    def _settled(self, peer: bytes, seq: int, settled: wire.Settled) -> None:
        self._later(peer, seq, self._when_settled(peer, self._clients[peer].engine_name, settled))

    async def _when_settled(self, peer: bytes, engine: str, settled: wire.Settled) -> bool | list[str]:
        await self._clients.gone(settled.session, but=peer)
        name = engine or DEFAULT_ENGINE
        if settled.task_ids:
            return await self._engines.some_settled(name, [settled.task_id, *settled.task_ids])
        await self._engines.task_settled(name, settled.task_id)
        return True

    def _match(self, peer: bytes, seq: int, match: wire.Match) -> None:
        by_keys, path, lookup = match.keys, match.token_ids, self._engine(peer).lookup
        work = lookup.match(by_keys) if path is None else lookup.match_tokens(path, match.start, match.salt)
        nbytes = keys_bytes(by_keys) if path is None else path.array.nbytes
        self._later(peer, seq, work, nbytes)

    def _exists(self, peer: bytes, seq: int, exists: wire.Exists) -> None:
        keys = exists.keys
        work = self._engine(peer).lookup.exists(keys, use=exists.use)
        self._later(peer, seq, work, keys_bytes(keys))

    def _locate(self, peer: bytes, seq: int, locate: wire.Locate) -> None:
        lookup = self._engine(peer).lookup
        if locate.token_ids is None:
            self._later(peer, seq, lookup.locate_keys(locate.keys), keys_bytes(locate.keys))
        else:
            self._value(peer, seq, lookup.locate(locate.token_ids, locate.salt))

    def _pause(self, peer: bytes, seq: int, pause: wire.Pause) -> None:
        holder = self._checked_holder(peer, "pause", pause)  # before the pause takes effect
        self._later(peer, seq, self._engine(peer).coordinator.pause(peer, *holder))

    def _resume(self, peer: bytes, seq: int, resume: wire.Resume) -> None:
        self._engine(peer).coordinator.resume(*_holder(peer, resume))
        self._value(peer, seq, None)

    def _drain(self, peer: bytes, seq: int, drain: wire.Drain) -> None:
        holder = self._checked_holder(peer, "drain", drain)
        self._later(peer, seq, self._engine(peer).coordinator.drain(peer, *holder))

    def _checked_holder(self, peer: bytes, what: str, body: wire.Pause | wire.Drain) -> tuple[str, str]:
        """The holder. Raises `too_many_requests` unless one more hold may be kept, and one more request may wait."""
        self._check_waiting(peer)
        holder = _holder(peer, body)
        if not self._engine(peer).dispatcher.may_hold(what, *holder):
            problem = f"{MOST_HOLDS} pauses and drains of this engine are held already; end one with resume"
            raise TransferError(problem, code="too_many_requests")
        return holder

    def _set_generation(self, peer: bytes, seq: int, change: wire.SetGeneration) -> None:
        self._later(peer, seq, self._engines.set_generation(peer, self._engine(peer), change.generation))

    def _closed_generations(self, peer: bytes, seq: int, closed: wire.ClosedGenerations) -> None:
        self._engine(peer).cache.close_generations(closed.generations)
        self._value(peer, seq, None)

    def _stats(self, peer: bytes, seq: int, _: wire.Stats) -> None:
        self._value(peer, seq, self._report())

    def _explain(self, peer: bytes, seq: int, explain: wire.Explain) -> None:
        self._value(peer, seq, self._story(explain.task_id, explain.engine, self._clients[peer].engine_name))

    def _tasks(self, peer: bytes, seq: int, tasks: wire.ListTasks) -> None:
        self._value(peer, seq, self._listing.tasks(tasks.which, tasks.limit, tasks.engine))

    def _list_clients(self, peer: bytes, seq: int, clients: wire.ListClients) -> None:
        self._value(peer, seq, self._listing.clients(clients.limit, clients.engine))

    def _attach(self, peer: bytes, seq: int, attach: wire.Attach) -> None:
        self._liveness.watch_process(peer)
        handle = self._engine(peer).cache.handle(peer, attach.rank, attach.epoch)
        epoch = {"boot_id": self._clients.boot_id, "epoch": self._engine(peer).cache.epoch}
        self._value(peer, seq, {"kind": handle.kind, "data": handle.data} | epoch)

    def _detach(self, peer: bytes, seq: int, detach: wire.Detach) -> None:
        self._engine(peer).cache.detach(peer, detach.rank)
        self._value(peer, seq, None)

    def _offer(self, peer: bytes, seq: int, offer: wire.Offer) -> None:
        self._liveness.watch_process(peer)
        data = wire.handle_data(offer)
        who = self._clients[peer].credentials  # from the kernel, because an offer could name another process
        data[PEER] = (None, None) if who is None else (who.uid, who.pid)
        handle = DeviceHandle(offer.kind, data)
        work = self._engines.offer(peer, self._clients[peer], offer.rank, handle, offer.epoch)
        self._later(peer, seq, work, kind=wire.Offer)

    def _clear_cache(self, peer: bytes, seq: int, clear: wire.ClearCache) -> None:
        self._later(peer, seq, self._engine(peer).cache.clear(keep_host=clear.keep_host))

    def _restore_cache(self, peer: bytes, seq: int, restore: wire.RestoreCache) -> None:
        self._later(peer, seq, self._engines.restore(peer, self._engine(peer), restore))

    def _purge(self, peer: bytes, seq: int, purge: wire.Purge) -> None:
        self._later(peer, seq, self._engines.holdings.purge(self._clients[peer], purge), keys_bytes(purge.keys or []))

    def _pin(self, peer: bytes, seq: int, pin: wire.Pin) -> None:
        self._later(peer, seq, self._engines.holdings.pin(self._engine(peer), pin), keys_bytes(pin.keys))

    def _unpin(self, peer: bytes, seq: int, unpin: wire.Unpin) -> None:
        self._later(peer, seq, self._engines.holdings.unpin(self._engine(peer), unpin), keys_bytes(unpin.keys or []))

    def _prefetch(self, peer: bytes, seq: int, prefetch: wire.Prefetch) -> None:
        nbytes = keys_bytes(prefetch.keys)
        self._check_waiting(peer, nbytes)  # before it begins
        self._later(peer, seq, self._engines.prefetches.run(peer, self._engine(peer), prefetch), nbytes)

    def _warm(self, peer: bytes, seq: int, warm: wire.Warm) -> None:
        self._later(peer, seq, self._engines.prefetches.warm(self._clients[peer], warm))

    def _change_level(self, peer: bytes, seq: int, change: wire.ChangeLevel) -> None:
        self._later(peer, seq, self._engines.holdings.change_level(self._clients[peer], change))

    def _make_copies(self, peer: bytes, seq: int, asked: wire.MakeCopies) -> None:
        self._later(peer, seq, self._engines.holdings.make_copies(self._clients[peer], asked))

    # --- answering ----------------------------------------------------------------------------------

    def _value(self, peer: bytes, seq: int, value: Any) -> None:
        self._engines.acts.answered(peer, seq, value)
        try:
            self._send(peer, seq, wire.Value(value))
        except (TypeError, ValueError, OverflowError) as error:
            log.error("cannot encode an answer (bug)", problem=str(error))
            self._refused(peer, seq, InvariantError(f"cannot encode the answer: {error}"))

    def _refused(
        self, peer: bytes, seq: int, error: TransferError, kind: type | None = None, *, again: bool = False
    ) -> None:
        """Send a refusal, unless the request will come `again` and may be accepted then (protocol.py).

        kind: the type of the request, if its refusal may be logged.
        """
        self._engines.acts.answered(peer, seq, refused=True)
        if kind in KEEP_OUT and error.reason not in TRIED_AGAIN:
            who = {"engine": self._clients.engine_of(peer), "client": peer.decode()}
            where = self._clients.where(peer)
            log.warning(KEEP_OUT[kind], **who, peer=where, code=error.reason, problem=str(error))
        permanent = isinstance(error, RequestError)
        if isinstance(error, InvariantError):
            self._recorder.failure("", str(error))
        if not again:
            self._send(peer, seq, wire.Refused(ErrorInfo(error.reason, str(error)), permanent=permanent))

    def _later(self, peer: bytes, seq: int, work: Work, nbytes: int = 0, kind: type | None = None) -> None:
        """Answer when `work` is done. The number and bytes of waiting requests are bounded.

        nbytes: memory that `work` holds until then.
        kind: see `_refused`.
        """
        try:
            self._check_waiting(peer, nbytes)
        except TransferError:
            work.close()
            raise
        client = self._clients[peer]
        task = asyncio.get_running_loop().create_task(self._answer(peer, seq, work, kind, again=client.behind))
        self._waiting.add(task)
        self._waiting_of[client.uid] += 1
        client.waiting.add(task)
        self._waiting_bytes += nbytes
        self._bytes_of[client.uid] += nbytes
        task.add_done_callback(functools.partial(self._answered, peer, seq, client, work, nbytes))

    def _check_waiting(self, peer: bytes, nbytes: int = 0) -> None:
        """Raise `too_many_requests` unless one more request may wait."""
        client = self._clients[peer]
        theirs = self._bytes_of[client.uid]
        if self._waiting_bytes + nbytes > MAX_WAITING_BYTES and theirs and theirs + nbytes > FEW_BYTES:
            what = f"waiting requests already hold {self._waiting_bytes} bytes, {theirs} of this user; try again later"
            raise TransferError(what, code="too_many_requests")
        if len(client.waiting) >= MAX_WAITING_PER_CLIENT:
            what = f"{MAX_WAITING_PER_CLIENT} requests of this client are waiting already"
            raise TransferError(what, code="too_many_requests")
        if len(self._waiting) >= MAX_WAITING_REQUESTS and self._waiting_of[client.uid] >= FEW_WAITING:
            what = f"{len(self._waiting)} requests are waiting already, {self._waiting_of[client.uid]} of this user"
            raise TransferError(what, code="too_many_requests")

    async def _answer(self, peer: bytes, seq: int, work: Work, kind: type | None, *, again: bool) -> None:
        try:
            self._value(peer, seq, await work)
        except TransferError as error:
            self._refused(peer, seq, error, kind, again=again)
        except Exception as error:  # noqa: BLE001 - as in _received
            self._failed(peer, seq, error, again=again)

    def _answered(
        self, peer: bytes, seq: int, client: KnownClient, work: Work, nbytes: int, task: asyncio.Task[None]
    ) -> None:
        self._waiting_bytes -= nbytes
        self._bytes_of[client.uid] -= nbytes
        self._waiting.discard(task)
        self._waiting_of[client.uid] -= 1
        if not self._waiting_of[client.uid]:
            del self._waiting_of[client.uid], self._bytes_of[client.uid]
        client.waiting.discard(task)
        work.close()  # if the task was cancelled before its first step, `work` never began
        if task.cancelled() and self._clients.get(peer) is not None:  # else the client is gone
            self._refused(peer, seq, TransferError("the daemon is shutting down", code="shutdown"))

    def _failed(self, peer: bytes, seq: int, error: Exception, *, again: bool) -> None:
        """Refuse a request that raised an unexpected error: the machine is out of memory, or we have a bug."""
        if isinstance(error, MemoryError):
            log.error("out of memory for a request", client=peer.decode())
            self._refused(peer, seq, OutOfMemory("not enough memory for this request; try again later"), again=again)
            return
        log.error("unhandled exception while handling a request (bug)", exc_info=error)
        self._refused(peer, seq, InvariantError(f"{type(error).__name__}: {error}"), again=again)

    # --- clients ------------------------------------------------------------------------------------

    def _meet(self, peer: bytes) -> KnownClient:
        client = self._clients.meet(peer, self._now())
        self._liveness.came()
        return client

    def _disconnected(self, peer: bytes) -> None:
        """A connection has ended, and its name never comes back. Forget its client, unless that keeps an engine.

        Such a client has until it counts as silent to come again on another connection.
        """
        client = self._clients.get(peer)
        if client is not None and not client.holds:
            self._forget(peer)

    def _forget(self, peer: bytes, how: str = "has left") -> None:
        client = self._clients.leave(peer)
        if client is None:
            return
        self._liveness.left(peer)
        self._engines.acts.left(peer)
        for task in client.waiting:
            task.cancel()
        self._engines.leave(peer, client, how)


def _holder(peer: bytes, body: wire.Pause | wire.Resume | wire.Drain) -> tuple[str, str]:
    """The holder of a pause, (name, proof): a client's own, which outlive its connection, or else the connection."""
    return (body.holder, f"said {body.proof}") if body.holder else (f"client {peer.decode()}", "connection")
