"""One tensor-parallel group of an engine: one daemon does everything that its cache transfer processes did.

    launch      FastDeploy would start a process for each rank; the last launch finds or starts the daemon instead,
                arranges the memory, and sets the signals that the engine and its workers wait for
    control     pause, resume, update_weights, sleep, wakeup; each is answered on every rank's queue
    weights     the older way to do the same: kv_cache_status, served by a thread
    close       the engine ends

FastDeploy decides who creates the device memory (`--create_cache_tensor`): with the flag, the daemon creates it and
the workers map it; without, a worker or the cache messager creates it, sets cache_ready_signal, and the daemon
maps the tensors published under FastDeploy's names.

Memory that the daemon created is lost with the daemon, and a worker never maps memory a second time. So we do not tell
a restarted daemon that workers are attached. It then refuses their blocks, the engine recomputes requests, and no task
reads or writes memory that the workers do not use. A sleep and a wakeup, or a new engine, attach the workers again.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from transferd.adapters.fastdeploy import identity
from transferd.adapters.fastdeploy.arguments import TransferArguments, configuration, read_command
from transferd.adapters.fastdeploy.companion import Companion, find_or_start, whole
from transferd.adapters.fastdeploy.control import UNNAMED, ControlItem, is_about_the_cache, new_generation
from transferd.adapters.fastdeploy.memory import offer_published
from transferd.adapters.fastdeploy.replies import Replies
from transferd.adapters.fastdeploy.signals import Signals
from transferd.client.sync_client import SyncClient
from transferd.config import Config
from transferd.config.generation import generation_named, generation_of
from transferd.errors import RequestError, TransferError

log = logging.getLogger(__name__)

T = TypeVar("T")

WORKER_TIMEOUT_S = 50.0  # for workers to release memory before a sleep; FastDeploy waits 60 s for the whole sleep
READY_TIMEOUT_S = 300.0  # for a daemon to create its memory, or to map an offer
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between two starts of a daemon that keeps dying
_KEEPER = (
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import sys; sys.stdin.read()",
)  # waits for the engine's end


class Group:
    """The state of one group, in the engine's process. Owns the client, the threads, and a daemon it started.

    port: the cache queue's. groups: data-parallel groups on this node. Thread-safe where FastDeploy calls it from
    several threads: `client`, `control`.
    """

    def __init__(self, port: int, groups: int = 1) -> None:
        self.port = port
        self.groups = groups
        self._launched: dict[int, TransferArguments] = {}  # by rank
        self._keeper: subprocess.Popen[bytes] | None = None
        self._companion: Companion | None = None
        self._client: SyncClient | None = None
        self._config: Config | None = None
        self._signals: Signals | None = None
        self._replies: Replies | None = None
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._paused = False
        self._version: str | None = None  # that the training loop named when we last looked
        self._cleared = False  # the memory is freed, by a sleep or for new weights
        self._start_again_at = 0.0
        self._pause_before_start = FIRST_PAUSE_S / 2
        self.failed = False
        self.hold: Callable[[], None] = _nothing  # ends all transfers and refuses new ones; the queue sets this
        self.release: Callable[[], None] = _nothing  # accepts transfers again

    @property
    def client(self) -> SyncClient:
        """The client. Raises TransferError before FastDeploy has asked for transfer processes, and after `close`."""
        if self._client is None:
            raise TransferError(f"FastDeploy has asked for no cache transfer processes at port {self.port}")
        return self._client

    @property
    def endpoint(self) -> str | None:
        """The daemon's endpoint, once it answers."""
        return None if self._companion is None else self._companion.endpoint

    # --- start and end ------------------------------------------------------------------------------

    def launch(self, command: str) -> subprocess.Popen[bytes]:
        """Replace FastDeploy's command for one rank's transfer process; return a process for FastDeploy to watch.

        That process ends with the engine, and FastDeploy may end it. It is the daemon itself if that was started here,
        else one that only waits. Raises ConfigError, TransferError, which ends the engine's start with one line.
        """
        arguments = read_command(command)
        self._launched[arguments.rank] = arguments
        if self._keeper is None:
            self._keeper = subprocess.Popen(_KEEPER, stdin=subprocess.PIPE, start_new_session=True)
        if len(self._launched) < arguments.ranks:
            return self._keeper
        try:
            self._start([self._launched[rank] for rank in range(arguments.ranks)])
        except BaseException:
            self.failed = True
            self.close()
            raise
        companion = self._companion
        return self._keeper if companion is None or companion.process is None else companion.process

    def _start(self, ranks: list[TransferArguments]) -> None:
        first = ranks[0]
        asked = configuration(ranks, device=_device(first.creates))
        self._config = whole(asked)
        signals = self._signals = Signals(first.ranks, first.engine_worker_queue_port)
        self._replies = Replies(first)
        self._version = self._generation()
        signals.paused(False)
        companion = self._companion = find_or_start(
            asked,
            port=first.cache_queue_port,
            data_parallel_id=first.data_parallel_id,
            groups=self.groups,
            environment=first.visible_devices,
            fingerprint=identity.facts(first),
        )
        client = self._client = SyncClient(companion.endpoint, await_ready=False)
        client.connect()
        self._join_memory(None)
        if first.host_blocks:
            signals.swap_space_ready(True)
        signals.inited()
        log.info("transferd at %s serves %d ranks of port %d", companion.endpoint, first.ranks, self.port)
        self._watcher = threading.Thread(target=self._watch, name="transferd-signals", daemon=True)
        self._watcher.start()

    def _join_memory(self, timeout: float | None) -> None:
        """Make the daemon and the workers share the device memory, and signal the processes that wait for it.

        timeout: seconds for workers that create it; at start None, since FastDeploy waits for them without a limit.
        """
        client, signals, first = self.client, _there(self._signals), self._launched[0]
        if first.creates:
            client.wait_ready(READY_TIMEOUT_S)
            for rank in range(first.ranks):
                client.device_handle(rank)  # for the worker, which maps the memory when it sees the signal
            signals.cache_ready(True)
        else:
            signals.await_cache(True, self._closing, timeout)
            offer_published(client, _there(self._config), [self._launched[r].device for r in range(first.ranks)])
            client.wait_ready(READY_TIMEOUT_S)

    def close(self) -> None:
        """Disconnect, and stop a daemon that was started here. Called when the engine ends. Idempotent."""
        self._closing.set()
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        if self._replies is not None:
            self._replies.close()
            self._replies = None
        started = None if self._companion is None else self._companion.process
        for process in (started, self._keeper):
            if process is not None:
                _end(process)
        self._companion = self._keeper = None

    # --- what FastDeploy asks for -------------------------------------------------------------------

    def control(self, item: ControlItem) -> None:
        """Carry out a control request and answer it on every rank's queue. Called on one thread."""
        try:
            self._methods[item.method](item)
        except KeyError:
            _there(self._replies).send(item.request, 400, f"Unknown control method: {item.method}")
        except TransferError as error:
            log.warning("control request %s failed: %s", item.method, error)
            _there(self._replies).send(item.request, 500, f"Failed to execute {item.method}: {error}")
        else:
            _there(self._replies).send(item.request, 200, "Success")

    @property
    def _methods(self) -> dict[str, Callable[[ControlItem], None]]:
        return {
            "pause": lambda _: self._pause(),
            "resume": lambda _: self._resume(),
            "update_weights": lambda item: self.client.set_generation(self._new_generation(item.args)),
            "sleep": self._sleep,
            "wakeup": self._wakeup,
        }

    def _pause(self) -> None:
        if not self._paused:
            self.hold()
            self.client.pause()
            self._paused = True
            _there(self._signals).paused(True)

    def _resume(self) -> None:
        if self._paused:
            self.client.resume()
            self._take_generation()
            self._paused = False
            self.release()
            _there(self._signals).paused(False)

    def _take_generation(self) -> None:
        """Use the generation of the weights that are served now, if FastDeploy's training loop names one."""
        served = self._served()
        if served != self.client.generation:
            self.client.set_generation(served)

    def _served(self) -> str:
        """The generation of these weights: the training loop's version if that is new, else what is served already.

        An update may have added to a version that the training loop did not change.
        """
        version, before = self._generation(), self._version
        self._version = version
        return self.client.generation if version in (None, before) else version

    def _new_generation(self, args: Mapping[str, Any]) -> str:
        """A generation for new weights. Without a name for them it is unique, so that no older block is shared."""
        version = args.get("version")
        named = generation_named(version) if isinstance(version, str) and version else None
        self._version = self._generation()
        return new_generation(self._version or named or UNNAMED, self.client.generation)

    def _generation(self) -> str | None:
        file = self._launched[0].version_file
        return generation_of(file) if file.is_file() else None

    def _sleep(self, item: ControlItem) -> None:
        if is_about_the_cache(item.args):
            self._clear()

    def _wakeup(self, item: ControlItem) -> None:
        if is_about_the_cache(item.args) and self._cleared:
            self._restore(self._served())

    def _clear(self) -> None:
        """Free device and host memory, after the processes that mapped it have released it. Idempotent."""
        if self._cleared:
            return
        client, signals, first = self.client, _there(self._signals), self._launched[0]
        if first.creates:
            signals.await_cache(False, self._closing, WORKER_TIMEOUT_S)
            for rank in range(first.ranks):
                client.detach(rank)
        client.clear_cache()
        signals.swap_space_ready(False)
        signals.cache_ready(False)
        self._cleared = True

    def _restore(self, generation: str) -> None:
        """Create the memory again. generation: of the weights that are served now, which may be the same as before."""
        self.client.restore_cache(generation, same_weights=True)
        self._join_memory(READY_TIMEOUT_S)
        _there(self._signals).swap_space_ready(bool(self._launched[0].host_blocks))
        self._cleared = False

    # --- weights cleared and updated through kv_cache_status ----------------------------------------

    def _watch(self) -> None:
        _there(self._signals).watch_status(self._closing, self._clear_weights, self._update_weights, self._look)

    def _look(self) -> None:
        """Restart a daemon of ours that died, at growing intervals, because the cause may kill it again.

        The client reconnects and offers memory again by itself; for memory that the daemon created, see the module.
        """
        companion = _there(self._companion)
        now = time.monotonic()
        if not companion.died() or now < self._start_again_at:
            return
        self._pause_before_start = min(2 * self._pause_before_start, LONGEST_PAUSE_S)
        self._start_again_at = now + self._pause_before_start
        log.error("the transferd daemon died, restarting it; its log ends:\n%s", companion.log(500))
        companion.start()

    # Every worker sets the status, so a late one requests something that was already done for the others.

    def _clear_weights(self) -> None:
        with _told("clearing the KV cache"):
            self._only_mixed()
            self._pause()
            self._clear()

    def _update_weights(self) -> None:
        with _told("restoring the KV cache"):
            self._only_mixed()
            if self._cleared:
                self._restore(self._new_generation({}))
            self._resume()

    def _only_mixed(self) -> None:
        if self._launched[0].role != "mixed":
            raise RequestError(
                f"the cache of a {self._launched[0].role} engine cannot be cleared; FastDeploy forbids it"
            )


def _nothing() -> None:
    pass


def _there(part: T | None) -> T:
    if part is None:
        raise TransferError("FastDeploy has asked for no cache transfer processes")
    return part


def _device(creates: bool) -> str:
    """The value of `cache.device` for this engine; TRANSFERD_CACHE__DEVICE overrides it.

    creates: the daemon creates; it then publishes memory with FastDeploy's operators, by which the workers map it.
    """
    from fastdeploy.platforms import current_platform

    return "cuda" if current_platform.is_cuda() and not creates else "paddle"


@contextlib.contextmanager
def _told(what: str) -> Any:
    try:
        yield
    except TransferError as error:
        log.error("%s failed: %s", what, error)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the process's input, which ends it; a daemon has its shutdown_timeout for that."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(30.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
