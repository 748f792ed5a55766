"""The engine's side of the wire: push tasks, get exactly one result for each, whatever happens.

A client says Hello about once a second; the answers tell it that the daemon lives and which boot it
is. When the daemon has been silent for SILENCE_S while something is pending, or another boot_id
answers, everything pending ends as `failed` with code `daemon_lost`. The socket reconnects by itself,
and the client goes on with the new daemon.

`daemon_lost` means *unknown*: the daemon may have been stopped rather than killed. The blocks of such
a task are surely yours again once `boot_id` has changed.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from transferd import protocol as wire
from transferd.clock import SYSTEM_CLOCK, Clock
from transferd.config import DEFAULT_ENDPOINT
from transferd.errors import Closed, ConnectTimeout, DaemonLost, RequestError, TierError, TransferError
from transferd.tasks import ErrorInfo, Status, Task, TaskResult
from transferd.transport import ClientTransport, ZmqClientTransport

HEARTBEAT_S = 1.0
SILENCE_S = 4.0  # with pending requests, silence of this long is loss
NO_ANSWER_S = 30.0  # past a task's own timeout, a future ends whatever the daemon does

_BY_CODE: dict[str, type[TransferError]] = {TierError.code: TierError, RequestError.code: RequestError}


def default_endpoint() -> str:
    """TRANSFERD_ENDPOINT, else the packaged daemon's socket."""
    return os.environ.get("TRANSFERD_ENDPOINT") or DEFAULT_ENDPOINT


class _Pending:
    """A request that waits: for its reply, and for a task first for Accepted."""

    __slots__ = ("accepted", "future", "task_id")

    def __init__(self, future: asyncio.Future[Any], task_id: str | None, accepted: asyncio.Future[None] | None) -> None:
        self.future = future
        self.task_id = task_id
        self.accepted = accepted


class Client:
    """An asyncio client of one daemon. `async with` waits until the daemon is ready.

    endpoint: default_endpoint() if None. connect_timeout: seconds to wait for a ready daemon.
    Not thread-safe: use it on the loop that entered it (SyncClient for threads).
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect_timeout: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
        transport: ClientTransport | None = None,
    ) -> None:
        self.endpoint = endpoint or default_endpoint()
        self.boot_id = ""
        self.generation = ""
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._transport = transport
        self._pending: dict[int, _Pending] = {}
        self._seq = 0
        self._welcome: wire.Welcome | None = None
        self._heard_at = -math.inf
        self._heartbeat: asyncio.TimerHandle | None = None
        self._ready: asyncio.Future[None] | None = None
        self._open = False

    # --- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect and wait until the daemon is ready. Raises ConnectTimeout, ConfigError."""
        self._begin()
        try:
            await self.wait_ready(self._connect_timeout)
        except BaseException:
            await self.close()
            raise

    def _begin(self) -> None:
        transport = self._transport or ZmqClientTransport(self.endpoint)
        transport.start(self._received)
        self._transport = transport
        self._open = True
        self._beat()

    async def wait_ready(self, timeout: float) -> None:
        """Wait until the daemon says that every rank is ready. Raises ConnectTimeout saying what was missing."""
        if self._welcome is not None and self._welcome.ready:
            return
        if self._ready is None or self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout)
        except TimeoutError:
            what = "it is not ready" if self._welcome is not None else "nobody answers"
            raise ConnectTimeout(f"{self.endpoint}: {what} after {timeout:g} s") from None

    async def close(self) -> None:
        """Say Bye and disconnect. What is pending ends with code `closed`. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        assert self._transport is not None
        self._transport.send(wire.encode_request(0, wire.Bye()))
        self._lose(Closed("the client was closed"))
        self._transport.close()

    # --- tasks --------------------------------------------------------------------------------------

    async def submit(self, task: Task) -> TaskResult:
        """Push a task and wait for its result. Cancelling the wait does not cancel the task (see `cancel`)."""
        future, _ = self._push(task, ack=False)
        return await future

    async def push(self, task: Task) -> asyncio.Future[TaskResult]:
        """Push a task; return once it is admitted or answered. The future is done already if it was
        rejected, or not admitted because the daemon is busy."""
        future, accepted = self._push(task, ack=True)
        assert accepted is not None
        await accepted
        return future

    def _push(self, task: Task, *, ack: bool) -> tuple[asyncio.Future[TaskResult], asyncio.Future[None] | None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TaskResult] = loop.create_future()
        accepted: asyncio.Future[None] | None = loop.create_future() if ack else None
        seq = self._expect(_Pending(future, task.task_id, accepted))
        try:
            payload = wire.encode_request(seq, task, ack=ack)
        except BaseException:
            self._pending.pop(seq)
            raise
        if self._welcome is not None and len(payload) > self._welcome.max_message:
            what = f"the task is {len(payload)} bytes on the wire, the daemon takes {self._welcome.max_message}"
            self._settle(seq, self._local(task.task_id, Status.REJECTED, "too_large", what))
        elif not self._transport_or_closed().send(payload):
            self._settle(seq, self._local(task.task_id, Status.BUSY, "send_queue_full", "the socket takes no more"))
        elif math.isfinite(task.timeout):
            # The daemon answers by the deadline plus its slack; this only fires if it lives and never does.
            limit = loop.call_later(max(task.timeout, 0) + NO_ANSWER_S, self._never_answered, seq)
            future.add_done_callback(lambda _: limit.cancel())
        return future, accepted

    async def cancel(self, task_id: str) -> bool:
        """Take a task back. Its future ends as `cancelled`, or as it ended before.

        False: there was nothing to take back.
        """
        return bool(await self._ask(wire.Cancel(task_id)))

    # --- control ------------------------------------------------------------------------------------

    async def match(self, keys: Sequence[str]) -> int:
        """How many leading blocks every rank can load."""
        return int(await self._ask(wire.Match(list(keys))))

    async def pause(self) -> None:
        """Start no more tasks; returns once no block is being touched. Tasks are still admitted and wait."""
        await self._ask(wire.Pause())

    async def resume(self) -> None:
        """Undo pause or drain."""
        await self._ask(wire.Resume())

    async def drain(self) -> None:
        """Admit no more tasks; returns once every admitted one is answered. `resume` admits again."""
        await self._ask(wire.Drain())

    async def set_generation(self, generation: str) -> None:
        """Name objects of this weight version from now on; every older one is out of reach."""
        await self._ask(wire.SetGeneration(generation))
        self.generation = generation

    async def stats(self) -> dict[str, Any]:
        """The daemon's report, the same as `transferd stats --format json`."""
        report: dict[str, Any] = await self._ask(wire.Stats())
        return report

    async def ping(self) -> tuple[str, float]:
        """(boot_id, round trip in seconds)."""
        before = self._clock.monotonic()
        welcome: wire.Welcome = await self._ask(wire.Hello())
        return welcome.boot_id, self._clock.monotonic() - before

    async def attach(self, rank: int) -> dict[str, list[Any]]:
        """Map a rank's device cache: {plane: [one array per layer]}, zero-copy; the daemon owns the memory.

        Raises RequestError for a rank that is not there, TierError where the memory cannot be shared.
        """
        from transferd.tiers.segment import attach_arrays

        handle: dict[str, Any] = await self._ask(wire.Attach(rank))
        if handle["kind"] != "shm":
            raise TierError(f"device memory of kind {handle['kind']!r} is attached through its adapter")
        return attach_arrays(handle["data"])

    async def _ask(self, body: wire.Control) -> Any:
        """Send a control request and wait for its answer. Raises what the daemon refused it with, DaemonLost."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        seq = self._expect(_Pending(future, None, None))
        try:
            if not self._transport_or_closed().send(wire.encode_request(seq, body)):
                raise DaemonLost("the socket takes no more")
            return await future
        finally:
            self._pending.pop(seq, None)

    # --- receiving ----------------------------------------------------------------------------------

    def _received(self, payload: bytes) -> None:
        try:
            reply = wire.decode_reply(payload)
        except wire.Malformed:
            return  # not from a daemon of our version; silence will tell
        self._heard_at = self._clock.monotonic()
        body = reply.body
        if type(body) is wire.Result:
            self._settle(reply.seq, body.result)
            return
        if type(body) is wire.Welcome:
            self._welcomed(body)
        pending = self._pending.get(reply.seq)
        if pending is None:
            return
        if type(body) is wire.Accepted:
            if pending.accepted is not None and not pending.accepted.done():
                pending.accepted.set_result(None)
        elif type(body) is wire.Refused:
            self._settle_refused(reply.seq, pending, body.error)
        elif type(body) is wire.Value:
            self._settle(reply.seq, body.value)
        else:
            self._settle(reply.seq, body)

    def _welcomed(self, welcome: wire.Welcome) -> None:
        if self.boot_id and welcome.boot_id != self.boot_id:
            self._lose(DaemonLost(f"the daemon was restarted: boot {welcome.boot_id}, was {self.boot_id}"))
        self._welcome = welcome
        self.boot_id = welcome.boot_id
        self.generation = welcome.generation
        if welcome.ready and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    # --- pending requests ---------------------------------------------------------------------------

    def _transport_or_closed(self) -> ClientTransport:
        if not self._open or self._transport is None:
            raise Closed("the client is closed, or was never entered")
        return self._transport

    def _expect(self, pending: _Pending) -> int:
        if not self._open:
            raise Closed("the client is closed, or was never entered")
        if not self._pending:
            self._heard_at = max(self._heard_at, self._clock.monotonic())  # silence counts from here
        self._seq += 1
        self._pending[self._seq] = pending
        return self._seq

    def _settle(self, seq: int, value: Any) -> None:
        pending = self._pending.pop(seq, None)
        if pending is None:
            return
        if not pending.future.done():
            pending.future.set_result(value)
        if pending.accepted is not None and not pending.accepted.done():
            pending.accepted.set_result(None)

    def _settle_refused(self, seq: int, pending: _Pending, error: ErrorInfo) -> None:
        if pending.task_id is not None:
            self._settle(seq, self._local(pending.task_id, Status.REJECTED, error.code, error.message))
        elif not pending.future.done():
            kind = _BY_CODE.get(error.code, TransferError)
            pending.future.set_exception(kind(error.message, code=error.code))

    def _lose(self, error: TransferError) -> None:
        """End everything pending: tasks with a result, control requests with the error."""
        for seq, pending in list(self._pending.items()):
            if pending.task_id is not None:
                self._settle(seq, self._local(pending.task_id, Status.FAILED, error.reason, str(error)))
            elif not pending.future.done():
                pending.future.set_exception(error)
                pending.future.exception()  # a waiter that was cancelled meanwhile does not make noise

    def _never_answered(self, seq: int) -> None:
        pending = self._pending.get(seq)
        if pending is not None and pending.task_id is not None:
            what = "the daemon lives but did not answer this task long after its deadline"
            self._settle(seq, self._local(pending.task_id, Status.FAILED, "no_answer", what))

    def _local(self, task_id: str, status: Status, code: str, message: str) -> TaskResult:
        """A result that the daemon did not give."""
        retry_after = HEARTBEAT_S if status is Status.BUSY else None
        error = ErrorInfo(code, message)
        return TaskResult(task_id=task_id, status=status, error=error, retry_after=retry_after, boot_id=self.boot_id)

    # --- heartbeat ----------------------------------------------------------------------------------

    def _beat(self) -> None:
        assert self._transport is not None
        now = self._clock.monotonic()
        if self._pending and now - self._heard_at > SILENCE_S:
            self._lose(DaemonLost(f"{self.endpoint}: no answer for {SILENCE_S:g} s"))
        self._transport.send(wire.encode_request(0, wire.Hello()))
        waiting = self._ready is not None and not self._ready.done()
        delay = HEARTBEAT_S / 10 if waiting or self._welcome is None else HEARTBEAT_S
        self._heartbeat = asyncio.get_running_loop().call_later(delay, self._beat)
