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

from transferd.config import DEFAULT_ENGINE
from transferd.daemon.clients import KnownClient
from transferd.daemon.engines import Engines
from transferd.daemon.liveness import Liveness
from transferd.daemon.requests import Begin, Requests, Work, held_bytes
from transferd.errors import InvariantError, OutOfMemory, RequestError, TransferError
from transferd.observability.report import ServerReport
from transferd.runtime.aio import Background
from transferd.runtime.bucket import Bucket
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
WATCHED = (wire.Register, wire.Attach, wire.Offer)  # requests of clients whose processes are watched
HOLD = (Task, wire.Attach)  # requests that keep an engine while its client lives; so does an accepted offer
KEEP_OUT = {wire.Offer: "offer refused", wire.Register: "registration refused"}  # logged: the engine has no cache
TRIED_AGAIN = ("unsealed", "starting", "engine_exists", "shutdown")  # clients retry by themselves, so no line is logged
TURNED_AWAY_EVERY_S = 10.0  # between log lines about tasks that clients turned away, after the first ones
OTHER_CONNECTION = "from a session of another connection; send Hello"


@dataclass(eq=False, repr=False)
class Server:
    """Speaks the protocol with every client of one transport. Owns the transport from `start` to `close`.

    requests: what the daemon does for each control request.
    process: the daemon's, so that clients can notice that it has ended; empty for a simulated one.
    hello_arrived: called for each Hello of a client.
    """

    engines: Engines
    requests: Requests
    process: dict[str, Any] = field(default_factory=dict)
    hello_arrived: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        clients, section = self.engines.clients, self.engines.config.server
        self.clients, self._peers, self._section = clients, self.engines.shared.peers, section
        self._recorder, self._transport = clients.recorder, clients.transport
        self._looks = Bucket(section.observer_rate, burst=2 * section.observer_rate)
        self._now = self.engines.shared.clock.monotonic
        self._liveness = Liveness(clients, section.client_timeout, self._now, self._forget)
        self._waiting = Background(awaited=False)
        self._waiting_of: Counter[int | None] = Counter()  # by user id
        self._bytes_of: Counter[int | None] = Counter()  # by user id
        self._rejects: Counter[str] = Counter()
        self._turned_away: Counter[str] = Counter()
        self._not_stored: Counter[str] = Counter()
        self._turned_away_lines = Bucket(1 / TURNED_AWAY_EVERY_S, burst=3)
        self._messages = 0
        self._send = clients.send
        self._handlers = self.requests.handlers()

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        self._transport.start(self._received, self._disconnected)

    async def close(self) -> None:
        """Stop listening. The transport's linger bounds the time to deliver what was sent."""
        self._liveness.close()
        for request in self._waiting.running:
            request.cancel()
        await self._waiting.ended()
        self._transport.close()

    def statistics(self) -> ServerReport:
        return ServerReport(
            clients=self.clients.connected,
            clients_lost=self._liveness.lost,
            waiting=len(self._waiting),
            waiting_bytes=self._bytes_of.total(),
            messages=self._messages,
            undeliverable=self.clients.undeliverable,
            rejects=dict(self._rejects),
            turned_away=dict(self._turned_away),
            not_stored=dict(self._not_stored),
        )

    # --- receiving ----------------------------------------------------------------------------------

    def _received(self, peer: bytes, payload: bytes | memoryview) -> None:
        self._messages += 1
        try:
            request = wire.decode_request(payload, self._section.max_message)
        except wire.Malformed as error:
            self._refuse(peer, error)
            return
        client = self.clients.get(peer) or self._meet(peer)
        client.seen_at = self._now()
        seq, body = request.seq, request.body
        if client.observer and not self._observer_may(client, seq, body):
            return
        client.behind = request.session not in (client.session, wire.ANY_SESSION)
        if client.behind:
            if not client.first_session <= request.session < client.session:
                self._refuse(peer, wire.Malformed(OTHER_CONNECTION, code=wire.STALE_SESSION, seq=seq))
                return
            self.clients.tell_of_session(client)
        unsure = not client.belongs or self.engines.leaving
        if unsure and not isinstance(body, wire.OfAnyone) and not self._bound(client, seq, body):
            return
        if not client.holds and isinstance(body, HOLD):
            self._liveness.watch_process(peer)
            self.engines.hold(client)
        try:
            if not isinstance(body, Task):
                if isinstance(body, WATCHED):
                    self._liveness.watch_process(peer)
                self._handle(client, seq, body)
            elif client.engine.coordinator.submit(peer, seq, body, again=client.behind) and request.ack:  # type: ignore[union-attr]
                self._send(peer, seq, wire.Accepted())
        except Exception as error:  # noqa: BLE001 - the request is answered, whatever it ran into
            self._failed(client, seq, error, type(body), again=client.behind)

    def _handle(self, client: KnownClient, seq: int, body: wire.ControlRequest) -> None:
        if isinstance(body, wire.Hello):
            self._hello(client, seq, body)
        elif isinstance(body, wire.Bye):
            self._recorder.aside("", "client left", client.peer)
            self._forget(client.peer)
        else:
            answer = self._handlers[type(body)](client, body)
            if callable(answer):
                self._later(client, seq, answer, body)
            else:
                self._value(client, seq, body, answer)

    def _observer_may(self, client: KnownClient, seq: int, body: wire.Body) -> bool:
        """Whether an observer may make this request now. If not, it gets a refusal."""
        if not isinstance(body, wire.OfObserver):
            what = "observers may only use ping, stats, explain, tasks and clients"
            self._refuse(client.peer, _malformed(what, "forbidden", seq, body))
            return False
        if isinstance(body, wire.Bye) or self._looks.take(self._now()):
            return True
        self._rejects["too_often"] += 1
        self._warn(client.peer, "too_often")
        self._refused(client, seq, TransferError("observers have asked too often; try again later", code="too_often"))
        return False

    def _bound(self, client: KnownClient, seq: int, body: wire.Body) -> bool:
        """Whether this client may make this request of its engine. If not, it gets a refusal."""
        try:
            self.engines.bound(client, control=isinstance(body, wire.OfUser))
            if isinstance(body, Task) and self.engines.leaving:
                self.engines.check_left(client.engine_name, body.task_id)
        except RequestError as error:
            if not client.behind:
                self._refuse(client.peer, _malformed(str(error), error.reason, seq, body))
            return False
        return True

    def _refuse(self, peer: bytes, error: wire.Malformed) -> None:
        """Answer a bad message: with a result if it is a task, else with a refusal."""
        self._rejects[error.reason] += 1
        client = self.clients.get(peer)
        bound = None if client is None else client.engine  # any client may name any engine and any task
        engine = self.engines.own if client is None else bound  # whose generation a result names
        recorder = self._recorder if bound is None else bound.recorder
        recorder.aside("" if bound is None else error.task_id or "", "bad message", error.reason, peer)
        if not (stale := error.reason == wire.STALE_SESSION):  # happens to good clients after a broken connection
            self._warn(peer, error.reason)
        info = ErrorInfo(error.reason, str(error))
        if error.task_id is None:
            refused = wire.Refused(info, permanent=not stale and error.reason != OutOfMemory.code)
            (self.clients.refuse_stale if stale else self._send)(peer, error.seq, refused)
            return
        result = TaskResult(
            task_id=error.task_id,
            status=Status.FAILED if error.reason == OutOfMemory.code else Status.REJECTED,
            error=info,
            generation="" if engine is None else engine.coordinator.generation,
            boot_id=self.clients.boot_id,
            # an engine of its name may be leaving, with this task in a copy
            settled=client is None or self.engines.is_settled(client.engine_name or DEFAULT_ENGINE, error.task_id),
        )
        self._send(peer, error.seq, wire.Result(result))

    def _warn(self, peer: bytes, reason: str) -> None:
        log.warning("request refused", reason=reason, **self._who(peer))

    def _who(self, peer: bytes) -> dict[str, str | None]:
        where = self.clients.where(peer)
        return {"engine": self.clients.engine_of(peer), "client": peer.decode(), "peer": where}

    # --- requests -----------------------------------------------------------------------------------

    def _hello(self, client: KnownClient, seq: int, hello: wire.Hello) -> None:
        self.hello_arrived()
        client.hello_requested = False
        if client.session not in client.welcomed:
            client.welcomed.append(client.session)
        self.engines.join(client, hello)
        if not client.observer:  # an observer pushes no tasks, and must not move counters
            self._count_turned_away(client, hello.turned_away)
            self._not_stored += {reason: hello.not_stored.get(reason, 0) for reason in NOT_STORED}
        engine = client.engine
        own = engine if client.belongs else None
        welcome = wire.Welcome(
            boot_id=self.clients.boot_id,
            ready=own is not None and own.coordinator.ready,
            version=VERSION,
            generation="" if engine is None else engine.coordinator.generation,
            max_message=self._section.max_message,
            session=client.session,
            block_size=0 if engine is None else engine.block_size,
            pd_mode="storage" if self._peers is None else "direct",
            pd_address="" if self._peers is None else self._peers.address,
            missing=[] if own is None else own.cache.missing,
            why=self.engines.absent(client) if own is None else own.why_not_ready,
            epoch=0 if own is None else own.cache.epoch,
            engine=client.engine_name,
            registration="" if own is None else own.token,
            registered=0 if own is None else own.first_epoch,
            process=self.process,
            passing=bool(self.process),
            configured=None if own is None else own.configured,
            identity=None if engine is None else engine.identity,
            refused=client.refused,
            ended=client.ended,
            many=wire.MOST_IDS,
        )
        self._send(client.peer, seq, welcome)

    def _count_turned_away(self, client: KnownClient, by_code: dict[str, int]) -> None:
        """Count the tasks that a client has rejected itself, which the daemon has never seen."""
        counts = Counter[str]()
        for code, count in by_code.items():
            counts[code if code in CODES else "error"] += count
        self._turned_away += counts
        client.turned_away += counts.total()
        if counts and self._turned_away_lines.take(self._now()):
            log.warning("client turned tasks away", codes=dict(counts), **self._who(client.peer))

    # --- answering ----------------------------------------------------------------------------------

    def _value(self, client: KnownClient, seq: int, body: wire.ControlRequest, value: Any) -> None:
        self.engines.acts.done(client, body, value)
        try:
            self._send(client.peer, seq, wire.Value(value))
        except (TypeError, ValueError, OverflowError) as error:
            log.error("cannot encode an answer (bug)", problem=str(error))
            self._refused(client, seq, InvariantError(f"cannot encode the answer: {error}"))

    def _refused(
        self, client: KnownClient, seq: int, error: TransferError, kind: type | None = None, *, again: bool = False
    ) -> None:
        """Send a refusal, unless the request will come `again` and may be accepted then (protocol.py).

        kind: the type of the request, if its refusal may be logged.
        """
        if kind in KEEP_OUT and error.reason not in TRIED_AGAIN:
            log.warning(KEEP_OUT[kind], **self._who(client.peer), code=error.reason, problem=str(error))
        permanent = isinstance(error, RequestError)
        if isinstance(error, InvariantError):
            self._recorder.failure("", str(error))
        if not again:
            self._send(client.peer, seq, wire.Refused(ErrorInfo(error.reason, str(error)), permanent=permanent))

    def _later(self, client: KnownClient, seq: int, begin: Begin, body: wire.ControlRequest) -> None:
        """Begin work, and answer when it is done. The number and bytes of waiting requests are bounded."""
        nbytes, uid = held_bytes(body), client.uid
        self._check_waiting(client, uid, nbytes)
        work = begin()
        task = self._waiting.begin(self._answer(client, seq, work, body, again=client.behind))
        self._waiting_of[uid] += 1
        client.waiting.add(task)
        self._bytes_of[uid] += nbytes
        task.add_done_callback(functools.partial(self._answered, client, uid, seq, work, nbytes))

    def _check_waiting(self, client: KnownClient, uid: int | None, nbytes: int) -> None:
        """Raise `too_many_requests` unless one more request may wait."""
        held, theirs = self._bytes_of.total(), self._bytes_of[uid]
        if held + nbytes > MAX_WAITING_BYTES and theirs and theirs + nbytes > FEW_BYTES:
            what = f"waiting requests already hold {held} bytes, {theirs} of this user; try again later"
            raise TransferError(what, code="too_many_requests")
        if len(client.waiting) >= MAX_WAITING_PER_CLIENT:
            what = f"{MAX_WAITING_PER_CLIENT} requests of this client are waiting already"
            raise TransferError(what, code="too_many_requests")
        if len(self._waiting) >= MAX_WAITING_REQUESTS and self._waiting_of[uid] >= FEW_WAITING:
            what = f"{len(self._waiting)} requests are waiting already, {self._waiting_of[uid]} of this user"
            raise TransferError(what, code="too_many_requests")

    async def _answer(
        self, client: KnownClient, seq: int, work: Work, body: wire.ControlRequest, *, again: bool
    ) -> None:
        try:
            self._value(client, seq, body, await work)
        except Exception as error:  # noqa: BLE001 - as in _received
            self._failed(client, seq, error, type(body), again=again)

    def _answered(
        self, client: KnownClient, uid: int | None, seq: int, work: Work, nbytes: int, task: asyncio.Future[None]
    ) -> None:
        self._bytes_of[uid] -= nbytes
        self._waiting_of[uid] -= 1
        if not self._waiting_of[uid]:
            del self._waiting_of[uid], self._bytes_of[uid]
        client.waiting.discard(task)
        work.close()  # if the task was cancelled before its first step, `work` never began
        if task.cancelled() and self.clients.get(client.peer) is not None:  # else the client is gone
            self._refused(client, seq, TransferError("the daemon is shutting down", code="shutdown"))

    def _failed(self, client: KnownClient, seq: int, error: Exception, kind: type, *, again: bool) -> None:
        """Refuse a request that raised an error. If it is no TransferError, memory is short, or we have a bug."""
        if isinstance(error, MemoryError):
            log.error("out of memory for a request", client=client.peer.decode())
            error = OutOfMemory("not enough memory for this request; try again later")
        elif not isinstance(error, TransferError):
            log.error("unhandled exception while handling a request (bug)", exc_info=error)
            error = InvariantError(f"{type(error).__name__}: {error}")
        self._refused(client, seq, error, kind, again=again)

    # --- clients ------------------------------------------------------------------------------------

    def _meet(self, peer: bytes) -> KnownClient:
        client = self.clients.meet(peer, self._now())
        self._liveness.came()
        return client

    def _disconnected(self, peer: bytes) -> None:
        """A connection has ended, and its name never comes back. Forget its client, unless that keeps an engine.

        Such a client has until it counts as silent to come again on another connection.
        """
        client = self.clients.get(peer)
        if client is not None and not client.holds:
            self._forget(peer)

    def _forget(self, peer: bytes, how: str = "has left") -> None:
        client = self.clients.leave(peer)
        if client is None:
            return
        self._liveness.left(peer)
        for task in client.waiting:
            task.cancel()
        self.engines.leave(client, how)


def _malformed(problem: str, code: str, seq: int, body: wire.Body) -> wire.Malformed:
    """A refusal of a request that could be read."""
    return wire.Malformed(problem, code=code, seq=seq, task_id=body.task_id if isinstance(body, Task) else None)
