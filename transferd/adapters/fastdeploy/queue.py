"""EngineCacheQueue as FastDeploy constructs and calls it, with a transferd daemon behind it.

    PrefixCacheManager ── put_transfer_task ──▶ items ▶ SyncClient ─ ZMQ ─▶ daemon ▶ every rank
                       ◀─ get_transfer_done_signal ── answers ◀── one TaskResult ◀──┘

FastDeploy's queue is a server process, a hand-off bitmask, thirteen barriers and one process for each rank.
The daemon replaces all of it, so this module only translates: an item becomes a task, and its result
becomes as many answers as the caller counts. Four promises hold whatever happens:

* `put_transfer_task` never waits: not for a rank, not for the daemon, not while the daemon is busy.
* Every accepted item is answered exactly once (a storage task: once for each rank), in time: its timeout and the
  daemon's `deadline_slack`. If the daemon is lost or a copy hangs, it is answered once it is *settled*: FastDeploy
  uses the blocks of an answered item for others, and the daemon might still write to them (docs/adr/0069).
* When a pause has completed, nothing moves and no late answer arrives: earlier items were answered before, and
  items put during the pause are refused at once. FastDeploy resets its tree while paused.
* An answer never names a block that some rank did not move. A failure is answered with empty lists,
  because FastDeploy's shapes have no other way to express it; `transfer_result` has the details.

An unknown item raises at once, because it has no id under which we could answer it.

Task ids. FastDeploy uses one id (its request's) for the read and the write of a request, and again when a
preempted request comes back. The daemon joins pushes of one id, so each put gets an id of its own:
`fd/<process>/<number>/<kind>/<FastDeploy's id>`.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import queue
import re
import socket
import threading
from collections import OrderedDict
from typing import Any

import msgspec

from transferd.adapters.fastdeploy.companion import filled_in
from transferd.adapters.fastdeploy.items import Answer, ControlItem, Item, read_item
from transferd.client.client import default_endpoint
from transferd.client.sync_client import SyncClient
from transferd.errors import Closed, ConfigError, ConnectTimeout, RequestError, TransferError
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.tasks import DEFAULT_TIMEOUT_S, NOT_ADMITTED, ErrorInfo, Status, TaskResult

log = logging.getLogger(__name__)

Address = str | tuple[str, int]

CONNECT_TIMEOUT_S = 15.0  # as long as FastDeploy's client tries
RESULTS_KEPT = 1024
CLOSE_TIMEOUT_S = 5.0  # for a daemon to end what is cancelled when the queue is closed
SETTLE_VARIABLE = "TRANSFERD_SETTLE_TIMEOUT"
TAKEN_TIMEOUT_S = 2.0  # for an engine to take a waiting answer; it polls every millisecond
SOCKET_NAME = re.compile(r"fd_task_queue_(\d+)\.sock$")  # FastDeploy's own address if it uses a socket in /dev/shm
_ID_CHARACTERS = 128  # of FastDeploy's id in ours, for people to read


class NotConnected(ConnectTimeout, ConnectionError):
    """Raised when no ready daemon answers. Also a ConnectionError, as FastDeploy's own client raises."""


class EngineCacheQueue:
    """The engine's end of the cache queue. Thread-safe.

    address: the daemon's endpoint (`ipc://…`, `tcp://…`). FastDeploy's own addresses, (host, port) or a
        socket's path, name a server that no longer exists; then TRANSFERD_ENDPOINT names the daemon, and the
        packaged endpoint is the default. In that variable `{dp}` stands for
        local_data_parallel_id and `{port}` for the address's port: one daemon serves one tensor-parallel group.
    authkey: not used; the socket's permissions decide who may connect.
    is_server: True connects at the first put instead of now.
    num_client: tensor-parallel size; must be the daemon's number of ranks.
    client_id: checked as FastDeploy checks it.
    local_data_parallel_size, local_data_parallel_id: see address.
    swap_timeout: seconds for a swap, which has none in FastDeploy.
    connect_timeout: seconds to wait for a ready daemon.
    settle_timeout: seconds after the loss of a daemon within which an item must be settled. After that it is never
        answered: its blocks stay locked, `transfer_result` has the code `unsettled`, and a pause fails. None takes
        TRANSFERD_SETTLE_TIMEOUT; without that variable, the queue waits for as long as it takes.

    After a restart of the daemon, or a clear, an engine that attached memory through `client` calls
    `client.reattach()`, uses the new arrays and forgets what its blocks held. Transfers are refused until then.

    Control requests (pause, sleep …) need the plugin, whose queue serves them (engine_queue.py).

    Raises NotConnected; ConfigError for a client_id or num_client that does not fit.
    """

    def __init__(
        self,
        address: Address = ("127.0.0.1", 56666),
        authkey: bytes = b"cache_queue_service",
        is_server: bool = False,
        num_client: int = 1,
        client_id: int = -1,
        local_data_parallel_size: int = 1,
        local_data_parallel_id: int = 0,
        *,
        swap_timeout: float = DEFAULT_TIMEOUT_S,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        settle_timeout: float | None = None,
    ) -> None:
        if not is_server and not 0 <= client_id < num_client:
            raise ConfigError("client_id", f"must be 0 to {num_client - 1}", client_id)
        self.authkey = authkey
        self.is_server = is_server
        self.num_client = num_client
        self.client_id = client_id
        self.local_data_parallel_size = local_data_parallel_size
        self.local_data_parallel_id = local_data_parallel_id
        self.swap_timeout = swap_timeout
        self.settle_timeout = _settle_timeout() if settle_timeout is None else settle_timeout
        self._connect_timeout = connect_timeout
        self._port_keeper: socket.socket | None = None
        self.address = self._with_port(address) if is_server else address
        self.endpoint = endpoint_of(self.address, local_data_parallel_id)
        self._run = SYSTEM_CLOCK.fresh_id()[:12]
        self._numbers = itertools.count()
        self._done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._taken = threading.Event()  # set when the engine asks for more answers: it has handled all earlier ones
        self._taken.set()
        self._paused = False
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)  # notified at every answer
        self._unanswered: dict[str, Item] = {}  # by task id
        self._withheld: set[str] = set()  # of these, the ones that will never be answered
        self._results: OrderedDict[tuple[str, Any], TaskResult] = OrderedDict()  # the newest last
        self._connecting = threading.Lock()
        self._client: SyncClient | None = None
        self._closed = False
        self._pid = os.getpid()
        if not is_server:
            self._connected()

    # --- FastDeploy's interface ---------------------------------------------------------------------

    def put_transfer_task(self, item: Any) -> None:
        """Start a transfer and return at once; fetch the answer as a done signal. item: see items.py.

        Raises RequestError for an item of unknown shape, Closed, NotConnected (first use of a server instance).
        """
        understood = read_item(item)
        client = self._connected()
        if isinstance(understood, ControlItem):
            self._control(understood)
            return
        number = next(self._numbers)
        task_id = f"fd/{self._run}/{number}/{understood.lane}/{str(understood.transfer_id)[:_ID_CHARACTERS]}"
        with self._lock:
            self._unanswered[task_id] = understood
        if (refusal := self._refusal()) is not None:
            self._answer(task_id, understood, _not_pushed(task_id, refusal))
            return
        try:
            task = understood.task(task_id, self.swap_timeout)
            # Evicted host blocks (books.py) belong to the next swap at once, so a later push would store its bytes.
            evicted = getattr(getattr(understood, "source", None), "cpu_block_ids", None) is not None
            future = client.start(task, settled=True, settle_timeout=self.settle_timeout, retry=not evicted)
        except Exception as error:  # noqa: BLE001 - whatever the caller's lists raise, the caller waits for an answer
            self._answer(task_id, understood, _not_pushed(task_id, error))
            return
        future.add_done_callback(lambda done: self._answer(task_id, understood, _outcome(task_id, done)))

    def get_transfer_done_signal(self, timeout: float = 0.0) -> Answer | None:
        """The next answer, oldest first, or None.

        timeout: seconds to wait for one. FastDeploy polls once a millisecond; other callers need not.
        """
        try:
            return self._done.get_nowait()
        except queue.Empty:
            self._taken.set()
        try:
            return self._done.get(timeout=timeout) if timeout > 0 else None
        except queue.Empty:
            return None

    def result_queue_empty(self) -> bool:
        """Whether no answer waits to be fetched."""
        return self._done.empty()

    def empty(self) -> bool:
        """Whether every item has been answered. (Answers may still wait to be fetched.)"""
        return not self._unanswered

    def clear_transfer_task(self) -> None:
        """Cancel every unanswered item. Each is still answered, with what it has moved by then."""
        if self._client is not None:
            self._cancel_all(self._client)

    def _cancel_all(self, client: SyncClient) -> None:
        with self._lock:
            task_ids = list(self._unanswered)
        for task_id in task_ids:
            try:
                client.cancel(task_id)
            except TransferError:  # the daemon is lost, and its tasks were answered
                break

    def get_server_port(self) -> int:
        """The port in the address; for port 0, one that stays reserved while this server instance lives."""
        if not self.is_server:
            raise RuntimeError("only the server instance has a port")
        port = port_of(self.address)
        if port is None:
            raise RuntimeError(f"the address {self.address!r} has no port")
        return port

    def cleanup(self) -> None:
        """Close; the name is FastDeploy's."""
        self.close()

    # --- more than FastDeploy's ----------------------------------------------------------------------------------

    @property
    def client(self) -> SyncClient:
        """The underlying client: match, pause, resume, set_generation, stats, attach. Raises Closed, NotConnected."""
        return self._connected()

    @property
    def connected(self) -> bool:
        """Whether a ready daemon answers now. While this is False, items may be answered as failed at once."""
        client = self._client
        return client is not None and client.connected

    def transfer_result(self, transfer_task_id: Any, event_type: Any = None) -> TaskResult | None:
        """What really happened to the newest transfer of this id: status, every rank's share, the error.

        event_type: needed if FastDeploy uses one id for several kinds. Returns None if the transfer is not
        answered yet, or is too old: the last RESULTS_KEPT are remembered.
        """
        name = None if event_type is None else _event_name(event_type)
        with self._lock:
            for (event, transfer_id), result in reversed(self._results.items()):
                if transfer_id == transfer_task_id and name in (None, event):
                    return result
        return None

    def take_result(self, transfer_task_id: Any, event_type: Any) -> TaskResult | None:
        """Like `transfer_result`, but forget the result afterwards."""
        with self._lock:
            return self._results.pop((_event_name(event_type), transfer_task_id), None)

    def close(self) -> None:
        """Cancel what is unanswered, answer it, and disconnect. Idempotent.

        If the daemon is lost, items that are not settled are not answered: their blocks stay locked.
        """
        with self._connecting:
            self._closed = True
            client, self._client = self._client, None
            keeper, self._port_keeper = self._port_keeper, None
        if client is not None and self._pid == os.getpid():
            if client.connected:
                self._cancel_all(client)
                with self._lock:
                    self._idle.wait_for(lambda: len(self._unanswered) <= len(self._withheld), CLOSE_TIMEOUT_S)
            self._disconnect(client)
        if keeper is not None:
            keeper.close()

    def __repr__(self) -> str:
        return f"<EngineCacheQueue {self.endpoint} ranks={self.num_client} unanswered={len(self._unanswered)}>"

    # --- inside -------------------------------------------------------------------------------------

    def _connected(self) -> SyncClient:
        client = self._client
        if client is not None and self._pid == os.getpid():
            return client
        with self._connecting:
            if self._closed:
                raise Closed("the queue was closed")
            if self._pid != os.getpid():
                raise Closed("the queue belongs to the process that created it: threads do not survive a fork")
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _disconnect(self, client: SyncClient) -> None:
        client.close()

    def _connect(self) -> SyncClient:
        client = SyncClient(self.endpoint, connect_timeout=self._connect_timeout)
        try:
            client.connect()
        except ConnectTimeout as error:
            raise NotConnected(str(error)) from None
        try:
            ranks = len(client.stats()["ranks"])
            if ranks != self.num_client:
                what = f"the daemon at {self.endpoint} has {ranks} ranks (cache.ranks)"
                raise ConfigError("num_client", what, self.num_client)
        except BaseException:
            client.close()
            raise
        return client

    def _answer(self, task_id: str, item: Item, result: TaskResult) -> None:
        """Called once for each item: on the client's thread, or on the caller's if it could not be pushed."""
        key = (_event_name(item.event), item.transfer_id)
        answers = item.answers(result, self.num_client)
        with self._lock:
            if task_id not in self._unanswered:
                return
            _remember(self._results, key, result)
            if result.settled:
                del self._unanswered[task_id]
            else:
                self._withheld.add(task_id)
                self._idle.notify_all()
        if result.error is not None and result.error.code != NOT_ADMITTED:  # which is no failure
            log.warning(
                "transfer %s of %s ended %s: %s (%s)",
                item.lane,
                item.transfer_id,
                result.status,
                result.error.message,
                result.error.code,
            )
        if not result.settled:
            log.error("the blocks of transfer %s stay locked: restart the engine to use them again", item.transfer_id)
            return
        self._deliver(item.transfer_id, answers)
        with self._lock:
            self._idle.notify_all()

    def _deliver(self, transfer_id: Any, answers: list[Answer]) -> None:  # noqa: ARG002 - for a subclass that drops some
        self._taken.clear()
        for answer in answers:
            self._done.put(answer)

    def _control(self, item: ControlItem) -> None:
        raise RequestError(f"the control request {item.method!r} needs FastDeploy's plugin", code="unknown_method")

    def _refusal(self) -> RequestError | None:
        """Why no transfer may begin now, or None."""
        return RequestError("transfers are paused", code="paused") if self._paused else None

    def release(self) -> None:
        """Accept transfers again after `hold`."""
        self._paused = False

    def hold(self) -> None:
        """Refuse new transfers, cancel running ones, and wait until the engine has handled every answer.

        Raises TransferError, code `unsettled`, if some will never be answered: the daemon may still touch blocks.
        """
        self._paused = True
        self.clear_transfer_task()
        with self._lock:
            self._idle.wait_for(lambda: len(self._unanswered) <= len(self._withheld))
            withheld = len(self._withheld)
        if withheld:
            what = f"the daemon at {self.endpoint} may still touch the blocks of {withheld} transfers"
            raise TransferError(f"{what}; restart the engine", code="unsettled")
        if not self._taken.wait(TAKEN_TIMEOUT_S):
            log.warning("the engine does not fetch the answers that wait in the cache queue")

    def _with_port(self, address: Address) -> Address:
        """Choose a port in place of port 0. FastDeploy passes the chosen port on, so it must be unique."""
        if isinstance(address, str) or address[1] != 0:
            return address
        self._port_keeper = socket.socket()
        self._port_keeper.bind(("127.0.0.1", 0))
        return address[0], int(self._port_keeper.getsockname()[1])


def endpoint_of(address: Address, data_parallel_id: int = 0) -> str:
    """The daemon's endpoint that an EngineCacheQueue of this address talks to; see its `address`.

    Raises ConfigError for braces other than {dp} and {port}, or for {port} with an address that has none.
    """
    if isinstance(address, str) and "://" in address and not os.environ.get("TRANSFERD_ENDPOINT"):
        return address
    return filled_in(default_endpoint(), port_of(address), data_parallel_id)


def port_of(address: Address) -> int | None:
    """The engine's port in an address of FastDeploy's: (host, port), or its socket in /dev/shm."""
    if not isinstance(address, str):
        return address[1]
    found = SOCKET_NAME.search(address)
    return int(found[1]) if found else None


def _remember(results: OrderedDict[tuple[str, Any], TaskResult], key: tuple[str, Any], result: TaskResult) -> None:
    try:
        results[key] = result
    except TypeError:  # an unhashable id: it gets answers, but its result cannot be looked up
        return
    results.move_to_end(key)
    if len(results) > RESULTS_KEPT:
        results.popitem(last=False)


def _outcome(task_id: str, future: concurrent.futures.Future[TaskResult]) -> TaskResult:
    if future.cancelled():  # the client was closed while it waited for a lost daemon
        lost = _not_pushed(task_id, Closed("the queue was closed"))
        return msgspec.structs.replace(lost, settled=False)
    error = future.exception()
    return future.result() if error is None else _not_pushed(task_id, error)


def _not_pushed(task_id: str, error: BaseException) -> TaskResult:
    if isinstance(error, TransferError):
        status = Status.REJECTED if isinstance(error, RequestError) else Status.FAILED
        return TaskResult(task_id=task_id, status=status, error=ErrorInfo(error.reason, str(error)))
    info = ErrorInfo("bad_value", f"{type(error).__name__}: {error}")
    return TaskResult(task_id=task_id, status=Status.REJECTED, error=info)


def _settle_timeout() -> float | None:
    """Raises ConfigError."""
    text = os.environ.get(SETTLE_VARIABLE, "")
    try:
        seconds = float(text) if text else None
    except ValueError:
        seconds = -1.0
    if seconds is not None and not seconds >= 0.0:
        raise ConfigError(SETTLE_VARIABLE, "must be a number of seconds", text)
    return seconds


def _event_name(event: Any) -> str:
    return str(getattr(event, "name", getattr(event, "value", event)))
