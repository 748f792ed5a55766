"""The cache queue of an engine that uses FastDeploy's plugin: one object for both ends of the queue.

FastDeploy creates a server end in its engine, for control requests, and a client end in its PrefixCacheManager. With a
daemon there is nothing between them, so both are the same object, found by its port. The queue connects to a daemon
only when FastDeploy asks for transfer processes; an engine that needs none never asks.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from transferd.adapters.fastdeploy.expected import as_expected
from transferd.adapters.fastdeploy.group import Group
from transferd.adapters.fastdeploy.items import ControlItem, Item
from transferd.adapters.fastdeploy.queue import Address, EngineCacheQueue, port_of
from transferd.client.sync_client import SyncClient
from transferd.errors import ConfigError, RequestError
from transferd.tasks import Status, TaskResult

log = logging.getLogger(__name__)

_queues: dict[int, EngineQueue] = {}  # by port; one for each engine of this process
# Set by the plugin, which knows this module.
at_each_queue: list[Callable[[], None]] = []  # called before a queue is made
original: list[Callable[..., Any]] = []  # FastDeploy's own class


class EngineQueue(EngineCacheQueue):
    """An EngineCacheQueue over a Group. Made by `queue_for`, closed by the engine."""

    def __init__(self, address: Address, num_client: int) -> None:
        super().__init__(address, num_client=num_client, is_server=True)
        port = port_of(self.address)
        if port is None:
            raise ConfigError("EngineCacheQueue", "has an address without a port", str(address))
        self.group = Group(port, self.hold, self.release)
        self._unheard: set[Any] = set()  # ids of tasks whose answers are dropped
        self._controls: queue.SimpleQueue[ControlItem | None] = queue.SimpleQueue()
        self._controller: threading.Thread | None = None
        self._routes = ThreadPoolExecutor(1, "transferd-routing")  # has no thread until it is used

    @contextlib.contextmanager
    def answer_nobody(self, transfer_id: Any) -> Iterator[None]:
        """Run a task of this id that is put within the context like any other, but do not report its end."""
        self._unheard.add(transfer_id)
        try:
            yield
        except BaseException:  # it was not put
            self._unheard.discard(transfer_id)
            raise

    def close(self) -> None:
        """Close the group as well. FastDeploy calls `cleanup` when its engine ends."""
        super().close()
        self._routes.shutdown(wait=False)
        self._controls.put(None)
        self.group.close()
        if _queues.get(self.group.port) is self:
            del _queues[self.group.port]

    def _connect(self) -> SyncClient:
        return self.group.client

    def _disconnect(self, client: SyncClient) -> None:
        """Does nothing: the group owns the client."""

    def _control(self, item: ControlItem) -> None:
        """Control requests run one after the other on a thread of their own."""
        if item.method == "pause":
            self._paused = True  # at once: no later transfer may begin
        with self._lock:
            if self._controller is None:
                # A daemon thread, because a pause that waits for a task must not keep the process from ending.
                self._controller = threading.Thread(target=self._obey_all, name="transferd-control", daemon=True)
                self._controller.start()
        self._controls.put(item)

    def _obey_all(self) -> None:
        while (item := self._controls.get()) is not None:
            try:
                self.group.control(item)
            except Exception:
                log.exception("the control request %s could not be answered", item.method)

    def _answer(self, task_id: str, item: Item, result: TaskResult) -> None:
        """With routing replay, on a thread that moves the routing first."""
        routing = self.group.routing
        if routing is None or not result.settled:
            super()._answer(task_id, item, result)
            return

        answer = super()._answer

        def move_and_answer() -> None:
            try:
                whole = routing.moved(item, result)
            except Exception:
                log.exception("the routing of transfer %s was not moved, so its blocks count as not moved", task_id)
                whole = msgspec.structs.replace(result, status=Status.FAILED, block_ids=[])
            answer(task_id, item, whole)

        self._routes.submit(move_and_answer)

    def _refusal(self) -> RequestError | None:
        if self._paused or self.group.settled:
            return super()._refusal()
        return RequestError("the daemon has not confirmed the generation of the weights", code="generation_mismatch")

    def _deliver(self, transfer_id: Any, answers: list[Any]) -> None:
        if transfer_id in self._unheard:
            self._unheard.discard(transfer_id)
        else:
            super()._deliver(transfer_id, answers)


def queue_for(
    address: Address = ("127.0.0.1", 56666),
    authkey: bytes = b"cache_queue_service",
    is_server: bool = False,
    num_client: int = 1,
    client_id: int = -1,
    local_data_parallel_size: int = 1,
    local_data_parallel_id: int = 0,  # every group has a port of its own
) -> Any:
    """The queue for FastDeploy's calls of EngineCacheQueue; FastDeploy's own class if this version is not supported.

    Raises ConfigError.
    """
    if not as_expected():
        return original[0](
            address, authkey, is_server, num_client, client_id, local_data_parallel_size, local_data_parallel_id
        )
    for prepare in at_each_queue:
        prepare()
    if not is_server and not 0 <= client_id < num_client:
        raise ConfigError("client_id", f"must be 0 to {num_client - 1}", client_id)
    known = None if is_server else _queues.get(port_of(address) or 0)
    if known is not None and known.num_client == num_client:
        return known
    made = EngineQueue(address, num_client)
    _queues[made.group.port] = made
    return made


def queue_at(port: int) -> EngineQueue | None:
    """The queue of the engine that uses this port, in this process."""
    return _queues.get(port)
