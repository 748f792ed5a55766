"""The engine's side of the wire: push tasks, get exactly one result for each, whatever happens.

When the daemon has been silent for about 4 s, or another boot_id answers, everything pending ends as
`failed` with code `daemon_lost`. The client reconnects by itself and goes on with the new daemon; how
it does all that is in session.py.

`daemon_lost` means *unknown*: the daemon may have been stopped rather than killed. The blocks of such
a task are surely yours again once `boot_id` has changed.

After a restart or a clear, arrays from `attach` show memory that the daemon does not move, and tasks that name
device blocks are `rejected`, code `not_attached`, until `reattach` (docs/adr/0022).
"""

from __future__ import annotations

import asyncio
import math
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from transferd.client import handover
from transferd.client.attachments import Attachments, arrays
from transferd.client.busy_retry import BusyRetry
from transferd.client.holds import QUIET_TIMEOUT_S, Holds
from transferd.client.offers import DeviceHandle, Offers
from transferd.client.pending import Pending, PendingTask
from transferd.client.seconds import as_seconds, seconds_to_wait
from transferd.client.session import Link
from transferd.config import DEFAULT_ENDPOINT
from transferd.errors import Closed
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.tasks import DEFAULT_TIMEOUT_S, Task, TaskResult, TokenIds
from transferd.wire import protocol as wire
from transferd.wire.transport import ClientTransport, ZmqClientTransport

NO_ANSWER_S = 30.0  # past a task's own timeout; the daemon answers by then unless it has a bug
CONTROL_TIMEOUT_S = 30.0  # for an answer that waits for nothing but the daemon
RESTORE_TIMEOUT_S = 600.0  # for memory to be made: pinning hundreds of GiB takes minutes


def default_endpoint() -> str:
    """TRANSFERD_ENDPOINT, else the packaged daemon's socket."""
    return os.environ.get("TRANSFERD_ENDPOINT") or DEFAULT_ENDPOINT


class Client:
    """An asyncio client of one daemon. `async with` waits until the daemon is ready.

    endpoint: default_endpoint() if None. connect_timeout: seconds to wait for a ready daemon.
    await_ready: False for an engine whose offers make the daemon ready, and for whoever restores a cleared
    cache: `async with` then waits for a daemon that answers, and `wait_ready` for the rest.
    transport: in place of a ZeroMQ socket, or one with CURVE keys; closed with the client.
    name: what reports call it, such as who has paused the daemon; this process's id if empty.
    Not thread-safe: use it on the loop that entered it (SyncClient for threads). It may be entered again after it was
    closed or failed to connect. Dropped without `close`, it warns (ResourceWarning) and closes. In a forked child
    every call raises Closed: make a new client there.

    Control requests raise what the daemon refused them with, DaemonLost when it is gone, and
    TransferError with code `no_answer` when it lives and does not answer for long.
    """

    _dropped = True  # also where __init__ raised

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect_timeout: float = 10.0,
        await_ready: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        transport: ClientTransport | None = None,
        name: str = "",
    ) -> None:
        self.endpoint = endpoint or default_endpoint()
        self._connect_timeout = seconds_to_wait("connect_timeout", connect_timeout)
        self._await_ready = await_ready
        self._clock = clock
        self._link = Link(self.endpoint, transport or ZmqClientTransport(self.endpoint), clock)
        renewed = weakref.WeakMethod(self._renewed)  # the loop holds the link; it must not hold us as well
        self._link.renewed = lambda: (tell := renewed()) and tell()
        self._known = "", 0, 0  # boot_id, session and epoch that were renewed last
        self._dropped = False
        self._offers = Offers(self._link.request, CONTROL_TIMEOUT_S)
        self._attached = Attachments(self._link)
        self._holds = Holds(name, clock.fresh_id(), self._link.request)
        self._busy = BusyRetry(self._link)

    @property
    def on_new_boot(self) -> Callable[[], object] | None:
        """Called without arguments, on the client's loop, when another daemon answers or somebody else has cleared
        the cache: forget all blocks, and `reattach`. May be a coroutine function. None: a warning is logged."""
        return self._attached.on_new_boot

    @on_new_boot.setter
    def on_new_boot(self, hear: Callable[[], object] | None) -> None:
        self._attached.on_new_boot = hear

    @property
    def outdated(self) -> list[int]:
        """Ranks that were attached here and whose memory is gone: `reattach`, or `attach` them one by one."""
        return list(self._attached.outdated)

    @property
    def boot_id(self) -> str:
        """Of the daemon that answered last; it changes at each daemon start."""
        return self._link.session.boot_id

    @property
    def generation(self) -> str:
        """The generation that the daemon named last."""
        return self._link.session.generation

    @property
    def connected(self) -> bool:
        """A ready daemon answers. What is pushed while this is False may fail at once."""
        return self._link.ready

    # --- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        self.dropped()

    def dropped(self, _warn: Callable[..., None] = warnings.warn) -> None:
        """Warn and close, for a client that nobody holds any more. Called in any thread, as the collector pleases."""
        if self._dropped or not self._link.is_open:
            return
        self._dropped = True
        try:
            what = f"unclosed client of {self.endpoint}: close it, or use it in a with statement"
            _warn(what, ResourceWarning, source=self)
        finally:
            self._link.abandon()

    def unusable(self) -> Closed:
        """The error that a call raises while this is not connected, or was connected by another process."""
        return self._link.unusable()

    async def connect(self) -> None:
        """Connect and wait until the daemon is ready (or, without await_ready, answers).

        A client that failed here, or was closed, may connect again; it begins anew, with nothing offered. What
        it had attached counts as attached again if it is still there; if not, `on_new_boot` hears of it. On a connected
        client this only waits. Raises ConnectTimeout, ConfigError.
        """
        opened = self._link.open()
        try:
            if self._await_ready:
                await self.wait_ready()
            else:
                await self._link.wait_answer(self._connect_timeout)
        except BaseException:
            if opened:
                await self.close()
            raise

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until a ready daemon answers, also after one was lost or the cache was cleared.

        timeout: seconds; connect_timeout if None. Raises ConnectTimeout that names the ranks without memory.
        """
        await self._link.wait_ready(self._connect_timeout if timeout is None else seconds_to_wait("timeout", timeout))

    async def close(self) -> None:
        """Say Bye and disconnect. What is pending ends with code `closed`. Idempotent.

        What was offered is let go of, and nothing counts as attached. In a forked child this does nothing.
        """
        if not self._link.is_open:
            return
        self._busy.close()
        self._offers.clear()
        self._holds.clear()
        self._link.close()

    # --- tasks --------------------------------------------------------------------------------------

    async def submit(self, task: Task) -> TaskResult:
        """Push a task and wait for its result. Cancelling the wait does not cancel the task (see `cancel`)."""
        result: TaskResult = await self._pushed(task, ack=False).future
        return result

    async def insist(self, task: Task) -> TaskResult:
        """Like submit, but pushes again while the daemon is busy, for as long as the task's timeout allows.

        The timeout covers the waiting, too: a later push has what is left of it.
        """
        return await self._busy.submit(self.submit, task, self._limit(task) - NO_ANSWER_S)

    async def push(self, task: Task) -> asyncio.Future[TaskResult]:
        """Push a task; return once it is admitted or answered.

        The future is done already if the task was rejected, or not admitted because the daemon is busy.
        """
        pending = self._pushed(task, ack=True)
        assert pending.admitted is not None
        await pending.admitted
        return pending.future

    def _pushed(self, task: Task, *, ack: bool) -> PendingTask:
        pending = PendingTask(self._link, task, self._limit(task), ack=ack)
        if self._attached.orphaned and len(task.gpu_block_ids):
            pending.fail(self._attached.refusal())
        else:
            self._link.ask(pending)
        return pending

    def _limit(self, task: Task) -> float:
        timeout = as_seconds(task.timeout) or 0.0  # what is no finite number the daemon rejects
        return self._link.now + (max(timeout, 0.0) if math.isfinite(timeout) else 0.0) + NO_ANSWER_S

    async def cancel(self, task_id: str) -> bool:
        """Take a task back. Its future ends as `cancelled`, or as it ended before.

        False: there was nothing to take back.
        """
        return self._busy.cancel(task_id) or bool(await self._ask(wire.Cancel(task_id)))

    # --- prefill → decode ---------------------------------------------------------------------------

    async def write_all(
        self,
        request_id: str,
        token_ids: handover.Tokens,
        gpu_block_ids: Sequence[int],
        *,
        extra_keys: handover.ExtraKeys | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> TaskResult:
        """Prefill: hand over the KV of a whole sequence; return when every block of it is where decode can have it.

        token_ids: the sequence from its first token. gpu_block_ids: its blocks, the last one incomplete or not;
        block ceil(tokens / block_size) - 1 is handed over whole, whatever it holds behind the last token.
        extra_keys: see `transferd.blocks.keys.block_keys`; both sides must give the same.

        Send the first token only after this. Raises HandoverFailed for anything less than all blocks,
        RequestError for bad input.
        """
        planned = self._plan(request_id, token_ids, gpu_block_ids, extra_keys, timeout)
        return handover.whole(await self.submit(planned.out(self._link.session.pd_mode)), len(planned.keys))

    async def read_all(
        self,
        request_id: str,
        token_ids: handover.Tokens,
        gpu_block_ids: Sequence[int],
        *,
        extra_keys: handover.ExtraKeys | None = None,
        peer: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> TaskResult:
        """Decode: get the KV of a whole sequence into `gpu_block_ids`, which may be more than it needs; or nothing.

        peer: `pd_address` of the prefill engine's daemon; needed in direct mode, not looked at in storage mode.

        Raises HandoverFailed, which an engine answers with its `http_status` 502 and its text; the blocks then
        hold anything. RequestError for bad input.
        """
        planned = self._plan(request_id, token_ids, gpu_block_ids, extra_keys, timeout)
        return handover.whole(await self.submit(planned.into(self._link.session.pd_mode, peer)), len(planned.keys))

    @property
    def pd_address(self) -> str:
        """Where other daemons reach this one in direct mode: what the decode engine names as `peer`. "" otherwise."""
        return self._link.session.pd_address

    def _plan(
        self,
        request_id: str,
        token_ids: handover.Tokens,
        gpu_block_ids: Sequence[int],
        extra_keys: handover.ExtraKeys | None,
        timeout: float,
    ) -> handover.Handover:
        return handover.plan_handover(
            request_id,
            self._clock.fresh_id(),
            token_ids,
            gpu_block_ids,
            block_size=self._link.session.block_size,
            extra_keys=extra_keys,
            timeout=timeout,
        )

    # --- control ------------------------------------------------------------------------------------

    async def match(self, keys: Sequence[str]) -> int:
        """How many leading blocks every rank can load."""
        return int(await self._ask(wire.Match(list(keys))))

    async def match_tokens(self, token_ids: handover.Tokens, start: int = 0) -> int:
        """The same where storage is token-indexed: how many blocks of this path, from block `start` on.

        token_ids: the path from its first token; an incomplete last block does not count.
        """
        return int(await self._ask(wire.Match(token_ids=TokenIds(token_ids), start=start)))

    async def locate(self, token_ids: handover.Tokens) -> dict[str, dict[str, int]]:
        """Where the blocks of this path are, as far as the open token index knows.

        {node: {"GPU": leading blocks, "CPU": …, "STORAGE": …, "any": in any of them}}; nodes without the
        first block, and media without it, are left out.
        """
        where: dict[str, dict[str, int]] = await self._ask(wire.Locate(TokenIds(token_ids)))
        return where

    async def pause(self) -> None:
        """Start no more tasks; returns once no block is being touched. Tasks are still admitted and wait.

        The pause is this client's: it ends with `resume`, with `close`, and when the client dies. It survives a
        broken connection and a restart of the daemon. Cancelling the wait does not end it.
        """
        await self._holds.pause()

    async def resume(self) -> None:
        """End this client's pause and drain. A client that holds neither ends everybody's: the operator's override."""
        await self._holds.resume(CONTROL_TIMEOUT_S)

    async def drain(self) -> None:
        """Admit no more tasks; returns once every admitted one is answered. Ends as a pause does."""
        await self._holds.drain()

    async def set_generation(self, generation: str) -> None:
        """Name objects of this weight version from now on; every older one is out of reach."""
        await self._ask(wire.SetGeneration(generation))
        self._link.amend(generation=generation)

    async def stats(self) -> dict[str, Any]:
        """The daemon's report, the same as `transferd stats --format json`."""
        report: dict[str, Any] = await self._ask(wire.Stats())
        return report

    async def explain(self, task_id: str) -> dict[str, Any]:
        """The life of a task, from the daemon's flight recorder (transferd/observability/story.py says what is in it).

        Raises RequestError, code `unknown_task`, for one that was not pushed, or too long ago.
        """
        story: dict[str, Any] = await self._ask(wire.Explain(task_id))
        return story

    async def ping(self) -> tuple[str, float]:
        """(boot_id, round trip in seconds)."""
        before = self._link.now
        welcome: wire.Welcome = await self._ask(wire.Hello())
        return welcome.boot_id, self._link.now - before

    # --- the cache's memory -------------------------------------------------------------------------

    async def attach(self, rank: int) -> dict[str, list[Any]]:
        """Map a rank's device cache: {plane: [one array per layer]}, zero-copy; whoever made the memory owns it.

        numpy arrays of shared memory. Stay connected while you use them: tasks are taken only while every rank is
        attached. After a clear or a restart they still show the bytes of before, which nobody else sees: `reattach`.
        On a GPU, arrays with `__cuda_array_interface__` and DLPack; drop them and `detach` before a clear.
        Raises RequestError, and TierError where the memory cannot be shared.
        """
        return arrays(await self.device_handle(rank))

    async def reattach(self, timeout: float | None = None) -> dict[int, dict[str, list[Any]]]:
        """After a restart or a clear: {rank: what `attach` returns} for every rank that this client had attached.
        Waits until the daemon is ready. All blocks are empty. Raises ConnectTimeout, and what `attach` raises.
        """
        await self.wait_ready(timeout)
        return {rank: await self.attach(rank) for rank in self._attached.attached}

    async def device_handle(self, rank: int) -> dict[str, Any]:
        """What `attach` maps, {kind, data, …}; the daemon counts it as mapped until `detach`."""
        handle: dict[str, Any] = await self._ask(wire.Attach(rank))
        self._attached.attach(rank, handle)
        return handle

    async def detach(self, rank: int) -> None:
        """Say that a rank's memory is not mapped here any more; unmap it first. A clear may have to wait for it."""
        await self._ask(wire.Detach(rank))
        self._attached.detach(rank)

    async def offer(
        self,
        rank: int,
        handle: DeviceHandle | Mapping[str, Any],
        *,
        caches: Mapping[str, Sequence[Any]] | None = None,
        block: int | None = None,
    ) -> None:
        """Hand a rank's memory to a daemon that does not create it; returns once it has been mapped.

        handle: a DeviceHandle, or {kind, data}. The memory stays yours: keep it until the daemon or this client
        has gone, or the cache was cleared. To a daemon that was restarted it is offered again by itself.

        caches: your own view of that memory, {plane: [one array per layer]}; numpy arrays, or `rows(…)` of
        tiers.cuda.rows or adapters.paddle. With it the daemon checks before it serves that the handle leads to the
        same bytes: `block` (1 by default) of every array holds a random pattern until the daemon has looked, and its
        former bytes again before the offer counts. Use that block for nothing until this returns.

        Raises RequestError (`layout_mismatch`, `canary_mismatch`, `already_attached`, `not_attachable`,
        `stale_offer`, …), TierError.
        """
        await self._offers.make(rank, handle, self._link.session.epoch, caches, block)

    async def clear_cache(self) -> None:
        """Free all device and host memory of the cache, once every admitted task is answered.

        From the call on, tasks are `rejected`, code `cleared`, until `restore_cache`. Memory that this client
        has offered is let go of. Raises RequestError with code `still_mapped`, and then nothing has changed,
        where clients must detach first (memory of a GPU).
        """
        await self._change_cache(wire.ClearCache(), QUIET_TIMEOUT_S)

    async def restore_cache(self, generation: str | None = None, *, same_weights: bool = False) -> None:
        """Make the memory of a cleared cache anew, zeroed, and serve `generation`, which was never cleared before.

        generation: None for what the daemon's storage.version_file says now; without such a file, for the one that
        `set_generation` has set since the clear. same_weights: the engine slept and serves the weights of before, so
        the generation may be the one that the clear closed, and blocks stored under it are good.
        A daemon that does not create memory waits for new offers then. Raises RequestError (`not_cleared`,
        `closed_generation`), TierError when there is no room; the cache stays cleared then.
        """
        await self._change_cache(wire.RestoreCache(generation, same_weights), RESTORE_TIMEOUT_S)
        if generation is None:
            await self.ping()  # the Welcome names it
        else:
            self._link.amend(generation=generation)

    async def _change_cache(self, body: wire.ClearCache | wire.RestoreCache, timeout: float) -> None:
        self._attached.changing += 1
        try:
            epoch = int(await self._ask(body, timeout))
        finally:
            self._attached.changing -= 1
        self._link.amend(epoch=epoch)
        self._offers.keep(epoch)
        self._attached.epoch_began(epoch)

    def _renewed(self) -> None:
        """A session or an epoch has begun: tell the daemon what it must know of before, and the engine what is new."""
        now, (boot_id, number, epoch) = self._link.session, self._known
        self._known = now.boot_id, now.session, now.epoch
        again = self._attached.again()
        if (boot_id, number) != (now.boot_id, now.session):  # an offer that a clear has ended is not made again
            again += self._offers.again(now.epoch if boot_id == now.boot_id else epoch, now.epoch)
            again += self._holds.again()
        for body in again:
            limit = QUIET_TIMEOUT_S if isinstance(body, wire.Pause | wire.Drain) else CONTROL_TIMEOUT_S
            self._link.ask(Pending(body, self._link.new_future(), self._link.now + limit))
        self._attached.renewed()

    async def _ask(self, body: wire.Control, timeout: float = CONTROL_TIMEOUT_S) -> Any:
        return await self._link.request(body, timeout)
