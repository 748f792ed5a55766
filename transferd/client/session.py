"""A client's conversation with the daemon: sessions, the loss of the daemon, and exactly one end for each request.

Every request waits in `_pending` until exactly one of these ends it: its answer; the loss of the daemon; its
own time limit, by which a live daemon must have answered; or `close`.

*Loss.* heartbeat.py decides when the daemon is lost; an answer from another boot_id is a loss as well. Every
pending request fails, and we send a Bye, so that a daemon that was only suspended cancels our tasks. New requests
fail at once until a daemon answers.

*Sessions* (see protocol.py). A Welcome of the same boot with another session number says that a message was lost, or
that the daemon considered us gone. We then send every pending request again, in the original order; the daemon joins
tasks that it knows. Requests wait for the first Welcome: without a session, one could be lost or run twice.

*Backpressure.* Requests that the transport does not accept wait in order in `_unsent`. They are retried
with each message that arrives, and shortly after each refusal.

*Lifetime.* A conversation belongs to one event loop in one process: a forked child may neither use it nor touch its
socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from transferd.client.heartbeat import DOUBT_S, FIRST_HELLO_S, Heartbeat, Presence
from transferd.client.identity import MISMATCH, Served
from transferd.client.pending import Pending, PendingTask, error_of
from transferd.client.settling import SLICE, Settling, in_slices
from transferd.client.weights import Weights
from transferd.errors import (
    Closed,
    ConnectRefused,
    ConnectTimeout,
    DaemonLost,
    ProtocolError,
    RequestError,
    TransferError,
)
from transferd.runtime.aio import Timer, resolve
from transferd.runtime.clock import Clock
from transferd.runtime.compat import wait_for
from transferd.tasks import NOT_STORED, ErrorInfo
from transferd.wire import protocol as wire
from transferd.wire.obstacle import listener_of, wants_machine
from transferd.wire.transport import ClientTransport

log = logging.getLogger("transferd.client")  # the engine's logging configuration decides where this goes

HINT_AFTER_S = 1.0  # after this long, log what we are waiting for
RETRY_SEND_S = 0.02  # the pause before we try a full transport again
CANCEL_S = 30.0  # how long a cancel is repeated that nobody waits for
ASK_S = 30.0  # for the newest Welcome
MOST_COMPLAINTS = 64  # remembered, so that none is logged twice
MOST_CODES = 16  # of tasks turned away, in one Hello
OVERDUE_EVERY_S = 5.0  # how often pending requests are checked against their time limits

UNSAYABLE = (ValueError, TypeError, OverflowError)  # raised by encoding: lone surrogates, foreign objects, huge ints

# The session before any daemon has answered.
NO_SESSION = wire.Welcome(boot_id="", ready=False, version="", generation="", max_message=sys.maxsize)


class Conversation:
    """Changed by its own callbacks and by `ask`, all on one loop. Owns the transport from `open` to `close`.

    session: the newest Welcome.
    renewed: called after each Welcome; `session` is then already the new one.
    """

    def __init__(
        self, endpoint: str, transport: ClientTransport, clock: Clock, engine: str = "", token: str = ""
    ) -> None:
        """A closed conversation.

        engine: the one that this client speaks for; "" is the engine of the daemon's [cache].
        token: proves that the client belongs to that engine.
        """
        self.endpoint = endpoint
        self.engine = engine
        self.weights = Weights()
        self.token = self._given = token  # of the engine's registration; _given: by the caller
        self.session = NO_SESSION
        self.renewed: Callable[[], object] = lambda: None
        self.settling = Settling(self)
        self.on_new_boot: Callable[[], object] | None = None  # how the engine hears of a new daemon, and attaches
        self.served = Served()
        self._heart = Heartbeat()
        self._transport = transport
        self._now = clock.monotonic
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop of the newest `open`
        self._pid = 0  # and its process
        self._seq = 0
        self._pending: dict[int, Pending] = {}  # by seq, in the order of the calls
        self.pushes: dict[str, list[PendingTask]] = {}  # that have not ended, by task_id
        self._unsent: deque[int] = deque()
        self._beat_timer, self._send_timer = Timer(), Timer()
        self._overdue_at = math.inf
        self._listener = 0  # the daemon's pid when it was last doubted
        self.counts = Counts()
        self._cancels: dict[str, None] = {}  # to be sent at the end of this turn of the loop
        self._complaints: set[str] = set()  # logged since a daemon was last ready
        self._waiters: dict[asyncio.Future[None], bool] = {}  # callers that wait for a daemon; True: for a ready one
        self._refusal: ErrorInfo | None = None  # of our newest Hello

    # --- life ---------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether this process has opened the conversation and not closed it. True even while no daemon answers."""
        return self._heart.open and self._pid == os.getpid()

    @property
    def ready(self) -> bool:
        """Whether a ready daemon answers."""
        return self._answered and self.session.ready

    @property
    def _answered(self) -> bool:
        return self.is_open and not self._heart.lost and self.session is not NO_SESSION

    @property
    def present(self) -> str:
        """The boot_id of the daemon that answers; "" for none."""
        return self.session.boot_id if self._answered else ""

    def open(self) -> bool:
        """Connect and start sending Hello. Returns False, and changes nothing, if it is already open.

        Raises ConfigError for an invalid endpoint, Closed in a forked child of the process that connected.
        """
        self.check_process()
        if self._heart.open:
            if not self._loop_gone:
                return False
            self.close()
        self._transport.start(self._received)
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        self.session = NO_SESSION
        self.token = self._given
        self.served.forget()
        self._refusal = None
        self._heart.opened()
        self._overdue_at = self._now() + OVERDUE_EVERY_S
        self._greet()
        self._beat_timer.set(FIRST_HELLO_S, self._beat)
        return True

    async def wait(self, timeout: float, *, ready: bool) -> None:
        """Wait until a daemon answers or, if `ready`, reports that every rank is ready.

        Raises ConnectTimeout with the reason, Closed.
        """
        give_up = self.now + timeout
        if ready and self.ready and timeout > 0:  # as far as we know: it may have been replaced since its last answer
            with contextlib.suppress(TransferError, TimeoutError):
                await wait_for(self.request(self.hello(), timeout), min(timeout, ASK_S))
        if self.ready if ready else self._answered:
            return
        future: asyncio.Future[None] = self.new_future()
        self._waiters[future] = ready
        try:
            hinted = False
            while not future.done() and (left := max(give_up - self.now, 0.0)) > 0:
                await asyncio.wait({future}, timeout=min(left, HINT_AFTER_S))
                if not future.done() and (refusal := self._refused_now(ready=ready)) is not None:
                    raise ConnectRefused(f"{self.endpoint}: {refusal.message}", code=refusal.code)
                if not future.done() and not hinted and timeout > HINT_AFTER_S:
                    hinted = True
                    log.warning("%s: %s (still waiting)", self.endpoint, await self._obstacle(HINT_AFTER_S))
            if not future.done():
                raise ConnectTimeout(f"{self.endpoint}: {await self._obstacle(timeout)}")
            future.result()
        finally:
            del self._waiters[future]
            future.cancel()

    def _refused_now(self, *, ready: bool) -> ErrorInfo | None:
        """Why a daemon that answers refuses this client. ready: also for what only keeps it from being ready."""
        if self._refusal is not None or not ready or not self._answered:
            return self._refusal
        if self.served.differs:
            return ErrorInfo(MISMATCH, self.session.why)
        return self.session.refused

    async def _obstacle(self, waited_s: float) -> str:
        if not self._answered:
            why = await self._transport.obstacle()
            return f"no daemon answered within {waited_s:g} s" + (f": {why}" if why else "")
        missing = self.session.missing
        ranks = f"; without memory: rank {', '.join(map(str, missing))}" if missing else ""
        why = self.session.why or "it gave no reason"
        state = f"did not become ready within {waited_s:g} s" if waited_s else "is not ready"
        return f"the daemon answers but {state}: {why}{ranks}"

    def close(self) -> None:
        """Say Bye and disconnect. Pending requests end with code `closed`. Idempotent; a no-op in a forked child."""
        if not self.is_open:
            return
        if self._loop_gone:  # no task can wait on a closed loop, and its futures cannot be touched
            for one in self._pending.values():
                if isinstance(one, PendingTask) and one.push is not None:
                    self.settling.gave_up(one.body.task_id, one.push)
            self._pending.clear()
            self.pushes.clear()
            self._waiters.clear()
        else:
            self.own_loop()
            self._leave()
        self._heart.closed()
        self._beat_timer.cancel()
        self._send_timer.cancel()
        error = Closed("the client was closed")
        self._fail_all(error, at_once=True)
        self.settling.closed()
        for future in self._waiters:
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark it retrieved: the caller may have stopped waiting
        self._transport.close()

    def abandon(self) -> None:
        """Close from any thread, without waiting: for a client that was garbage-collected."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self.close)
                return
        self.close()

    @property
    def _loop_gone(self) -> bool:
        return self._loop is None or self._loop.is_closed()

    def unusable(self) -> Closed:
        """The error for a request that cannot be sent in this state."""
        if self._heart.open and self._pid != os.getpid():
            what = f"was connected by process {self._pid} and cannot be used after a fork; create a new one"
        elif self._heart.open:
            what = "was connected on an event loop that is closed; connect it again"
        else:
            what = "is closed, or was never connected"
        return Closed(f"the client of {self.endpoint} {what}")

    # --- asking -------------------------------------------------------------------------------------

    def cancel_soon(self, task_id: str) -> None:
        """Cancel a task. Those of one turn of the loop go out together; nobody waits for the answer."""
        if not self._cancels and self._loop is not None:  # which asyncio.run, at its end, cancels from outside
            self._loop.call_soon(self._cancel_all)
        self._cancels[task_id] = None

    def _cancel_all(self) -> None:
        cancels, self._cancels = list(self._cancels), {}
        most = max(self.session.many, 1)
        for start in range(0, len(cancels) if self.is_open else 0, most):
            task_id, *more = cancels[start : start + most]
            self.ask(Pending(wire.Cancel(task_id, more), self.new_future(), self.now + CANCEL_S))

    def new_future(self) -> asyncio.Future[Any]:
        """A future for a caller that waits for this daemon. Raises Closed, RequestError on another event loop."""
        return self.own_loop().create_future()

    def own_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop. Raises Closed, RequestError on another event loop than this conversation's."""
        loop = self._loop
        if loop is None or not self._heart.open or self._pid != os.getpid():  # not `is_open`: for each task, so no call
            raise self.unusable()
        if asyncio.get_running_loop() is not loop:
            if loop.is_closed():
                raise self.unusable()
            what = "belongs to the event loop on which it was connected; use SyncClient, or a client for each loop"
            raise RequestError(f"the client of {self.endpoint} {what}", code="wrong_loop")
        return loop

    def check_process(self) -> None:
        """Raise Closed in a forked child of the process that connected."""
        if self._heart.open and self._pid != os.getpid():
            raise self.unusable()

    def ask(self, pending: Pending) -> int:
        """Send a request; return its seq. `pending` always ends, soon after its deadline at the latest."""
        self._seq = seq = self._seq + 1
        if self._heart.lost:
            pending.fail(DaemonLost(f"{self.endpoint}: no daemon answers"))
            return seq
        self._pending[seq] = pending
        self._unsent.append(seq)
        if len(self._unsent) == 1:  # else what was asked before waits as well
            self._send_waiting()
        return seq

    def repeat(self, requests: Iterable[tuple[wire.ControlRequest, float]], *, anew: bool) -> None:
        """Send requests that give a daemon what an earlier one knew, with their time limits. No caller waits for them.

        anew: a session has begun since the last ones; those are dropped, because each new session repeats all pending
            requests, so they would pile up for as long as answers are lost.
        """
        if anew:
            self._pending = {seq: one for seq, one in self._pending.items() if one.complain is None}
        for body, limit in requests:
            self.ask(Pending(body, self.new_future(), self.now + limit, self.complain))

    def complain(self, what: str) -> None:
        """Log a refusal of something repeated, once."""
        if what not in self._complaints:
            self._complaints = {*self._complaints, what} if len(self._complaints) < MOST_COMPLAINTS else {what}
            log.warning("%s: %s", self.endpoint, what)

    async def request(self, body: wire.ControlRequest, timeout: float) -> Any:
        """Send a request and wait for its value. Raises the daemon's error, DaemonLost, Closed, or `no_answer`."""
        future = self.new_future()
        seq = self.ask(Pending(body, future, self.now + timeout))
        try:
            return await future
        finally:
            self._pending.pop(seq, None)  # its answer is then ignored

    def post(self, body: wire.Body) -> None:
        """Send a message that needs no answer; drop it if the transport does not accept it now."""
        self._seq += 1
        self._transport.send(wire.encode_request(self._seq, body, session=self.session.session))

    def turn_away(self, pending: Pending, error: RequestError) -> None:
        """End a request that was never sent. The next Hello counts a task for the daemon's reports."""
        if isinstance(pending, PendingTask):
            self.counts.turned_away(error.reason)
        pending.fail(error)

    def uses(self) -> None:
        """This client uses its engine: from now on it asserts the generation, and refuses another engine's service."""
        self.weights.used = True
        self.served.used = self.served.used or self.session.identity  # for each task, so no call

    def amend(self, **known: Any) -> None:
        """Update fields of `session` from an answer, before the next Welcome reports them."""
        self.session = msgspec.structs.replace(self.session, **known)

    @property
    def now(self) -> float:
        return self._now()

    def _encode(self, seq: int, pending: Pending) -> bytes | None:
        """Encode the request. Returns None if that fails; `pending` has then ended."""
        if self.served.differs and self.served.spoils(pending.body):
            self.turn_away(pending, self._another_engine())
            return None
        session, limit = self.session.session, self.session.max_message
        try:
            payload = wire.encode_request(seq, pending.body, ack=pending.admitted is not None, session=session)
        except UNSAYABLE as error:
            self.turn_away(pending, ProtocolError(f"cannot encode the request: {error}", code="bad_value"))
            return None
        if len(payload) > limit:
            what = f"the request is too large: {len(payload)} bytes, for {limit} at most (tuning.server.max_message)"
            self.turn_away(pending, ProtocolError(what, code="too_large"))
            return None
        return payload

    def _another_engine(self) -> RequestError:
        return RequestError(f"{self.endpoint}: {self.session.why}", code=MISMATCH)

    def _send_waiting(self) -> None:
        while self._unsent and self.session is not NO_SESSION:
            seq = self._unsent[0]
            pending = self._pending.get(seq)
            if pending is not None:
                payload = self._encode(seq, pending)
                if payload is None:
                    del self._pending[seq]
                elif self._transport.send(payload):
                    pending.push = self.settling.push
                else:  # a full transport does not say when it has room, and the next beat may be a second away
                    if not self._send_timer:
                        self._send_timer.set(RETRY_SEND_S, self._send_waiting)
                    return
            self._unsent.popleft()

    # --- hearing ------------------------------------------------------------------------------------

    def _received(self, payload: bytes | memoryview) -> None:
        try:
            reply = wire.decode_reply(payload)
        except wire.Malformed:
            return  # not a daemon of our version; we will notice its silence
        if self._heart.asked_at is not None:
            self._heart.heard()
        seq, body = reply.seq, reply.body
        if isinstance(body, wire.Result):  # without a call more, as most messages are results
            if (pending := self._pending.pop(seq, None)) is not None:
                pending.answer(body.result)
        elif isinstance(body, wire.Accepted):
            if (pending := self._pending.get(seq)) is not None and pending.admitted is not None:
                resolve(pending.admitted, None)
        elif isinstance(body, wire.TaskProgress):
            if (pending := self._pending.get(seq)) is not None:
                pending.progressed(body.layers)
        elif isinstance(body, wire.Welcome):
            self._answer(seq, body)  # first: whatever else this ends, it has its answer
            self._welcomed(seq, body)
        elif isinstance(body, wire.Value):
            self._answer(seq, body.value)
        else:
            self._refused(seq, body)
        if self._unsent:
            self._send_waiting()

    def _answer(self, seq: int, value: Any) -> None:
        if (pending := self._pending.pop(seq, None)) is not None:
            pending.answer(value)

    def _refused(self, seq: int, refused: wire.Refused) -> None:
        error = refused.error
        if error.code == wire.STALE_SESSION:
            if not self._heart.hello_under_way:  # else its Welcome will name the new session
                self._greet()
            return
        if seq == self._heart.newest:
            self._refusal = error
            self.complain(f"the daemon refuses this client: {error.message} ({error.code})")
        pending = self._pending.pop(seq, None)
        if pending is not None:
            pending.fail(error_of(refused))

    def _welcomed(self, seq: int, welcome: wire.Welcome) -> None:
        was_lost, before, self._refusal = self._heart.lost, self.session, None
        self.counts.welcomed(seq)
        if not self._heart.welcomed(seq):
            return
        if was_lost:  # the next beat is scheduled for a lost daemon
            self._beat_timer.set(FIRST_HELLO_S, self._beat)
        if self.served.compare(welcome.identity, self.weights.used):
            what = "this daemon now serves another engine than the one that this client has used"
            why = f"{what}: {self.served.differs}; start it as it was, or connect anew"
            welcome = msgspec.structs.replace(welcome, ready=False, why=why)
        another = welcome.boot_id != before.boot_id
        self.settling.welcomed(welcome)
        if another and before is not NO_SESSION:
            what = f"{self.endpoint}: the daemon was restarted (boot {welcome.boot_id}, was {before.boot_id})"
            self._fail_all(DaemonLost(what))
        self.session = welcome
        again = not another and welcome.session != before.session
        waiting = list(self._pending if again else self._unsent)
        self._unsent.clear()
        if welcome.ready:
            self._complaints.clear()
        if self.served.differs:
            self.complain(welcome.why)
            self._end_spoiled()
        if welcome.epoch and self.weights.welcomed(welcome):
            self._greet()  # `set_generation` waits until every client knows
        self.renewed()  # its requests go out first: the daemon must know them before it gets tasks
        self._unsent.extend(waiting)
        self._send_waiting()
        for future, ready in self._waiters.items():
            if welcome.ready or not ready:
                resolve(future, None)

    # --- silence ------------------------------------------------------------------------------------

    def _greet(self) -> None:
        self._seq += 1
        self._heart.said_hello(self._seq, self._now())
        self._transport.send(wire.encode_request(self._seq, self.counts.said(self._seq, self.hello())))

    def hello(self) -> wire.Hello:
        return self.weights.said(wire.Hello(self.engine, self.token, returns=self.on_new_boot is not None))

    def _beat(self) -> None:
        now = self._now()
        became = self._heart.look(now, lambda: wants_machine(self._listener))
        if now >= self._overdue_at:
            self._overdue_at = now + OVERDUE_EVERY_S
            self._end_overdue(now)
        if self._heart.presence is Presence.DOUBTED:
            if became:
                self._listener = listener_of(self.endpoint)
                self.settling.listens(self._listener)
            self._beat_timer.set(DOUBT_S, self._beat)
            return
        if became is Presence.LOST:
            self._leave()
            self._fail_all(DaemonLost(f"{self.endpoint}: no answer for {now - (self._heart.asked_at or now):.1f} s"))
        self._greet()
        self._beat_timer.set(self._heart.next_hello(now, ready=self.session.ready), self._beat)

    def _leave(self) -> None:
        """Tell the daemon to cancel what we still wait for."""
        if self.session is not NO_SESSION:
            self.post(wire.Bye())

    def _fail_all(self, error: TransferError, *, at_once: bool = False) -> None:
        """End everything pending; unless `at_once`, some in each turn of the loop."""
        ended = list(self._pending.values())
        self._pending.clear()
        self._unsent.clear()
        in_slices(ended, lambda one: one.fail(error), len(ended) if at_once else SLICE)

    def _end_spoiled(self) -> None:
        """End the requests that would be carried out, or are, for another engine."""
        error = self._another_engine()
        for seq, pending in list(self._pending.items()):
            if self.served.spoils(pending.body):
                self._end(seq, pending, error if pending.push is None else TransferError(str(error), code=MISMATCH))

    def _end_overdue(self, now: float) -> None:
        for seq, pending in list(self._pending.items()):
            if pending.deadline < now:
                what = "the daemon is alive but did not answer in time"
                self._end(seq, pending, TransferError(what, code="no_answer"))

    def _end(self, seq: int, pending: Pending, error: TransferError) -> None:
        """End a request that the daemon may still carry out."""
        del self._pending[seq]
        if isinstance(pending, PendingTask) and pending.push is not None:
            self.post(wire.Cancel(pending.body.task_id))
        pending.fail(error)


class Counts:
    """What a client counts for reports: tasks that it rejects itself, and blocks that its engine did not store.

    A Hello carries the counts. Its Welcome confirms them; if a later Welcome comes first, that Hello was lost, and the
    next one repeats them.
    """

    def __init__(self) -> None:
        self._turned_away: Counter[str] = Counter()  # tasks, by code
        self._not_stored: Counter[str] = Counter()  # blocks, by reason
        self._said: tuple[int, wire.Hello] | None = None  # the one under way that reports them

    def turned_away(self, code: str) -> None:
        """Count a task that was never sent."""
        if len(self._turned_away) < MOST_CODES or code in self._turned_away:
            self._turned_away[code] += 1

    def not_stored(self, reason: str, blocks: int) -> None:
        """Count blocks. Raises RequestError for what a daemon would refuse, and the Hello with it."""
        if reason not in NOT_STORED or type(blocks) is not int or blocks < 0:
            what = f"expected one of {', '.join(NOT_STORED)} and a number of blocks"
            raise RequestError(f"{what}, not {reason!r} and {blocks!r}", code="bad_value")
        self._not_stored[reason] += blocks

    def said(self, seq: int, hello: wire.Hello) -> wire.Hello:
        """The Hello of this number, with what is to be reported, unless an earlier one is under way with counts."""
        if self._said is None and (self._turned_away or self._not_stored):
            tasks, blocks = _of_one_hello(self._turned_away), _of_one_hello(self._not_stored)
            hello = msgspec.structs.replace(hello, turned_away=tasks, not_stored=blocks)
            self._said = seq, hello
        return hello

    def welcomed(self, seq: int) -> None:
        """Note the Welcome that answers the Hello of this number."""
        if self._said is not None and seq >= self._said[0]:
            (number, hello), self._said = self._said, None
            if seq == number:
                self._turned_away -= Counter(hello.turned_away)
                self._not_stored -= Counter(hello.not_stored)


def _of_one_hello(counts: Counter[str]) -> dict[str, int]:
    return {name: min(count, wire.MOST_COUNTED) for name, count in counts.items() if count > 0}
