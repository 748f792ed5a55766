"""The client for engines without an event loop: the same methods, blocking, from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from transferd.client.client import Client, DeviceHandle
from transferd.client.handover import ExtraKeys, Tokens
from transferd.errors import Closed
from transferd.tasks import DEFAULT_TIMEOUT_S, Task, TaskResult

T = TypeVar("T")


class SyncClient:
    """A Client on a loop in one thread of its own. `with` waits until the daemon is ready.

    Thread-safe. Raises what Client raises; after `close`, Closed.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect_timeout: float = 10.0,
        await_ready: bool = True,
        name: str = "",
    ) -> None:
        self._client = Client(endpoint, connect_timeout=connect_timeout, await_ready=await_ready, name=name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Start the thread, connect, wait until the daemon is ready. Raises ConnectTimeout."""
        loop = asyncio.new_event_loop()
        self._loop = loop
        self._thread = threading.Thread(target=self._run, args=(loop,), name="transferd-client", daemon=True)
        self._thread.start()
        try:
            self._call(self._client.connect())
        except BaseException:  # KeyboardInterrupt too: then the thread is still connecting
            self.close()
            raise

    def close(self) -> None:
        """Disconnect and end the thread. What is pending ends with code `closed`. Idempotent."""
        with self._closing:
            loop, thread = self._loop, self._thread
            if loop is None or thread is None:
                return
            try:
                asyncio.run_coroutine_threadsafe(self._client.close(), loop).result()
            finally:
                self._loop = self._thread = None
                loop.call_soon_threadsafe(loop.stop)
                thread.join()

    @property
    def boot_id(self) -> str:
        return self._client.boot_id

    @property
    def connected(self) -> bool:
        """See Client.connected; False before `connect` and after `close`."""
        return self._loop is not None and self._client.connected

    @property
    def generation(self) -> str:
        return self._client.generation

    def submit(self, task: Task) -> TaskResult:
        return self._call(self._client.submit(task))

    def start(self, task: Task) -> concurrent.futures.Future[TaskResult]:
        """Push a task and return at once, without waiting even for its admission; busy is retried (Client.insist).

        Tasks of one thread are pushed in the order of its calls. The future is cancelled if the client is
        closed before the task was pushed. Raises Closed.
        """
        loop = self._loop
        if loop is None:
            raise Closed("the client is closed, or was never entered")
        return asyncio.run_coroutine_threadsafe(self._client.insist(task), loop)

    def push(self, task: Task) -> concurrent.futures.Future[TaskResult]:
        """Push a task; return once it is admitted or answered. The future is done already if rejected or busy."""
        outside: concurrent.futures.Future[TaskResult] = concurrent.futures.Future()
        outside.set_running_or_notify_cancel()  # it cannot be cancelled: `cancel` takes the task back

        async def push() -> None:
            inside = await self._client.push(task)
            if inside.done():  # callbacks run a turn later, and the caller may look at once
                outside.set_result(inside.result())
            else:
                inside.add_done_callback(lambda done: outside.set_result(done.result()))

        self._call(push())
        return outside

    def write_all(
        self,
        request_id: str,
        token_ids: Tokens,
        gpu_block_ids: Sequence[int],
        *,
        extra_keys: ExtraKeys | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> TaskResult:
        return self._call(
            self._client.write_all(request_id, token_ids, gpu_block_ids, extra_keys=extra_keys, timeout=timeout)
        )

    def read_all(
        self,
        request_id: str,
        token_ids: Tokens,
        gpu_block_ids: Sequence[int],
        *,
        extra_keys: ExtraKeys | None = None,
        peer: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> TaskResult:
        return self._call(
            self._client.read_all(
                request_id, token_ids, gpu_block_ids, extra_keys=extra_keys, peer=peer, timeout=timeout
            )
        )

    @property
    def pd_address(self) -> str:
        return self._client.pd_address

    def cancel(self, task_id: str) -> bool:
        return self._call(self._client.cancel(task_id))

    def match(self, keys: Sequence[str]) -> int:
        return self._call(self._client.match(keys))

    def match_tokens(self, token_ids: Tokens, start: int = 0) -> int:
        return self._call(self._client.match_tokens(token_ids, start))

    def locate(self, token_ids: Tokens) -> dict[str, dict[str, int]]:
        return self._call(self._client.locate(token_ids))

    def pause(self) -> None:
        self._call(self._client.pause())

    def resume(self) -> None:
        self._call(self._client.resume())

    def drain(self) -> None:
        self._call(self._client.drain())

    def set_generation(self, generation: str) -> None:
        self._call(self._client.set_generation(generation))

    def stats(self) -> dict[str, Any]:
        return self._call(self._client.stats())

    def explain(self, task_id: str) -> dict[str, Any]:
        return self._call(self._client.explain(task_id))

    def ping(self) -> tuple[str, float]:
        return self._call(self._client.ping())

    def attach(self, rank: int) -> dict[str, list[Any]]:
        return self._call(self._client.attach(rank))

    def device_handle(self, rank: int) -> dict[str, Any]:
        return self._call(self._client.device_handle(rank))

    def detach(self, rank: int) -> None:
        self._call(self._client.detach(rank))

    def offer(self, rank: int, handle: DeviceHandle | Mapping[str, Any]) -> None:
        self._call(self._client.offer(rank, handle))

    def clear_cache(self) -> None:
        self._call(self._client.clear_cache())

    def restore_cache(self, generation: str | None = None) -> None:
        self._call(self._client.restore_cache(generation))

    def wait_ready(self, timeout: float | None = None) -> None:
        self._call(self._client.wait_ready(timeout))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._loop
        if loop is None:
            work.close()
            raise Closed("the client is closed, or was never entered")
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupted wait is over in the other thread as well
            raise

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            # Whoever asked while we closed is told so, rather than left waiting.
            waiting = asyncio.all_tasks(loop)
            for task in waiting:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*waiting, return_exceptions=True))
        finally:
            loop.close()
