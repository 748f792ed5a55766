"""A client's conversation with the daemon: sessions, loss, and exactly one end for each request.

Theory of operation
-------------------
Every request waits in `_pending` until exactly one of these ends it: its answer; the loss of the
daemon; its own time limit, past which a living daemon must have answered; `close`. Nothing else does.

*Loss.* heartbeat.py decides when the daemon is lost; another boot_id that answers is a loss as well.
Everything pending fails, a Bye tells a daemon that was only stopped to take our tasks back, and what
is asked from then on fails right away, until a daemon answers.

*Sessions* (see protocol.py). `session` is the newest Welcome. A Welcome of the same boot with another
session number says that something was lost on the way, or that the daemon gave us up. Then everything
pending is asked again, in its first order; tasks that the daemon knows are joined, not done twice.
Before the first Welcome, what is asked waits: a request of no session could be lost, or an echo could
do it twice, and nobody could tell.

*Congestion.* What the transport does not take waits in order in `_unsent`, and is tried again with
each message that arrives and each heartbeat.

*Lives.* `open` begins a conversation that knows nothing of an earlier one. It belongs to one event loop
in one process: a forked child inherits the object, and may neither use it nor touch its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from transferd.client.heartbeat import DOUBT_S, FIRST_HELLO_S, SILENCE_S, Heartbeat, Presence
from transferd.client.pending import Pending, PendingTask
from transferd.errors import (
    Closed,
    ConnectTimeout,
    DaemonLost,
    DeviceLost,
    EngineGone,
    ProtocolError,
    RequestError,
    StorageError,
    StorageFull,
    StorageUnavailable,
    TierError,
    TransferError,
)
from transferd.runtime.clock import Clock
from transferd.wire import protocol as wire
from transferd.wire.transport import ClientTransport

log = logging.getLogger("transferd.client")  # the engine's own logging decides where that goes

HINT_AFTER_S = 1.0  # who waits for longer is told what for
OVERDUE_EVERY_S = 5.0  # how often pending requests are checked against their time limits

# Errors keep their type across the wire where it says more than the code.
_BY_CODE: dict[str, type[TransferError]] = {
    kind.code: kind
    for kind in (
        ProtocolError,
        TierError,
        DeviceLost,
        EngineGone,
        StorageError,
        StorageFull,
        StorageUnavailable,
    )
}
UNSAYABLE = (ValueError, TypeError, OverflowError)  # from encoding: lone surrogates, alien objects, huge ints

# The session of a client that no daemon has answered yet.
NO_SESSION = wire.Welcome(boot_id="", ready=False, version="", generation="", max_message=sys.maxsize)


class Link:
    """Changed by its own callbacks and by `ask`, all on one loop. Owns the transport from `open` to `close`.

    session: what the daemon said last. renewed: called when a session or an epoch of the cache has begun, with
    `session` that of the daemon that answers now.
    """

    def __init__(self, endpoint: str, transport: ClientTransport, clock: Clock) -> None:
        self.endpoint = endpoint
        self.session = NO_SESSION
        self.renewed: Callable[[], None] = _nothing_to_renew
        self._heart = Heartbeat()
        self._transport = transport
        self._now = clock.monotonic
        self._loop: asyncio.AbstractEventLoop | None = None  # of the newest `open`,
        self._pid = 0  # and the process of it
        self._seq = 0
        self._pending: dict[int, Pending] = {}  # in the order asked
        self._unsent: deque[int] = deque()
        self._beat_timer: asyncio.TimerHandle | None = None
        self._overdue_at = math.inf
        self._waiters: dict[asyncio.Future[None], bool] = {}  # for a daemon; True: for a ready one

    # --- life ---------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Connected by this process, and not closed since; also while no daemon answers."""
        return self._heart.open and self._pid == os.getpid()

    @property
    def ready(self) -> bool:
        """A ready daemon answers."""
        return self._answered and self.session.ready

    @property
    def _answered(self) -> bool:
        return self.is_open and not self._heart.lost and self.session is not NO_SESSION

    def open(self) -> bool:
        """Connect and begin to say Hello. False: it was open already, and nothing changed.

        Raises ConfigError for an endpoint that is none, Closed in a forked child of the process that connected.
        """
        if self._heart.open:
            if self._pid == os.getpid() and not self._loop_gone:
                return False
            if self._pid != os.getpid():
                raise self.unusable()
            self.close()
        self._transport.start(self._received)
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        self.session = NO_SESSION
        self._heart.opened()
        self._overdue_at = self._now() + OVERDUE_EVERY_S
        self._greet()
        self._beat_in(FIRST_HELLO_S)
        return True

    async def wait_ready(self, timeout: float) -> None:
        """Wait until the daemon says that every rank is ready. Raises ConnectTimeout with what was missing, Closed."""
        if not self.ready:
            await self._wait(timeout, ready=True)

    async def wait_answer(self, timeout: float) -> None:
        """Wait until a daemon answers, ready or not. Raises ConnectTimeout, Closed."""
        if not self._answered:
            await self._wait(timeout, ready=False)

    async def _wait(self, timeout: float, *, ready: bool) -> None:
        future: asyncio.Future[None] = self.new_future()
        self._waiters[future] = ready
        give_up = self.now + timeout
        try:
            await asyncio.wait({future}, timeout=min(timeout, HINT_AFTER_S))
            if not future.done() and timeout > HINT_AFTER_S:
                log.warning("%s: %s (still waiting)", self.endpoint, await self._obstacle(f"within {HINT_AFTER_S:g} s"))
                left = max(give_up - self.now, 0.0)
                await asyncio.wait({future}, timeout=None if left == math.inf else left)
            if not future.done():
                raise ConnectTimeout(f"{self.endpoint}: {await self._obstacle(f'within {timeout:g} s')}")
            future.result()
        finally:
            del self._waiters[future]
            future.cancel()

    async def _obstacle(self, within: str) -> str:
        if not self._answered:
            why = await self._transport.obstacle()
            return f"nobody answers {within}" + (f": {why}" if why else "")
        missing = self.session.missing
        ranks = f"; without memory: rank {', '.join(map(str, missing))}" if missing else ""
        why = self.session.why or "it does not say why"
        return f"a daemon answers, but it did not become ready {within}: {why}{ranks}"

    def close(self) -> None:
        """Say Bye and disconnect. What is pending ends with code `closed`. Idempotent; nothing in a forked child."""
        if not self.is_open:
            return
        if self._loop_gone:  # nobody can wait on it any more, and its futures cannot be touched
            self._pending.clear()
            self._waiters.clear()
        else:
            self._leave()
        self._heart.closed()
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        error = Closed("the client was closed")
        self._fail_all(error)
        for future in self._waiters:
            if not future.done():
                future.set_exception(error)
                future.exception()  # somebody who no longer waits need not hear of it
        self._transport.close()

    def abandon(self) -> None:
        """Close from whatever thread, without waiting: for a client that nobody holds any more."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(self.close)
                return
        self.close()

    @property
    def _loop_gone(self) -> bool:
        return self._loop is None or self._loop.is_closed()

    def unusable(self) -> Closed:
        """Why nothing can be asked."""
        if self._heart.open and self._pid != os.getpid():
            what = f"was connected by process {self._pid} and cannot be used in its fork; make a new one there"
        elif self._heart.open:
            what = "was connected on an event loop that is closed; connect it again"
        else:
            what = "is closed, or was never connected"
        return Closed(f"the client of {self.endpoint} {what}")

    # --- asking -------------------------------------------------------------------------------------

    def new_future(self) -> asyncio.Future[Any]:
        """For one who waits for this daemon. Raises Closed."""
        loop = self._loop
        if loop is None or loop.is_closed() or not self.is_open:
            raise self.unusable()
        return loop.create_future()

    def ask(self, pending: Pending) -> int:
        """Send a request; `pending` ends whatever happens, at the latest soon after its deadline. Returns its seq."""
        self._seq = seq = self._seq + 1
        if self._heart.lost:
            pending.fail(DaemonLost(f"{self.endpoint}: no daemon answers"))
            return seq
        payload = self._encode(seq, pending)
        if payload is None:
            return seq
        self._pending[seq] = pending
        if self._unsent or self.session is NO_SESSION or not self._transport.send(payload):
            self._unsent.append(seq)
        return seq

    async def request(self, body: wire.Control, timeout: float) -> Any:
        """Ask, and wait for the value. Raises what the daemon refused it with, DaemonLost, Closed, or `no_answer`."""
        future = self.new_future()
        seq = self.ask(Pending(body, future, self.now + timeout))
        try:
            return await future
        finally:
            self._pending.pop(seq, None)  # its answer will be dropped

    def tell(self, body: wire.Body) -> None:
        """Send what needs no answer, if it can be sent now."""
        self._seq += 1
        self._transport.send(wire.encode_request(self._seq, body, session=self.session.session))

    def amend(self, **known: Any) -> None:
        """Change what is known of the session, where an answer says it before the next Welcome does."""
        self.session = msgspec.structs.replace(self.session, **known)

    @property
    def now(self) -> float:
        return self._now()

    def _encode(self, seq: int, pending: Pending) -> bytes | None:
        """The request as bytes; None if that cannot be, and then it has ended."""
        try:
            payload = wire.encode_request(seq, pending.body, ack=pending.ack, session=self.session.session)
        except UNSAYABLE as error:
            pending.fail(ProtocolError(f"cannot be put on the wire: {error}", code="bad_value"))
            return None
        if len(payload) > self.session.max_message:
            what = f"the request is {len(payload)} bytes on the wire, the daemon takes {self.session.max_message}"
            pending.fail(ProtocolError(what, code="too_large"))
            return None
        return payload

    def _send_waiting(self) -> None:
        while self._unsent and self.session is not NO_SESSION:
            seq = self._unsent[0]
            pending = self._pending.get(seq)
            if pending is not None:
                payload = self._encode(seq, pending)
                if payload is None:
                    del self._pending[seq]
                elif not self._transport.send(payload):
                    return
            self._unsent.popleft()

    # --- hearing ------------------------------------------------------------------------------------

    def _received(self, payload: bytes) -> None:
        try:
            reply = wire.decode_reply(payload)
        except wire.Malformed:
            return  # not from a daemon of our version; its silence will tell
        self._heart.heard()
        seq, body = reply.seq, reply.body
        if isinstance(body, wire.Result):
            self._answer(seq, body.result)
        elif isinstance(body, wire.Accepted):
            if (pending := self._pending.get(seq)) is not None:
                pending.accepted()
        elif isinstance(body, wire.Welcome):
            self._welcomed(seq, body)
            self._answer(seq, body)
        elif isinstance(body, wire.Value):
            self._answer(seq, body.value)
        else:
            self._refused(seq, body)
        if self._unsent:
            self._send_waiting()

    def _answer(self, seq: int, value: Any) -> None:
        pending = self._pending.pop(seq, None)
        if pending is not None:
            pending.answer(value)

    def _refused(self, seq: int, refused: wire.Refused) -> None:
        error = refused.error
        if error.code == wire.STALE_SESSION:
            if not self._heart.hello_under_way:  # else its answer will say more
                self._greet()
            return
        pending = self._pending.pop(seq, None)
        if pending is not None:
            default = RequestError if refused.permanent else TransferError
            pending.fail(_BY_CODE.get(error.code, default)(error.message, code=error.code))

    def _welcomed(self, seq: int, welcome: wire.Welcome) -> None:
        was_lost, before = self._heart.lost, self.session
        if not self._heart.welcomed(seq):
            return
        if was_lost:  # the beat that is due was meant for a daemon that is away
            self._beat_in(FIRST_HELLO_S)
        another = welcome.boot_id != before.boot_id
        if another and before is not NO_SESSION:
            what = f"{self.endpoint}: the daemon was restarted (boot {welcome.boot_id}, was {before.boot_id})"
            self._fail_all(DaemonLost(what), but=seq)
        self.session = welcome
        waiting, again = list(self._pending), not another and welcome.session != before.session
        if again:
            self._unsent.clear()
        if another or again or welcome.epoch != before.epoch:
            self.renewed()  # what it asks goes out first: the daemon must know it before it hears of tasks
        if again:
            self._unsent.extend(waiting)
            self._send_waiting()
        for future, ready in self._waiters.items():
            if (welcome.ready or not ready) and not future.done():
                future.set_result(None)

    # --- silence ------------------------------------------------------------------------------------

    def _greet(self) -> None:
        self._seq += 1
        self._heart.said_hello(self._seq, self._now())
        self._transport.send(wire.encode_request(self._seq, wire.Hello()))

    def _beat_in(self, delay: float) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._beat_timer = asyncio.get_running_loop().call_later(delay, self._beat)

    def _beat(self) -> None:
        now = self._now()
        became = self._heart.look(now)
        if became is Presence.DOUBTED:
            self._beat_in(DOUBT_S)
            return
        if became is Presence.LOST:
            self._leave()
            self._fail_all(DaemonLost(f"{self.endpoint}: no answer for {SILENCE_S:g} s"))
        self._greet()
        if self._unsent:
            self._send_waiting()
        if now >= self._overdue_at:
            self._overdue_at = now + OVERDUE_EVERY_S
            self._end_overdue(now)
        self._beat_in(self._heart.next_hello(now, ready=self.session.ready))

    def _leave(self) -> None:
        """Tell the daemon to take back what we still wait for."""
        if self.session is not NO_SESSION:
            self.tell(wire.Bye())

    def _fail_all(self, error: TransferError, *, but: int = 0) -> None:
        """End everything pending, except the request `but`."""
        kept = self._pending.pop(but, None)
        ended, self._pending = self._pending, {}
        self._unsent.clear()
        if kept is not None:
            self._pending[but] = kept
        for pending in ended.values():
            pending.fail(error)

    def _end_overdue(self, now: float) -> None:
        for seq, pending in [item for item in self._pending.items() if item[1].deadline < now]:
            del self._pending[seq]
            if isinstance(pending, PendingTask):
                self.tell(wire.Cancel(pending.body.task_id))
            pending.fail(TransferError("the daemon lives and did not answer", code="no_answer"))


def _nothing_to_renew() -> None:
    """Until a client has something that a new session must be told."""
