"""The daemon's side of the wire: decodes, routes, answers. Decides nothing about tasks.

Bad input is answered with a typed refusal and counted; it never reaches the coordinator. liveness.py detects lost
clients.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from transferd.daemon.clients import Clients, KnownClient
from transferd.daemon.engines import Engines
from transferd.daemon.listing import Listing
from transferd.daemon.liveness import Liveness
from transferd.daemon.requests import Begin, Requests, Work, held_bytes
from transferd.errors import InvariantError, OutOfMemory, RequestError, TransferError
from transferd.observability.recorder import Recorder
from transferd.observability.report import ServerReport
from transferd.runtime.bucket import Bucket
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.version import VERSION
from transferd.tasks import NOT_STORED, ErrorInfo, Status, Task, TaskResult
from transferd.wire import protocol as wire
from transferd.wire.codes import CODES

log = structlog.get_logger(__name__)

MAX_WAITING_REQUESTS = 1024  # requests of all clients that wait for something, such as match and pause
MAX_WAITING_PER_CLIENT = 256  # so that one client cannot take all places
FEW_WAITING = 64  # so many of a user's requests may wait even if other users have taken all places
MAX_WAITING_BYTES = 256 * 1024**2  # memory of the waiting requests' arguments; one that is alone may be larger
FEW_BYTES = 16 * 1024**2  # so much of a user's may wait even if other users have taken all of that; or one request
HOLD = (Task, wire.Attach)  # requests that keep an engine while its client lives; so does an accepted offer
KEEP_OUT = {wire.Offer: "offer refused", wire.Register: "registration refused"}  # logged: the engine has no cache
TRIED_AGAIN = ("unsealed", "starting", "engine_exists", "shutdown")  # clients retry by themselves, so no line is logged
TURNED_AWAY_EVERY_S = 10.0  # between log lines about tasks that clients turned away, after the first ones
OTHER_CONNECTION = "from a session of another connection; send Hello"


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
        listing, stats, explain: see Requests.
        """
        self._recorder = recorder if recorder is not None else Recorder(capacity=1)
        self._hello_arrived = hello_arrived
        self._transport = clients.transport
        self._clients, self._engines = clients, engines
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
        requests = Requests(clients, engines, self._liveness, listing, stats, explain)
        kinds = tuple(kind for kind in wire.CONTROLS if kind not in (wire.Hello, wire.Bye))
        self._handlers = requests.handlers(kinds)

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
        if not client.belongs and not isinstance(body, wire.OfAnyone) and not self._bound(peer, client, seq, body):
            return
        if not client.holds and isinstance(body, HOLD):
            self._liveness.watch_process(peer)
            self._engines.hold(client)
        try:
            if not isinstance(body, Task):
                self._engines.acts.asked(peer, seq, client, body)
                self._handle(peer, client, seq, body)
            elif client.engine.coordinator.submit(peer, seq, body, again=client.behind) and request.ack:  # type: ignore[union-attr]
                self._send(peer, seq, wire.Accepted())
        except TransferError as error:
            self._refused(peer, seq, error, type(body), again=client.behind)
        except Exception as error:  # noqa: BLE001 - the request is answered, whatever it ran into
            self._failed(peer, seq, error, again=client.behind)

    def _handle(self, peer: bytes, client: KnownClient, seq: int, body: wire.ControlRequest) -> None:
        if isinstance(body, wire.Hello):
            self._hello(peer, client, seq, body)
        elif isinstance(body, wire.Bye):
            self._recorder.aside("", "client left", peer)
            self._forget(peer)
        else:
            answer = self._handlers[type(body)](peer, body)
            if callable(answer):
                self._later(peer, client, seq, answer, body)
            else:
                self._value(peer, seq, answer)

    def _observer_may(self, peer: bytes, seq: int, body: wire.Body) -> bool:
        """Whether an observer may make this request now. If not, it gets a refusal."""
        if not isinstance(body, wire.OfObserver):
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
            self._engines.bound(peer, client, control=isinstance(body, wire.OfUser))
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

    def _hello(self, peer: bytes, client: KnownClient, seq: int, hello: wire.Hello) -> None:
        self._hello_arrived()
        greeting = self._greeting
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
            passing=bool(greeting.process),
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

    def _later(self, peer: bytes, client: KnownClient, seq: int, begin: Begin, body: wire.ControlRequest) -> None:
        """Begin work, and answer when it is done. The number and bytes of waiting requests are bounded."""
        nbytes = held_bytes(body)
        self._check_waiting(client, nbytes)
        work = begin()
        answer = self._answer(peer, seq, work, type(body), again=client.behind)
        task = asyncio.get_running_loop().create_task(answer)
        self._waiting.add(task)
        self._waiting_of[client.uid] += 1
        client.waiting.add(task)
        self._waiting_bytes += nbytes
        self._bytes_of[client.uid] += nbytes
        task.add_done_callback(functools.partial(self._answered, peer, seq, client, work, nbytes))

    def _check_waiting(self, client: KnownClient, nbytes: int) -> None:
        """Raise `too_many_requests` unless one more request may wait."""
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

    async def _answer(self, peer: bytes, seq: int, work: Work, kind: type, *, again: bool) -> None:
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
