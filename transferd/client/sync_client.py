"""The client for engines without an event loop: the same methods, but blocking and thread-safe."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from transferd.client.blocking import (
    BlockingCache,
    BlockingClient,
    BlockingControl,
    BlockingReports,
    BlockingStore,
)
from transferd.client.calls import CallGroup
from transferd.client.client import Client
from transferd.client.store import QUESTION_TIMEOUT_S
from transferd.errors import NoThreads, RequestError
from transferd.runtime.aio import run_until_stopped
from transferd.runtime.compat import Self
from transferd.runtime.descriptors import new_event_loop
from transferd.tasks import Task, TaskResult
from transferd.wire.transport import keep

T = TypeVar("T")
log = logging.getLogger(__name__)
MOST_BEGINNING = 256  # calls of all threads that the client's thread has not begun; a further one waits its turn
LOOK_S = 0.5  # how often such a wait looks whether the client was closed
ENDING_S = 1.0  # how long `close` waits for calls that it ended to return
IN_A_CALLBACK = "a callback runs on the client's own thread and cannot wait for it; call from another thread"


class SyncClient(BlockingClient):
    """A Client on an event loop in its own thread. `with` waits until the daemon is ready.

    Thread-safe. Callbacks of its futures run on that thread and may not call the client. Raises what Client raises,
    and Closed after `close`, while it closes, and in a forked child. If it is dropped without `close`, it warns and
    its thread ends.
    """

    store, cache = CallGroup(BlockingStore), CallGroup(BlockingCache)
    control, reports = CallGroup(BlockingControl), CallGroup(BlockingReports)
    _loop: asyncio.AbstractEventLoop | None = None  # None: closed, or __init__ raised

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect_timeout: float = 10.0,
        await_ready: bool = True,
        name: str = "",
        engine: str = "",
        token: str = "",
        generation: str | None = None,
    ) -> None:
        self._client = Client(
            endpoint,
            connect_timeout=connect_timeout,
            await_ready=await_ready,
            name=name,
            engine=engine,
            token=token,
            generation=generation,
        )
        self._on_new_boot: Callable[[], object] | None = None
        self._thread: threading.Thread | None = None
        self._forked = False  # this process is a child of the one that has connected
        self._given = weakref.WeakSet[concurrent.futures.Future[Any]]()  # futures that callers hold
        self._beginning: deque[_ThreadCall[Any]] = deque()  # calls that the thread has not begun
        self._new_locks()
        _made.add(self)

    def _new_locks(self) -> None:
        self._life = threading.RLock()  # held to connect or close
        self._entry = threading.RLock()  # `close` ends every call that began under this lock

    def forked(self) -> None:
        """Called in a forked child, where another thread may have held the locks and no thread ends a future."""
        self._forked = self._loop is not None
        self._new_locks()
        for future in list(self._given):
            future._condition = threading.Condition()  # noqa: SLF001 - the old one may be held for ever
            future._done_callbacks.clear()  # type: ignore[attr-defined] # noqa: SLF001 - for the client's thread only
            if not future.done():
                future.set_exception(self._client.unusable())

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Start the thread, connect and wait until the daemon is ready. See Client.connect. Raises ConnectTimeout."""
        if self._forked:
            raise self._client.unusable()
        with self._life:
            started = self._loop is None
            if started:
                self._start()
        try:
            self._call(self._client.connect())
        except BaseException:  # after a KeyboardInterrupt the thread is still connecting
            if started:
                self.close()
            raise

    def _start(self) -> None:
        loop = new_event_loop("a blocking client")
        running = loop, ENDING_S
        thread = threading.Thread(target=run_until_stopped, args=running, name="transferd-client", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            loop.close()
            raise NoThreads(f"a blocking client needs a thread: {error}") from error
        with self._entry:
            self._beginning = deque()  # a loop that was closed has not begun all
            self._loop, self._thread = loop, thread

    def close(self) -> None:
        """Disconnect and end the thread. Pending requests end with code `closed`. Idempotent.

        Does nothing in a forked child: thread and connection are the parent's.
        """
        if self._forked:
            return
        if threading.current_thread() is self._thread:
            raise RequestError(IN_A_CALLBACK, code="wrong_thread")
        with self._life:
            with self._entry:
                loop, thread = self._loop, self._thread
                self._loop = self._thread = None
            if loop is None or thread is None:
                return
            try:
                asyncio.run_coroutine_threadsafe(self._client.close(), loop).result()
            finally:
                loop.call_soon_threadsafe(loop.stop)
                thread.join()

    def __del__(self) -> None:
        loop = self._loop
        if loop is None:
            return
        if self._forked:
            keep(self._client, loop, self._thread)
            return
        try:
            self._client.dropped()
        finally:
            with contextlib.suppress(RuntimeError):  # at interpreter exit the loop may be gone first
                loop.call_soon_threadsafe(loop.stop)

    @property
    def endpoint(self) -> str:
        """Where the daemon is."""
        return self._client.endpoint

    @property
    def on_new_boot(self) -> Callable[[], object] | None:
        """Like Client.on_new_boot, but called in a separate thread, so that it may call this client."""
        return self._on_new_boot

    @on_new_boot.setter
    def on_new_boot(self, hear: Callable[[], object] | None) -> None:
        self._on_new_boot = hear
        self._client.on_new_boot = None if hear is None else functools.partial(_in_a_thread, hear)

    def start(
        self,
        task: Task,
        *,
        settled: bool = False,
        settle_timeout: float | None = None,
        progressed: Callable[[int], object] | None = None,
        retry: bool = True,
    ) -> concurrent.futures.Future[TaskResult]:
        """Push a task and return at once, without waiting for its admission. Retries while busy (Client.insist).

        retry: if False, a busy daemon's refusal is the result: no later task can then overtake this one.
        settled, settle_timeout, progressed: see Client.submit; `progressed` runs on the client's thread. Tasks from one
        thread are pushed in the order of its calls.
        Cancelling the future cancels the task and does not wait: call `settled` for that. Raises Closed.
        """
        push = self._client.insist if retry else self._client.submit
        return self._begin(push(task, settled=settled, settle_timeout=settle_timeout, progressed=progressed))

    def push(self, task: Task) -> concurrent.futures.Future[TaskResult]:
        """Push a task; return once it is admitted or answered. The future is already done if rejected or busy."""
        outside: concurrent.futures.Future[TaskResult] = concurrent.futures.Future()
        self._given.add(outside)
        outside.set_running_or_notify_cancel()  # cancelling the future has no effect: use `cancel`

        async def push() -> None:
            inside = await self._client.push(task)
            if inside.done():  # its callback would run one turn later, but the caller may look at once
                outside.set_result(inside.result())
            else:
                inside.add_done_callback(lambda done: outside.set_result(done.result()))

        self._call(push())
        return outside

    def start_match(self, keys: Sequence[str], *, timeout: float = QUESTION_TIMEOUT_S) -> Future[int]:
        """Ask like `match`, and return at once. Cancelling the future gives the question up. Raises Closed."""
        return self._begin(self._client.match(keys, timeout=timeout))

    def start_exists(
        self, keys: Sequence[str], *, use: bool = True, timeout: float = QUESTION_TIMEOUT_S
    ) -> Future[list[bool]]:
        """Ask like `exists`, and return at once. Cancelling the future gives the question up. Raises Closed."""
        return self._begin(self._client.exists(keys, use=use, timeout=timeout))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            work.close()
            raise RequestError(IN_A_CALLBACK, code="wrong_thread")
        future = self._begin(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise self._client.unusable() from None
        except BaseException:
            future.cancel()  # after an interrupt, end the wait in the other thread as well
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if not self._forked:
            if len(self._beginning) >= MOST_BEGINNING:
                self._wait_turn()
            with self._entry:
                if self._loop is not None:
                    call = _ThreadCall(work, self._loop)
                    self._given.add(call)
                    self._beginning.append(call)
                    self._loop.call_soon_threadsafe(call.begin, self._beginning)
                    return call
        work.close()
        raise self._client.unusable()

    def _wait_turn(self) -> None:
        """Wait until the client's thread has begun the earlier calls; a callback may not wait.

        Without a bound, threads that never wait could keep the loop from hearing the daemon.
        """
        while len(self._beginning) >= MOST_BEGINNING and threading.current_thread() is not self._thread:
            begun = threading.Event()
            with self._entry:
                if self._loop is None:
                    return
                self._loop.call_soon_threadsafe(begun.set)
            begun.wait(LOOK_S)


class _ThreadCall(Future[T]):
    """What other threads see of a call that the client's thread runs. Cancelling it cancels the call."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._work = work
        self._loop = loop

    def begin(self, beginning: deque[_ThreadCall[Any]]) -> None:
        beginning.popleft()  # which is this one
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            answer = await self._work
        except asyncio.CancelledError:
            super().cancel()
            self.set_running_or_notify_cancel()
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            if self.set_running_or_notify_cancel():
                self.set_exception(error)
        else:
            if self.set_running_or_notify_cancel():
                self.set_result(answer)

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            with contextlib.suppress(RuntimeError):  # the client was closed meanwhile
                self._loop.call_soon_threadsafe(lambda: self._loop.call_soon(self._task.cancel))  # it has begun then
        return cancelled


_made: weakref.WeakSet[SyncClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_made):
        client.forked()


os.register_at_fork(after_in_child=_after_fork)


def _in_a_thread(hear: Callable[[], object]) -> None:
    def call() -> None:
        try:
            hear()
        except Exception:
            log.exception("on_new_boot failed")

    threading.Thread(target=call, name="transferd-new-boot", daemon=True).start()
