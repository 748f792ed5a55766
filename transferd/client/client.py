"""The engine's side of the wire: push tasks and get exactly one result for each, whatever happens.

When the daemon has been silent for about 4 s, or another boot_id answers, every pending task ends as `failed` with code
`daemon_lost`. The client reconnects by itself and goes on with the new daemon (session.py). `daemon_lost` means
*unknown*: a suspended daemon writes to the task's blocks when it wakes up. So the result has `settled == False`, and
the blocks are yours again once `settled` says so (settling.py). After the loss of a daemon, `reattach` (docs/adr/0022).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import warnings
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from transferd.client import handover
from transferd.client.busy_retry import BusyRetry
from transferd.client.cache import CacheCalls
from transferd.client.calls import CONTROL_TIMEOUT_S, CallGroup
from transferd.client.engines import UNREGISTERED, ControlCalls, Registration
from transferd.client.offers import QUIET_TIMEOUT_S, Attachments, Holds, Offers
from transferd.client.pending import PendingTask, TaskFuture, after_waiting, keys_list, seconds_of, seconds_to_wait
from transferd.client.reports import ReportCalls
from transferd.client.session import Conversation
from transferd.client.store import QUESTION_TIMEOUT_S, StoreCalls
from transferd.client.weights import Weights
from transferd.config import names, personal
from transferd.errors import Closed, TransferError
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import Self, convert
from transferd.tasks import DEFAULT_TIMEOUT_S, ErrorInfo, Task, TaskResult
from transferd.wire import protocol as wire
from transferd.wire.answers import Leased
from transferd.wire.transport import ClientTransport, ZmqClientTransport

log = logging.getLogger("transferd.client")

NO_ANSWER_S = 30.0  # added to a task's own timeout; without a bug, the daemon answers by then
CANCEL_SETTLE_S = 5.0  # how long a cancelled call waits for a task whose daemon is lost


def default_endpoint() -> str:
    """The value of TRANSFERD_ENDPOINT, else the socket of the packaged daemon or, without one, of this user's own."""
    return os.environ.get("TRANSFERD_ENDPOINT") or personal.endpoint(os.environ)


class Client(StoreCalls, CacheCalls, ControlCalls, ReportCalls):
    """An asyncio client of one daemon. `async with` waits until the daemon is ready.

    endpoint: default_endpoint() if None.
    connect_timeout: seconds to wait for a ready daemon.
    await_ready: pass False if your own offers make the daemon ready, or to restore a cleared cache. `async with` then
        waits only for an answer; call `wait_ready` later.
    transport: replaces the default ZeroMQ socket, for example to use CURVE keys. The client closes it.
    name: identifies this client in reports, for example as the holder of a pause. Default: the process id.
    engine: the name of the engine that this client speaks for (`register`). "" is the engine of the daemon's [cache].
    token: what `register` returned to the process that registered the engine; it proves that this client belongs to it.
        Without it, the daemon refuses everything but control (`not_this_engine`).
    generation: the weights that the engine of [cache] serves, if the daemon's configuration does not name them. By
        default the client learns the generation from the daemon, and asserts it to a restarted one: that one adopts it,
        or refuses this client (`generation_mismatch`) until somebody sets the generation.

    Not thread-safe: use it on the event loop that entered it (use SyncClient from threads). You may enter it again
    after `close` or a failed connect. A client dropped without `close` warns (ResourceWarning) and closes. In a forked
    child every call raises Closed.

    Control requests raise the daemon's error, DaemonLost when it is gone, or TransferError `no_answer` when it is late.
    """

    store, cache = CallGroup(StoreCalls), CallGroup(CacheCalls)
    control, reports = CallGroup(ControlCalls), CallGroup(ReportCalls)
    _dropped = True  # stays True if __init__ raises

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect_timeout: float = 10.0,
        await_ready: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        transport: ClientTransport | None = None,
        name: str = "",
        engine: str = "",
        token: str = "",
        generation: str | None = None,
    ) -> None:
        self.endpoint = endpoint or default_endpoint()
        names.NAMED_ENGINE.check("engine", engine)
        names.TOKEN.check("token", token, secret=True)
        names.GENERATION.check("generation", generation or "")
        self._connect_timeout = seconds_to_wait("connect_timeout", connect_timeout)
        self._await_ready = await_ready
        self._clock = clock
        transport = transport or ZmqClientTransport(self.endpoint)
        self._conversation = Conversation(self.endpoint, transport, clock, engine, token)
        self._conversation.weights = Weights(generation)
        self._registration = Registration(self._conversation, clock.fresh_id)
        renewed = weakref.WeakMethod(self._renewed)  # the loop holds the conversation; it must not hold us as well
        self._conversation.renewed = lambda: (call := renewed()) and call()
        self._life = "", 0, 0  # boot_id, session and epoch of the newest Welcome
        self._known_end: tuple[str, ErrorInfo | None] = "", None  # of the engine, by another client
        self._dropped = False
        self._offers = Offers(self._conversation)
        self._attached = Attachments(self._conversation)
        self._holds = Holds(name, clock.fresh_id, self._conversation.request)
        self._busy = BusyRetry(self._conversation)

    @property
    def on_new_boot(self) -> Callable[[], object] | None:
        """Called on the client's loop, without arguments, when the contents of all blocks are lost.

        Either another daemon answers, or another client has cleared the cache: forget all blocks and `reattach`. It
        may be a coroutine function. Without one, the client logs a warning.
        """
        return self._conversation.on_new_boot

    @on_new_boot.setter
    def on_new_boot(self, hear: Callable[[], object] | None) -> None:
        self._conversation.on_new_boot = hear

    @property
    def boot_id(self) -> str:
        """The boot id of the daemon that answered last. Every daemon start has a new one."""
        return self._conversation.session.boot_id

    @property
    def generation(self) -> str:
        """The generation that the daemon reported last."""
        return self._conversation.session.generation

    @property
    def identity(self) -> wire.Identity | None:
        """Which engine the daemon serves to this client: model, layout, place. None: there is none now.

        Once the client has used the engine, it refuses the calls that another one would spoil (`identity_mismatch`).
        """
        return self._conversation.session.identity

    def used(self, identity: wire.Identity | None) -> None:
        self._conversation.served.use(identity)  # refuses the service of any other from now on

    @property
    def connected(self) -> bool:
        """Whether a ready daemon answers. A task pushed while this is False may fail at once."""
        return self._conversation.ready

    # --- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        self.dropped()

    def dropped(self, _warn: Callable[..., None] = warnings.warn) -> None:
        """Warn and close a client that was garbage-collected while open. Runs in any thread."""
        if self._dropped or not self._conversation.is_open:
            return
        self._dropped = True
        try:
            what = f"unclosed client of {self.endpoint}: call close(), or use a with statement"
            _warn(what, ResourceWarning, source=self)
        finally:
            self._conversation.abandon()

    def unusable(self) -> Closed:
        return self._conversation.unusable()

    async def connect(self) -> None:
        """Connect and wait until the daemon is ready (or, without await_ready, answers).

        You may call it again after it failed, or after `close`: the client starts afresh, with nothing offered. It
        renews its attachments if their memory still exists; if not, it calls `on_new_boot`. On a connected client
        `connect` only waits. Raises ConnectTimeout, ConfigError.
        """
        opened = self._conversation.open()
        try:
            await self._conversation.wait(self._connect_timeout, ready=self._await_ready)
        except BaseException:
            if opened:
                await self.close()
            raise

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until a ready daemon answers. Call it also after the daemon was lost or the cache was cleared.

        timeout: seconds; connect_timeout if None. Raises ConnectTimeout, which names the ranks without memory.
        """
        seconds = self._connect_timeout if timeout is None else seconds_to_wait("timeout", timeout)
        await self._conversation.wait(seconds, ready=True)

    async def close(self) -> None:
        """Say Bye and disconnect. Pending requests end with code `closed`. Idempotent; a no-op in a forked child.

        The daemon drops all offers and attachments when it reads the Bye; another client's request may come first.
        """
        if not self._conversation.is_open:
            return
        self._conversation.close()  # first, as it is refused on another loop
        self._busy.close()
        self._offers.clear()
        self._holds.clear()
        self._registration.clear()

    # --- tasks --------------------------------------------------------------------------------------

    async def submit(
        self,
        task: Task,
        *,
        settled: bool = False,
        settle_timeout: float | None = None,
        progressed: Callable[[int], object] | None = None,
    ) -> TaskResult:
        """Push a task and wait for its result.

        settled: return only once the result is settled, which may take until the daemon wakes up or ends.
        settle_timeout: wait at most so many seconds for that, without limit if None; then the result is `failed`, code
            `unsettled`, and its blocks are not yours.
        progressed: for a ReadStorageTask with `by_parts`: called with the number of leading layers that every rank has
            loaded of all its blocks. It must not raise, and may never be called.

        Cancelling this call cancels the task and waits until it is settled. If the daemon is lost meanwhile, it waits
        for at most CANCEL_SETTLE_S: see `unsettled`.
        """
        limit = None if settle_timeout is None else seconds_to_wait("settle_timeout", settle_timeout)
        pending = self._pushed(task, ack=False, progressed=progressed)
        try:
            result: TaskResult = await pending.future
            if settled and not result.settled:
                result = after_waiting(result, self.endpoint, limit, await self.settled(result.task_id, limit))
        except asyncio.CancelledError:
            await self._given_up(pending)
            raise
        return result

    async def insist(
        self,
        task: Task,
        *,
        settled: bool = False,
        settle_timeout: float | None = None,
        progressed: Callable[[int], object] | None = None,
    ) -> TaskResult:
        """Like `submit`, but retry while the daemon is busy, for as long as the task's timeout allows.

        The task's timeout covers all retries: each one gets the time that is left.
        """
        submit = functools.partial(self.submit, settled=settled, settle_timeout=settle_timeout, progressed=progressed)
        return await self.retried(submit, task)

    def retried(self, submit: Callable[[Task], Awaitable[TaskResult]], task: Task) -> Awaitable[TaskResult]:
        """Call `submit` until its result is not busy. `cancel` and `close` end the pauses between."""
        return self._busy.submit(submit, task, self._clock.monotonic() + seconds_of(task))

    async def settled(self, task_id: str, timeout: float | None = None) -> bool:
        """Wait until no byte of the task's device and host blocks is read or written for it any more.

        The wait ends when the daemon confirms it, when that daemon has ended, or when another daemon answers. Returns
        False after `timeout` seconds (None: no limit). Returns True at once for a task that this client has not pushed.
        Raises Closed in a forked child.
        """
        limit = math.inf if timeout is None else seconds_to_wait("timeout", timeout)
        self._conversation.check_process()
        give_up = self._clock.monotonic() + limit
        for pending in list(self._conversation.pushes.get(task_id, ())):
            left = give_up - self._clock.monotonic()
            await asyncio.wait({pending.ended()}, timeout=None if left == math.inf else left)
            if pending.result is None:
                return False
        return await self._conversation.settling.settled(task_id, give_up - self._clock.monotonic())

    @property
    def unsettled(self) -> list[str]:
        """Ids of ended tasks that may still use their blocks. See `settled`."""
        return self._conversation.settling.task_ids

    async def _given_up(self, pending: PendingTask) -> None:
        """The caller was cancelled: cancel the task, and wait until it is settled."""
        twice = pending.result is None and isinstance(pending.future, TaskFuture) and pending.future.withdrawn
        if not twice:
            with contextlib.suppress(TransferError):  # the client was closed meanwhile
                await self.withdraw(pending.body.task_id)

    async def withdraw(self, task_id: str) -> None:
        """Cancel a task and wait until it is settled; if the daemon is lost, for at most CANCEL_SETTLE_S."""
        for pending in list(self._conversation.pushes.get(task_id, ())):
            self._conversation.cancel_soon(task_id)
            await pending.ended()  # in time, whatever happens
        limit = CANCEL_SETTLE_S if self._conversation.is_open else 0.0
        if not await self._conversation.settling.settled(task_id, limit):
            self._conversation.settling.unknown(task_id)

    async def push(self, task: Task) -> asyncio.Future[TaskResult]:
        """Push a task; return once the daemon has admitted or answered it.

        The future is already done if the task was rejected or the daemon is busy.
        """
        pending = self._pushed(task, ack=True)
        assert pending.admitted is not None
        try:
            await pending.admitted
        except asyncio.CancelledError:
            await self._given_up(pending)
            raise
        return pending.future

    def _pushed(self, task: Task, *, ack: bool, progressed: Callable[[int], object] | None = None) -> PendingTask:
        deadline = self._clock.monotonic() + seconds_of(task) + NO_ANSWER_S
        pending = PendingTask(task, self._conversation, deadline, ack=ack, on_progress=progressed)
        self._conversation.uses()
        if self._attached.orphaned and len(task.gpu_block_ids) and not self._conversation.served.differs:
            self._conversation.turn_away(pending, self._attached.refusal())
        else:
            self._conversation.ask(pending)
        return pending

    async def cancel(self, task_id: str) -> bool:
        """Cancel a task; return False if there was none. It ends as `cancelled`, or with the result it already has."""
        if self._busy.cancel(task_id):
            return True
        insisted = task_id in self._busy  # if its push comes back busy, it ends as cancelled
        return bool(await self._ask(wire.Cancel(task_id))) or insisted

    # --- prefill → decode ---------------------------------------------------------------------------

    def count_not_stored(self, reason: str, blocks: int) -> None:
        """Have the daemon's reports count blocks that the engine did not store. reason: one of tasks.NOT_STORED.

        Call it on the client's loop. The next heartbeat that a daemon answers carries the count. Raises RequestError.
        """
        self._conversation.counts.not_stored(reason, blocks)

    async def write_all(
        self,
        request_id: str,
        token_ids: handover.Tokens,
        gpu_block_ids: Sequence[int] = (),
        *,
        cpu_block_ids: Sequence[int] | None = None,
        extra_keys: handover.ExtraKeys | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        settled: bool = False,
        task_id: str | None = None,
    ) -> TaskResult:
        """Prefill side: hand over the KV of a whole sequence. Returns once decode can read every block.

        token_ids: the sequence from its first token.
        gpu_block_ids: its blocks; the last one may be incomplete: block ceil(tokens / block_size) - 1 is handed over in
            full, including whatever follows the last token.
        cpu_block_ids: host blocks, instead of gpu_block_ids.
        extra_keys: see `transferd.blocks.keys.block_keys`; both sides must pass the same.
        settled: see `submit`.
        task_id: for `cancel` and `settled`; a new one if None.

        Send the first token only after this returns. Raises HandoverFailed unless all blocks were handed over,
        RequestError for bad input. If the `result` of that error is not settled, use the blocks only after
        `settled(error.result.task_id)`. Cancelling this call cancels the task, as for `submit`.
        """
        attempt, size = task_id or f"{request_id}/{self._clock.fresh_id()}", self._block_size
        planned = handover.Handover(
            request_id, attempt, token_ids, gpu_block_ids, cpu_block_ids, size, extra_keys, timeout
        )
        task = planned.out(self._conversation.session.pd_mode)
        return handover.whole(await self.submit(task, settled=settled), len(planned.keys))

    async def read_all(
        self,
        request_id: str,
        token_ids: handover.Tokens,
        gpu_block_ids: Sequence[int] = (),
        *,
        cpu_block_ids: Sequence[int] | None = None,
        extra_keys: handover.ExtraKeys | None = None,
        peer: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        settled: bool = False,
        task_id: str | None = None,
    ) -> TaskResult:
        """Decode side: load the KV of a whole sequence into `gpu_block_ids`, or fail. Extra block ids are ignored.

        cpu_block_ids: load into host blocks instead, before there are device blocks for the sequence; a SwapInTask
            brings them up later.
        peer: `pd_address` of the prefill engine's daemon. Required in direct mode, ignored in storage mode.
        task_id: for `cancel` and `settled`; a new one if None.

        Raises HandoverFailed, which an engine answers with its `http_status` (502) and its message; the contents of
        the blocks are then undefined. Raises RequestError for bad input. If the `result` of that error is not settled,
        the daemon may still write to the blocks: use them only after `settled(error.result.task_id)`, or pass
        `settled` (see `submit`). Cancelling this call cancels the task, as for `submit`.
        """
        attempt, size = task_id or f"{request_id}/{self._clock.fresh_id()}", self._block_size
        planned = handover.Handover(
            request_id, attempt, token_ids, gpu_block_ids, cpu_block_ids, size, extra_keys, timeout
        )
        task = planned.into(self._conversation.session.pd_mode, peer)
        return handover.whole(await self.submit(task, settled=settled), len(planned.keys))

    @property
    def pd_address(self) -> str:
        """Where other daemons reach this one in direct mode; the decode engine passes it as `peer`. "" otherwise."""
        return self._conversation.session.pd_address

    @property
    def _block_size(self) -> int:
        session = self._conversation.session
        if not session.block_size:  # no Welcome yet, or the daemon does not have our engine now
            what = f"{self.endpoint}: {session.why or 'no daemon has answered yet'}; wait_ready() first"
            raise TransferError(what, code="not_ready")
        return session.block_size

    async def lease(self, keys: Sequence[str], ttl: float, *, timeout: float = QUESTION_TIMEOUT_S) -> Leased:
        """Like `exists`, and keep the blocks that are there from being evicted for `ttl` seconds, or until `unpin`.

        Also says where they lie, so that this process may read their files meanwhile: to a client of the daemon's user,
        of an engine of one rank. Such pins end with the daemon. An engine that may pin no more is told all the same.
        """
        answer = await self._answer(wire.Exists(keys_list(keys), lease=ttl), timeout)
        return convert(answer, Leased) if isinstance(answer, dict) else Leased(answer)  # a list: of an earlier release

    async def ping(self) -> tuple[str, float]:
        """Return (boot_id, round trip in seconds)."""
        before = self._conversation.now
        welcome: wire.Welcome = await self._ask(self._conversation.hello())
        return welcome.boot_id, self._conversation.now - before

    def _renewed(self) -> None:
        """After a Welcome: repeat what this daemon does not know yet, and notify the engine of lost contents."""
        now, before = self._conversation.session, self._life
        if now.ended is not None and now.ended.code == UNREGISTERED and not now.epoch:
            self._unregistered(now)
        self._life = life = now.boot_id, now.session, now.epoch
        again = self._registration.again() + self._conversation.weights.again(now, self._conversation.now)
        there = bool(now.epoch) or not self._conversation.engine  # else there is no engine of ours
        if there and not self._conversation.served.differs:
            again += self._attached.again() if life != before else []
            again += self._offers.again()
        requests = [(body, CONTROL_TIMEOUT_S) for body in again]
        if life != before and there:
            requests += [(body, QUIET_TIMEOUT_S) for body in self._holds.again()]
        self._conversation.repeat(requests, anew=life != before)
        if there:
            self._attached.renewed()

    def _unregistered(self, now: wire.Welcome) -> None:
        self._registration.clear()
        self._offers.clear()
        known, self._known_end = self._known_end, (now.boot_id, now.ended)
        if known != self._known_end:
            self._attached.engine_ended()

    async def _ask(self, body: wire.ControlRequest, timeout: float = CONTROL_TIMEOUT_S) -> Any:
        return await self._conversation.request(body, timeout)
