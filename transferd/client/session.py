"""A client's conversation with the daemon: heartbeats, sessions, loss, and exactly one end for each request.

Theory of operation
-------------------
Every request waits in `_pending` until exactly one of these ends it: its answer; the loss of the
daemon; its own time limit, past which a living daemon must have answered; `close`. Nothing else does.

*Loss.* Hello goes out every HEARTBEAT_S, so a daemon that lives is heard at least that often. When one
was sent SILENCE_S ago and nothing at all was heard since, the daemon is lost; so it is, at once, when
another boot_id answers. Everything pending fails, a Bye tells a daemon that was only stopped to take
our tasks back, and what is asked from then on fails right away, until a daemon answers. Silence is
believed only on a second look, DOUBT_S later: if it was our own process that stood still, the answer
is on its way through the socket's thread.

*Sessions* (see protocol.py). A Welcome of the same boot with another session number says that
something was lost on the way, or that we were given up. Then everything pending is asked again, in
the order it was asked first; tasks that the daemon knows are joined, not done twice. A Welcome older
than one already seen says nothing. Before the first one, what is asked waits: a request of no session
could be lost, or done twice by an echo, and nobody could tell.

*Congestion.* What the transport does not take waits in order in `_unsent`, and is tried again with
each message that arrives and each heartbeat.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any

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
from transferd.tasks import ErrorInfo, Status, Task, TaskResult
from transferd.wire import protocol as wire
from transferd.wire.transport import ClientTransport

HEARTBEAT_S = 1.0
SILENCE_S = 3.5  # after a Hello
DOUBT_S = 0.1
FIRST_HELLO_S = 0.002  # until somebody is ready, Hello is repeated: soon first, then ever more slowly,
SLOWEST_HELLO_S = 0.1  # down to this
LOST_HELLO_S = 5.0  # to a lost daemon: those of before wait in the socket, and reach its successor at once
OVERDUE_EVERY_S = 5.0  # how often pending requests are checked against their time limits
assert HEARTBEAT_S + SILENCE_S + DOUBT_S < 5, "we promise to notice within 5 s of a daemon's death"

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


class Pending:
    """One request that waits for its end. `future` is what the caller holds; it may cancel it at any time."""

    __slots__ = ("ack", "body", "deadline", "future")

    def __init__(self, body: wire.Body, future: asyncio.Future[Any], deadline: float, *, ack: bool = False) -> None:
        self.body = body
        self.future = future
        self.deadline = deadline
        self.ack = ack

    def accepted(self) -> None:
        """The daemon has admitted it; the answer follows."""

    def answer(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: TransferError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # somebody who no longer waits need not hear of it


class PendingTask(Pending):
    """A task always ends in a TaskResult. admitted: done when the task is admitted or has ended; None without ack."""

    __slots__ = ("admitted", "link")
    body: Task

    def __init__(self, link: Link, task: Task, deadline: float, *, ack: bool) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(task, loop.create_future(), deadline, ack=ack)
        self.link = link
        self.admitted: asyncio.Future[None] | None = loop.create_future() if ack else None

    def accepted(self) -> None:
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_result(None)

    def answer(self, value: TaskResult) -> None:
        super().answer(value)
        self.accepted()

    def fail(self, error: TransferError) -> None:
        result = TaskResult(
            task_id=self.body.task_id,
            status=Status.REJECTED if isinstance(error, RequestError) else Status.FAILED,
            error=ErrorInfo(error.reason, str(error)),
            generation=self.link.generation,
            boot_id=self.link.boot_id,
        )
        self.answer(result)


class Link:
    """Changed by its own callbacks and by `ask`, all on one loop. Owns the transport from `open` to `close`."""

    def __init__(self, endpoint: str, transport: ClientTransport, clock: Clock) -> None:
        self.endpoint = endpoint
        self.boot_id = ""
        self.generation = ""
        self.block_size = 0
        self.pd_mode = "storage"
        self.pd_address = ""
        self.ready = False  # what the daemon said last
        self.lost = False  # silent for too long, and nothing heard since
        self.epoch = 0  # of the cache, as the daemon said last
        # A session has begun; was it of another daemon, and the epoch before it.
        self.renewed: Callable[[bool, int], None] = _nothing_to_renew
        self._missing: list[int] = []  # ranks without memory,
        self._why = ""  # and why the daemon is not ready
        self._transport = transport
        self._now = clock.monotonic
        self._open = False
        self._seq = 0
        self._pending: dict[int, Pending] = {}  # in the order asked
        self._unsent: deque[int] = deque()
        self._session = wire.ANY_SESSION
        self._max_message: int | None = None
        self._welcome_seq = 0  # of the newest Welcome; one of an older Hello is old news
        self._hello_seq = 0  # of the newest Hello
        self._asked_at: float | None = None  # when the first Hello was sent since we last heard anything
        self._doubtful = False  # silent at the last look
        self._hello_delay = FIRST_HELLO_S
        self._beat_timer: asyncio.TimerHandle | None = None
        self._overdue_at = math.inf
        self._ready_future: asyncio.Future[None] | None = None
        self._answer_future: asyncio.Future[None] | None = None

    def open(self) -> None:
        """Connect and begin to say Hello. Raises ConfigError for an endpoint that is none."""
        self._transport.start(self._received)
        self._open = True
        self._overdue_at = self._now() + OVERDUE_EVERY_S
        self._greet()
        self._beat_in(FIRST_HELLO_S)

    async def wait_ready(self, timeout: float) -> None:
        """Wait until the daemon says that every rank is ready. Raises ConnectTimeout saying what was missing."""
        if self.ready and not self.lost:
            return
        if self._ready_future is None:
            self._ready_future = asyncio.get_running_loop().create_future()
        await self._wait_for(self._ready_future, timeout)

    async def wait_answer(self, timeout: float) -> None:
        """Wait until a daemon answers, ready or not. Raises ConnectTimeout."""
        if self._welcome_seq and not self.lost:
            return
        if self._answer_future is None:
            self._answer_future = asyncio.get_running_loop().create_future()
        await self._wait_for(self._answer_future, timeout)

    async def _wait_for(self, future: asyncio.Future[None], timeout: float) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(future), timeout)
        except TimeoutError:
            raise ConnectTimeout(f"{self.endpoint}: {self._obstacle(f'within {timeout:g} s')}") from None

    def _obstacle(self, within: str) -> str:
        if not self._welcome_seq or self.lost:
            return f"nobody answers {within}"
        ranks = f"; without memory: rank {', '.join(map(str, self._missing))}" if self._missing else ""
        return f"a daemon answers, but it did not become ready {within}: {self._why or 'it does not say why'}{ranks}"

    def close(self) -> None:
        """Say Bye and disconnect. What is pending ends with code `closed`. Idempotent."""
        if not self._open:
            return
        self._leave()
        self._open = False
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._fail_all(Closed("the client was closed"))
        for future in (self._ready_future, self._answer_future):
            if future is not None and not future.done():
                future.set_exception(Closed("the client was closed"))
                future.exception()  # somebody who no longer waits need not hear of it
        self._transport.close()

    # --- asking -------------------------------------------------------------------------------------

    def ask(self, pending: Pending) -> int:
        """Send a request; `pending` ends whatever happens, at the latest soon after its deadline. Returns its seq.

        Raises Closed.
        """
        if not self._open:
            raise Closed("the client is closed, or was never entered")
        self._seq = seq = self._seq + 1
        if self.lost:
            pending.fail(DaemonLost(f"{self.endpoint}: no daemon answers"))
            return seq
        payload = self._encode(seq, pending)
        if payload is None:
            return seq
        self._pending[seq] = pending
        if self._unsent or not self._welcome_seq or not self._transport.send(payload):
            self._unsent.append(seq)
        return seq

    def forget(self, seq: int) -> None:
        """Nobody waits for this any more; its answer will be dropped."""
        self._pending.pop(seq, None)

    def tell(self, body: wire.Body) -> None:
        """Send what needs no answer, if it can be sent now."""
        self._seq += 1
        self._transport.send(wire.encode_request(self._seq, body, session=self._session))

    @property
    def now(self) -> float:
        return self._now()

    def _encode(self, seq: int, pending: Pending) -> bytes | None:
        """The request as bytes; None if that cannot be, and then it has ended."""
        try:
            payload = wire.encode_request(seq, pending.body, ack=pending.ack, session=self._session)
        except UNSAYABLE as error:
            pending.fail(ProtocolError(f"cannot be put on the wire: {error}", code="bad_value"))
            return None
        if self._max_message is not None and len(payload) > self._max_message:
            what = f"the request is {len(payload)} bytes on the wire, the daemon takes {self._max_message}"
            pending.fail(ProtocolError(what, code="too_large"))
            return None
        return payload

    def _send_waiting(self) -> None:
        while self._unsent and self._welcome_seq:
            seq = self._unsent[0]
            pending = self._pending.get(seq)
            if pending is not None:
                payload = self._encode(seq, pending)
                if payload is None:
                    del self._pending[seq]
                elif not self._transport.send(payload):
                    return
            self._unsent.popleft()

    def _ask_again(self) -> None:
        self._unsent = deque(self._pending)
        self._send_waiting()

    # --- hearing ------------------------------------------------------------------------------------

    def _received(self, payload: bytes) -> None:
        try:
            reply = wire.decode_reply(payload)
        except wire.Malformed:
            return  # not from a daemon of our version; its silence will tell
        self._asked_at = None
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
            if self._hello_seq <= self._welcome_seq:  # else one is under way, and its answer will say more
                self._greet()
            return
        pending = self._pending.pop(seq, None)
        if pending is not None:
            default = RequestError if refused.permanent else TransferError
            pending.fail(_BY_CODE.get(error.code, default)(error.message, code=error.code))

    def _welcomed(self, seq: int, welcome: wire.Welcome) -> None:
        if seq <= self._welcome_seq:
            return
        self._welcome_seq = seq
        if self.lost:
            self.lost = False
            self._beat_soon()
        again = False
        another, epoch = welcome.boot_id != self.boot_id, self.epoch
        if another:
            if self.boot_id:
                what = f"{self.endpoint}: the daemon was restarted (boot {welcome.boot_id}, was {self.boot_id})"
                self._fail_all(DaemonLost(what), but=seq)
        elif welcome.session != self._session:
            again = True
        self.boot_id, self.generation, self.ready = welcome.boot_id, welcome.generation, welcome.ready
        self._session, self._max_message = welcome.session, welcome.max_message
        self.block_size, self.pd_mode, self.pd_address = welcome.block_size, welcome.pd_mode, welcome.pd_address
        self.epoch, self._missing, self._why = welcome.epoch, welcome.missing, welcome.why
        if again:
            self._ask_again()
        if again or another:
            self.renewed(another, epoch)
        if welcome.ready and self._ready_future is not None:
            _fulfil(self._ready_future)
            self._ready_future = None
        if self._answer_future is not None:
            _fulfil(self._answer_future)
            self._answer_future = None

    # --- silence ------------------------------------------------------------------------------------

    def _greet(self) -> None:
        self._seq += 1
        self._hello_seq = self._seq
        if self._asked_at is None:
            self._asked_at = self._now()
        self._transport.send(wire.encode_request(self._seq, wire.Hello()))

    def _beat_in(self, delay: float) -> None:
        self._beat_timer = asyncio.get_running_loop().call_later(delay, self._beat)

    def _beat(self) -> None:
        now = self._now()
        # A timer may be early by the resolution of its clock.
        silent = self._asked_at is not None and now - self._asked_at >= SILENCE_S - 0.001
        if silent and not self.lost:
            if not self._doubtful:
                self._doubtful = True
                self._beat_in(DOUBT_S)
                return
            self._lose(f"{self.endpoint}: no answer for {SILENCE_S:g} s")
        self._doubtful = False
        self._greet()
        if self._unsent:
            self._send_waiting()
        if now >= self._overdue_at:
            self._overdue_at = now + OVERDUE_EVERY_S
            self._end_overdue(now)
        self._beat_in(self._next_beat(now))

    def _beat_soon(self) -> None:
        """Back to the usual rhythm: the beat that was due next was meant for a daemon that is away."""
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._beat_in(FIRST_HELLO_S)

    def _next_beat(self, now: float) -> float:
        """Seconds until the next Hello is due, or silence would be loss."""
        if self.lost:
            return LOST_HELLO_S
        if not self.ready:
            self._hello_delay = min(2 * self._hello_delay, SLOWEST_HELLO_S)
            return self._hello_delay
        self._hello_delay = FIRST_HELLO_S
        asked_at = now if self._asked_at is None else self._asked_at
        return min(HEARTBEAT_S, max(asked_at + SILENCE_S - now, 0.0))

    def _lose(self, what: str) -> None:
        self.lost = True
        self.ready = False
        self._leave()
        self._fail_all(DaemonLost(what))

    def _leave(self) -> None:
        """Tell the daemon to take back what we still wait for."""
        if self._open and self._welcome_seq:
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


def _fulfil(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _nothing_to_renew(another: bool, epoch: int) -> None:
    """Until a client has something that a new session must be told."""
