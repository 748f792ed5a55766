"""An engine process's link to the daemon: a client in its own thread, so that no thread of the engine waits for it.

The link connects and enters (`enter` registers the engine and offers its memory). It does both again after the
daemon was lost or replaced. Meanwhile every lookup misses and every task fails at once.

If the daemon falls silent, a task may still be running: a suspended daemon is not dead, and writes to the engine's
memory once it wakes up. So `submit` gives settled results only (client/settling.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.settings import engine_name
from transferd.client.client import Client
from transferd.client.identity import MISMATCH
from transferd.daemon.belonging import digest
from transferd.errors import ConnectRefused, ConnectTimeout, TransferError
from transferd.runtime.aio import run_until_stopped
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.runtime.compat import wait_for
from transferd.runtime.descriptors import new_event_loop
from transferd.tasks import (
    FAILED,
    NOT_ADMITTED,
    NOT_READY,
    ErrorInfo,
    ReadStorageTask,
    Status,
    TaskResult,
    WriteStorageTask,
)
from transferd.wire.answers import Leased, Purged

T = TypeVar("T")

CONNECT_S = 1.0  # then `_watch` logs and retries; a client that waits longer logs too, but to no logger of the engine
LOOKUP_TIMEOUT_S = 2.0  # after that the blocks count as missing: the engine computes them
ANSWER_S = 2 * LOOKUP_TIMEOUT_S  # how long another thread waits for a lookup, even if the link's thread hangs
ENTER_S = 10.0  # for a daemon to map the memory of a new engine, before anything fails
WATCH_S = 1.0  # how often the link looks for a lost daemon
PATIENCE_S = 10.0  # how often a held-back task is logged
RESET = "reset-"  # begins the unique generation after a reset of the engine's caches: no other engine shares its blocks
RESET_S = 15.0  # for the daemon and the engine's other processes to learn of a reset
UNREGISTERED = "unknown_engine"
TAKEN = ("engine_exists", "not_this_engine", "not_yours", MISMATCH)  # another engine has the name
PATIENT_LOOKS = 8  # with a refusal each, a second apart: an engine that died is gone by then
NOT_CONNECTED = "not_connected"
CLOSED = "closed"
PURGE_S = 600.0  # to remove the files of a large store
# What a wait on the link's thread raises if no answer comes in time, or the link closes. On Python 3.10 futures have
# their own TimeoutError.
UNANSWERED = (TimeoutError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError)

StorageTask = ReadStorageTask | WriteStorageTask
Enter = Callable[[Client], Awaitable[None]]


class Link:
    """Owns a thread, a client, and the companion's process.

    name: the engine's.
    enter: registers the engine and offers this process's memory; called for every new daemon, and retried until it
        succeeds. None if other processes do that.
        A label: if it stays taken by another engine (two servers of one configuration, or containers whose processes
        have the same ids), this engine gets the same name with a suffix.
    token: proves that this process belongs to the engine (`Client.token`); the same in all of its processes. "" if this
        is the only one, None if `belong` will set it.
    """

    def __init__(
        self, companion: DaemonFinder, name: str, enter: Enter | None = None, *, token: str | None = ""
    ) -> None:
        self.life = SYSTEM_CLOCK.fresh_id()
        self._began = time.monotonic()
        self._name = self._label = name
        self._refused = 0  # looks in a row at which another engine had the name
        self._token = token
        self._companion = companion
        self.program = companion.program
        self._log = companion.program.log
        self._enter = enter
        self._loop = new_event_loop("the link to a daemon")
        self._client: Client | None = None
        self._entered = ""  # boot id of the daemon that knows this engine
        self._running: set[str] = set()  # task ids
        self._not_stored: Counter[str] = Counter()  # blocks by reason, before there is a client
        self._unset = ""  # the generation that the last reset requires, until a daemon knows it
        self._renewed = ""  # the same, for as long as this link lives
        self._ready = threading.Event()
        self._logged = ""
        self._closed = False
        self._thread = threading.Thread(
            target=run_until_stopped, args=(self._loop,), name="transferd-link", daemon=True
        )
        self._thread.start()
        self._watching = self._begin(self._watch())

    @property
    def ready(self) -> bool:
        """Whether a daemon answers, and knows this engine and its memory."""
        client = self._client
        return client is not None and client.connected and client.boot_id == self._entered and not self._unset

    @property
    def name(self) -> str:
        """The engine's name in reports."""
        return self._name

    @property
    def endpoint(self) -> str:
        """Where the daemon is, or was when it last answered; "" if none ever did."""
        return "" if self._client is None else self._client.endpoint

    def belong(self, token: str) -> None:
        """Set the engine's token, which another process of the engine has made."""
        self._token = token

    def wait_ready(self, timeout: float) -> bool:
        """Wait until `ready` for the first time."""
        return self._ready.wait(timeout)

    @property
    def patience(self) -> float:
        """How many seconds to wait for a daemon that was asked only just now to map this engine's memory."""
        left = self._began + ENTER_S - time.monotonic()
        return left if left > 0 and self._companion.listening else 0.0

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether its block can be loaded. All False if the daemon does not answer in time."""
        try:
            found = self._begin(self._there(keys)).result(ANSWER_S)
        except (RuntimeError, *UNANSWERED):  # the link is closed, or closing
            found = None
        return [False] * len(keys) if found is None else found

    def ask(
        self, keys: Sequence[str], answer: Callable[[list[bool] | None], None] = lambda _: None, *, use: bool = True
    ) -> None:
        """Like `exists`, but return at once; `answer` gets the list in the link's thread, and must not raise.

        `answer` gets None if the daemon has not answered. use: counts as a use of the blocks, which then stay in the
        store longer.
        """

        async def run() -> None:
            found = None
            try:
                found = await self._there(keys, use=use)
            finally:
                answer(found)  # in any case: until then the request may not run

        self._begin(run())

    def submit(
        self,
        task: StorageTask,
        done: Callable[[TaskResult], None],
        progressed: Callable[[int], object] | None = None,
    ) -> None:
        """Start a task and return at once. `done` gets its result, in the link's thread, and must not raise.

        progressed: as in Client.submit, in the link's thread.

        It gets settled results only: then the blocks are free. If the link is closed before that is known, `done`
        is never called.
        """

        async def run() -> None:
            self._running.add(task.task_id)
            try:
                result = await self._carried_out(task, progressed)
            except TransferError as error:  # the client was closed
                result = failed(task, error.reason, str(error))
            finally:
                self._running.discard(task.task_id)
            done(result)

        try:
            self._begin(run())
        except RuntimeError:  # the link is closed
            done(failed(task, CLOSED, "the engine is shutting down"))

    def carry_out(self, task: StorageTask, progressed: Callable[[int], object] | None = None) -> TaskResult:
        """Like `submit`, but wait in the calling thread for the result.

        If the link is closed first, the result is failed and not settled. Do not call it in the link's own thread.
        """
        answer: concurrent.futures.Future[TaskResult] = concurrent.futures.Future()
        self.submit(task, answer.set_result, progressed)
        while True:
            try:
                return answer.result(WATCH_S)
            except (TimeoutError, concurrent.futures.TimeoutError):
                if not self._thread.is_alive():  # then nothing sets it any more
                    closed = failed(task, CLOSED, "the engine is shutting down")
                    return answer.result() if answer.done() else msgspec.structs.replace(closed, settled=False)

    def count_not_stored(self, reason: str, blocks: int) -> None:
        """Have the daemon's reports count blocks that were not stored, once a daemon answers."""

        async def run() -> None:
            self._not_stored[reason] += blocks
            self._pass_on_counts()

        with contextlib.suppress(RuntimeError):  # the link is closed
            self._begin(run())

    def cancel(self, task_ids: Sequence[str]) -> None:
        """Cancel tasks, and return at once; `submit` passes on their results as usual."""

        async def run() -> None:
            client = self._client
            for task_id in task_ids:
                with contextlib.suppress(TransferError):  # then the daemon is lost, and ends them
                    if client is not None:
                        await client.cancel(task_id)

        with contextlib.suppress(RuntimeError):  # the link is closed
            self._begin(run())

    def reset(self) -> bool:
        """Make all stored blocks unreachable to this engine, for good: it serves a new generation from now on.

        Cancels what runs, because a save that begins only now would put KV of the old weights under the new generation.
        Returns whether a daemon and the engine's other processes have it. If not, the link is not `ready` until then.
        """
        return self.renew(f"{RESET}{SYSTEM_CLOCK.fresh_id()}")

    def renew(self, generation: str) -> bool:
        """Serve this generation from now on, as after a reset; the same result and guarantees."""
        self._unset = self._renewed = generation
        try:
            self._begin(self._renew()).result(RESET_S)
        except (RuntimeError, TransferError, *UNANSWERED) as error:
            what = "transferd: the daemon does not know yet that this engine's cache or weights have changed: %r"
            self._log.warning(what, error)
            return False
        return True

    def purge(self, model: str, generation: str) -> Purged:
        """Have the daemon remove all objects of this model and generation that this user may remove.

        Raises TransferError.
        """
        purged = f"purged {model!r}"
        return self._answered(lambda client: client.purge(model=model, generation=generation), purged, PURGE_S)

    def remove(self, keys: Sequence[str]) -> Purged:
        """Have the daemon remove these blocks of this engine, also pinned ones. Raises TransferError."""
        return self._answered(lambda client: client.purge(keys), f"removed {len(keys)} blocks", PURGE_S)

    def stats(self) -> dict[str, Any]:
        """The daemon's report. Raises TransferError."""
        return self._answered(lambda client: client.stats(), "reported", ANSWER_S)

    def lease(self, keys: Sequence[str], ttl: float) -> concurrent.futures.Future[Leased]:
        """Like `exists`, in the link's thread, and keep what is there from being evicted for `ttl` seconds.

        Raises RuntimeError once the link is closed.
        """

        async def run() -> Leased:
            found = await self._asked(keys, lambda client: client.lease(keys, ttl, timeout=LOOKUP_TIMEOUT_S))
            return found or Leased([False] * len(keys))

        return self._begin(run())

    def unpin(self, keys: Sequence[str]) -> None:
        """End what `lease` began, and return at once. If the daemon does not answer, that ends by its time."""

        async def run() -> None:
            if self._client is not None:
                with contextlib.suppress(TransferError, TimeoutError):
                    await wait_for(self._client.unpin(keys), LOOKUP_TIMEOUT_S)

        with contextlib.suppress(RuntimeError):  # the link is closed
            self._begin(run())

    def close(self, timeout: float) -> None:
        """Disconnect from the daemon and end the thread, in about `timeout` seconds. Idempotent."""
        if not self._thread.is_alive():
            return
        try:
            self._begin(self._close()).result(timeout)
        except (TransferError, *UNANSWERED) as error:
            self._log.warning("transferd: disconnecting from the daemon failed: %r", error)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        self._companion.close(timeout)

    def _answered(self, ask: Callable[[Client], Coroutine[Any, Any, T]], what: str, timeout: float) -> T:
        """Wait in the calling thread for an answer. what: what the daemon has not done without one."""
        client = self._client
        if client is None or not self.ready:
            raise TransferError("no daemon answers", code=NOT_CONNECTED)
        try:
            return self._begin(ask(client)).result(timeout)
        except (RuntimeError, *UNANSWERED) as error:
            raise TransferError(f"the daemon has not {what}: {error!r}", code="no_answer") from error

    # --- in the link's thread -----------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    async def _watch(self) -> None:
        """Find a daemon, connect and enter; do so again after each loss."""
        while True:
            try:
                await self._look()
                self._refused = 0
            except (TransferError, OSError) as error:
                await self._rename_if_taken(error)
                if isinstance(error, TransferError) and error.reason == UNREGISTERED:
                    what = "waiting until rank 0 has registered the engine with the daemon at"
                    self._log_once(f"{what} {self.endpoint}", logging.INFO)  # no fault: this rank was quicker
                else:
                    self._log_once(f"not in use yet, {self.program.title} runs without it: {error}")
            except Exception as error:  # noqa: BLE001 - such as no more threads; only this watch connects again
                self._log_once(f"not in use yet, {self.program.title} runs without it: {error!r}")
            await asyncio.sleep(WATCH_S if self.ready or self._client else WATCH_S / 4)

    async def _look(self) -> None:
        if self._token is None:
            self._log_once("waiting until the workers have passed on the engine's token", logging.INFO)
            return
        client = self._client
        if client is None or not client.connected:
            endpoint = await asyncio.to_thread(self._companion.find)
            if self._companion.starting:
                return
            client = self._client = client or await self._connected(endpoint)
            self._pass_on_counts()
        if client.boot_id and (client.boot_id != self._entered or client.outdated or self._unset):
            boot_id = client.boot_id
            if self._enter is not None:
                await self._enter(client)
            if self._unset:
                await self._renew()
            await client.wait_ready()
            self._entered, self._logged = boot_id, ""
            self._ready.set()
            self._log.info("transferd: using the daemon at %s", client.endpoint)
        elif not client.connected:
            try:
                await client.wait_ready()
            except ConnectRefused:  # it serves another engine of this name, which has come since
                raise
            except ConnectTimeout:  # it is lost, or other ranks of the engine are
                pass

    async def _rename_if_taken(self, error: Exception) -> None:
        """Take another name if an engine that stays has this one; all processes with the token take the same."""
        reason = error.reason if isinstance(error, TransferError) else ""
        alone = self._name != self._label and reason == UNREGISTERED  # the others have got the label itself
        self._refused = self._refused + 1 if reason in TAKEN or alone else 0
        if self._refused < PATIENT_LOOKS:
            return
        suffix = f"-{digest(self._token or self.life)[:6]}"
        self._name = engine_name(self._label, suffix) if self._name == self._label else self._label
        self._refused, self._entered, client, self._client = 0, "", self._client, None
        self._unset = self._unset or self._renewed  # no daemon knows it under the new name
        self._log.warning("transferd: another engine keeps the name; this one is %r now", self._name)
        if client is not None:
            await client.close()

    async def _connected(self, endpoint: str) -> Client:
        token = self._token or ""
        client = Client(endpoint, engine=self._name, token=token, await_ready=False, connect_timeout=CONNECT_S)
        await client.connect()
        if self._closed:  # since the connecting began: nobody else would end it
            await client.close()
            raise asyncio.CancelledError  # as `_close` is about to do
        client.on_new_boot = lambda: None  # `_watch` notices, and enters again
        return client

    def _pass_on_counts(self) -> None:
        if self._client is not None:
            for reason, blocks in self._not_stored.items():
                self._client.count_not_stored(reason, blocks)
            self._not_stored.clear()

    async def _renew(self) -> None:
        """Set the generation that a reset requires. Raises TransferError, TimeoutError."""
        client, generation = self._client, self._unset
        if client is None or not client.boot_id:
            raise TransferError("no daemon answers", code=NOT_CONNECTED)
        for task_id in list(self._running):
            await client.cancel(task_id)
        await wait_for(client.set_generation(generation), RESET_S / 2)
        if self._unset == generation:
            self._unset = ""

    async def _there(self, keys: Sequence[str], *, use: bool = True) -> list[bool] | None:
        return await self._asked(keys, lambda client: client.exists(keys, use=use, timeout=LOOKUP_TIMEOUT_S))

    async def _asked(self, keys: Sequence[str], ask: Callable[[Client], Coroutine[Any, Any, T]]) -> T | None:
        """The answer to a question about these; None without one."""
        client = self._client
        if client is None or not self.ready:
            return None
        try:
            return await ask(client)
        except TransferError as error:
            self._log_once(f"looking up {len(keys)} blocks failed, so they count as missing: {error!r}")
            return None

    async def _carried_out(self, task: StorageTask, progressed: Callable[[int], object] | None) -> TaskResult:
        """Push a task and wait until its result is settled."""
        client = self._client
        if client is None or not self.ready:
            return failed(task, NOT_CONNECTED, "no daemon answers")
        complaint = asyncio.get_running_loop().create_task(self._complain(client, task.task_id))
        try:
            return await client.insist(task, settled=True, progressed=progressed)
        finally:
            complaint.cancel()

    async def _complain(self, client: Client, task_id: str) -> None:
        """Log a task that waits for a silent daemon: the engine does not show the client's own log."""
        while True:
            await asyncio.sleep(PATIENCE_S)
            if task_id in client.unsettled:
                what = "transferd: the daemon at %s may still touch the blocks of task %s, which stay locked"
                self._log.warning(what, client.endpoint, task_id)

    async def _close(self) -> None:
        self._closed = True
        self._watching.cancel()  # in a later turn of the loop
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _log_once(self, what: str, level: int = logging.WARNING) -> None:
        """Log a problem once, until it changes or is solved."""
        if what != self._logged:
            self._logged = what
            self._log.log(level, "transferd: %s", what)


class BlockTasks:
    """Tasks that store or load blocks of one engine, and which of these were moved. Thread-safe.

    what: the blocks, in messages.
    """

    def __init__(self, link: Link, what: str) -> None:
        self._link, self._what = link, what
        self._numbers = itertools.count()

    def write(self, keys: Sequence[str], blocks: Sequence[int], timeout: float) -> WriteStorageTask:
        task_id = f"store-{self._link.life}-{next(self._numbers)}"
        return WriteStorageTask(task_id=task_id, keys=list(keys), gpu_block_ids=list(blocks), timeout=timeout)

    def read(
        self, keys: Sequence[str], blocks: Sequence[int], timeout: float, *, by_parts: bool = False
    ) -> ReadStorageTask:
        return ReadStorageTask(
            task_id=f"load-{self._link.life}-{next(self._numbers)}",
            keys=list(keys),
            gpu_block_ids=list(blocks),
            timeout=timeout,
            prefix=False,
            by_parts=by_parts or msgspec.UNSET,
        )

    def moved(self, task: StorageTask, result: TaskResult) -> list[bool]:
        """For each block whether it was moved. Counts what was not stored, and logs what an operator should know."""
        moved, stores = result.mask(task), isinstance(task, WriteStorageTask)
        if not (missing := moved.count(False)):
            return moved
        if stores:
            self._link.count_not_stored(why_not_stored(result), missing)
        if result.error is not None and result.error.code != NOT_CONNECTED:  # the link logs that no daemon answers
            what, deed = "transferd: %d of %d %s were not %s: %s", "stored" if stores else "loaded"
            self._link.program.log.warning(what, missing, len(moved), self._what, deed, result.error.message)
        return moved


def failed(task: StorageTask, code: str, message: str) -> TaskResult:
    """The result of a task that was never pushed."""
    return TaskResult(task_id=task.task_id, status=Status.FAILED, error=ErrorInfo(code, message))


def why_not_stored(result: TaskResult) -> str:
    """The reason for a count, of a write that has not stored all of its blocks: one of tasks.NOT_STORED."""
    code = "" if result.error is None else result.error.code
    return {NOT_CONNECTED: NOT_READY, NOT_ADMITTED: NOT_ADMITTED}.get(code, FAILED)
