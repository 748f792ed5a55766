"""One tensor-parallel group of an engine: a daemon does everything that its cache transfer processes did.

    launch      FastDeploy would start a process for each rank; the last launch finds or starts the daemon instead,
                arranges the memory, and sets the signals that the engine and its workers wait for
    control     pause, resume, update_weights, sleep, wakeup; each is answered on every rank's queue
    weights     the older way to do the same: kv_cache_status, served by a thread
    close       the engine ends

FastDeploy decides who creates the device memory (`--create_cache_tensor`): with the flag, the daemon creates it and
the workers map it; without, a worker or the cache messager creates it, sets cache_ready_signal, and the daemon
maps the tensors published under FastDeploy's names.

The flag and the workers' own rule may differ (XPU, release 2.5, a patched FastDeploy), and then both would create. So
the flag is not believed. If a worker has set cache_ready_signal before us, we map its memory. If it does so while the
daemon creates, the start ends with one line. If it publishes its own memory later, in place of the daemon's, transfers
are refused from then on, and one line says so: the daemon would move bytes that no worker reads.

Memory that the daemon created is lost with the daemon, and a worker never maps memory a second time. So we do not
attach the workers to a restarted daemon. It then refuses their blocks, the engine recomputes requests, and no task
reads or writes memory that the workers do not use. A sleep and a wakeup, or a new engine, attach the workers again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from transferd.adapters.fastdeploy import identity
from transferd.adapters.fastdeploy.arguments import (
    Command,
    TransferArguments,
    configuration,
    read_command,
    unknown_flags,
)
from transferd.adapters.fastdeploy.companion import Companion, find_or_start, whole
from transferd.adapters.fastdeploy.control import ANSWER_TIMEOUT_S, Control
from transferd.adapters.fastdeploy.items import ControlItem
from transferd.adapters.fastdeploy.memory import offer_published, published_by_whom
from transferd.adapters.fastdeploy.objects import NodeDaemon
from transferd.adapters.fastdeploy.replies import Replies
from transferd.adapters.fastdeploy.routing import Routing
from transferd.adapters.fastdeploy.signals import POLL_S, Signals
from transferd.adapters.fastdeploy.words import storage_in_words
from transferd.blocks.fingerprint import Facts
from transferd.client.engines import Engine
from transferd.client.sync_client import SyncClient
from transferd.config import Config
from transferd.config.generation import configured_generation
from transferd.config.loading import to_tree
from transferd.config.sections import DEFAULT_ENGINE
from transferd.errors import ConnectTimeout, DaemonLost, EngineGone, TransferError

log = logging.getLogger(__name__)

T = TypeVar("T")

READY_TIMEOUT_S = 300.0  # for workers and daemon to create memory, or to map an offer
SERVED_TIMEOUT_S = 1.0  # between two looks whether the daemon that we wait for still lives
_KEEPER = (
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import sys; sys.stdin.read()",
)  # waits for the engine's end
NOT_OF_LAYOUT = ("ranks", "host_blocks", "first_rank", "group_ranks", "ownership", "fingerprint")  # keys of [cache]


class Group:
    """The state of one group, in the engine's process. Owns the client, the threads, and a daemon it started.

    `client` and `control` are thread-safe, because FastDeploy calls them from several threads.

    port: the cache queue's.
    hold, release: end all transfers and refuse new ones, and accept them again.
    """

    first: TransferArguments
    signals: Signals
    closing: threading.Event

    def __init__(self, port: int, hold: Callable[[], None], release: Callable[[], None]) -> None:
        self.port, self.hold, self.release = port, hold, release
        self.closing = threading.Event()
        self.failed = False
        self._launched: dict[int, TransferArguments] = {}  # by rank
        self._keeper: subprocess.Popen[bytes] | None = None
        self._companion: Companion | None = None
        self._companion_lock = threading.Lock()
        self._client: SyncClient | None = None
        self._engine = DEFAULT_ENGINE  # our name among the daemon's engines
        self._config: Config | None = None
        self._control: Control | None = None
        self._published: tuple[bytes, ...] = ()  # handles of the memory that the daemon has created and published
        self._foreign = False  # whether a worker has published its own in place of it
        self._replies: Replies | None = None
        self._threads: list[threading.Thread] = []
        self.routing: Routing | None = None  # None: no routing is moved with blocks

    @property
    def client(self) -> SyncClient:
        """The client. Raises TransferError before FastDeploy has asked for transfer processes, and after `close`."""
        if self._client is None:
            raise TransferError(f"FastDeploy has asked for no cache transfer processes at port {self.port}")
        return self._client

    @property
    def endpoint(self) -> str | None:
        """The daemon's endpoint, once it answers."""
        return None if self._client is None or self._companion is None else self._companion.endpoint

    @property
    def settled(self) -> bool:
        """Whether blocks have the generation of the engine's weights. Raises TransferError like `client`."""
        return self._control is None or (self._control.settled and self._still_ours())

    # --- start and end ------------------------------------------------------------------------------

    def launch(self, command: Command) -> subprocess.Popen[bytes]:
        """Replace FastDeploy's command for one rank's transfer process; return a process for FastDeploy to watch.

        That process only waits for the engine's end, and FastDeploy may end it. Raises ConfigError, TransferError; the
        error ends the engine's start with one line.
        """
        arguments = read_command(command)
        if arguments.rank == 0 and (unknown := unknown_flags(command)):
            what = "FastDeploy passes --%s to its transfer processes, which this transferd does not know and ignores"
            log.warning(what, ", --".join(unknown))
        self._launched[arguments.rank] = arguments
        if self._keeper is None:
            self._keeper = subprocess.Popen(_KEEPER, stdin=subprocess.PIPE, start_new_session=True)
        if len(self._launched) == arguments.ranks:
            try:
                self._start([self._launched[rank] for rank in range(arguments.ranks)])
            except BaseException:
                self.failed = True
                self.close()
                raise
        return self._keeper

    def _start(self, ranks: list[TransferArguments]) -> None:
        signals = self.signals = Signals(ranks[0].ranks, ranks[0].engine_worker_queue_port)
        if ranks[0].creates and signals.some_cache_is(True):
            what = "transfer processes were to create the KV cache (--create_cache_tensor), but the workers of port %d"
            log.warning(f"{what} have created it already: transferd maps theirs", self.port)
            ranks = [dataclasses.replace(rank, creates=False) for rank in ranks]
        first = self.first = ranks[0]
        asked = configuration(ranks, device=_device(first.creates))
        config = self._config = whole(asked)
        self._replies = Replies(first)
        signals.paused(False)
        facts = identity.facts(first)
        companion = self._companion = find_or_start(
            asked,
            port=first.cache_queue_port,
            data_parallel_id=first.data_parallel_id,
            environment=first.visible_devices,
            fingerprint=facts,
            objects=first.routing is not None,
        )
        self._client = self._connected(companion, config, facts)
        self._control = Control(self)
        self.join_memory(at_start=True)
        if first.routing is not None and (first.host_blocks or first.backend != "none"):
            self.routing = self._routing(companion, facts)
        if first.host_blocks:
            signals.swap_space_ready(True)
        signals.inited()
        storage = storage_in_words(config if companion.sections is None else whole(companion.sections))
        its_log = "" if companion.process is None else f"; it logs to {companion.process.log_file}"
        log.info("transferd at %s serves %d ranks of port %d%s", companion.endpoint, first.ranks, self.port, its_log)
        if storage:
            log.info("blocks of port %d are stored in %s", self.port, storage)
        for name, work in {"signals": self._serve_status, "daemon": self._keep_daemon}.items():
            self._threads.append(threading.Thread(target=work, name=f"transferd-{name}", daemon=True))
            self._threads[-1].start()

    def _routing(self, companion: Companion, facts: Facts) -> Routing:
        """What moves the routing of the group's blocks with them. Raises TransferError."""
        first, config = self.first, _there(self._config)
        made = Routing(_there(first.routing), first.engine_worker_queue_port, first.key_shape[0], first.host_blocks)
        if first.backend not in ("none", "attention_store"):
            daemon = NodeDaemon(companion, starts=False)
            made.store_with(daemon, config.storage.model, facts, self.port)
        return made

    def _connected(self, companion: Companion, config: Config, facts: Facts) -> SyncClient:
        """A client of the group's engine, which it registers if the daemon has no [cache] for it."""
        if companion.registers:
            self._engine = f"fastdeploy-{os.getpid()}-{self.port}"
        client = self._reached(companion)
        try:
            if companion.registers:
                cache = to_tree(config)["cache"]
                layout = {key: cache[key] for key in cache if key not in NOT_OF_LAYOUT and cache[key] is not None}
                client.register(
                    Engine(
                        ranks=self.first.ranks, model=config.storage.model, layout=layout, fingerprint=facts,
                        generation=configured_generation(config.storage), host_blocks=self.first.host_blocks,
                        dp_rank=self.first.data_parallel_id,
                    )
                )  # fmt: skip
                client.ping()  # the Welcome names the generation
        except BaseException:
            client.close()
            self._check_daemon()
            raise
        return client

    def _reached(self, companion: Companion) -> SyncClient:
        """A connected client. Raises TransferError, at once if the daemon has ended: it listens before it is ready."""
        name = "" if self._engine == DEFAULT_ENGINE else self._engine
        give_up = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            client = SyncClient(
                companion.endpoint, await_ready=False, engine=name, name=f"FastDeploy, port {self.port}",
                connect_timeout=SERVED_TIMEOUT_S,
            )  # fmt: skip
            client.on_new_boot = self._daemon_came_back
            try:
                client.connect()
                return client
            except ConnectTimeout:
                self._check_daemon()
                if time.monotonic() > give_up:
                    raise

    def _daemon_came_back(self) -> None:
        """Log which blocks a restart of the daemon has lost. The client registers and offers again by itself."""
        self._published = ()  # a new daemon publishes anew, for nobody: workers map once
        if self._control is not None and not self._control.asleep:
            lost = (
                "device blocks, until workers map them anew after a sleep and a wakeup, and "
                if self.first.creates
                else ""
            )
            log.warning("the transferd daemon was started again: it has lost %shost blocks", lost)

    def join_memory(self, *, at_start: bool = False) -> None:
        """Make the daemon and the workers share the device memory if they do not yet; signal the waiting processes.

        at_start: wait for workers that create it without a limit, as FastDeploy does. Raises TransferError, at once if
        the daemon has ended.
        """
        client, signals = self.client, self.signals
        if not self.first.creates:
            self._await_workers(math.inf if at_start else READY_TIMEOUT_S)
            missing = client.stats()["engines"][self._engine]["missing"]
            offer_published(client, _there(self._config), {rank: self._launched[rank].device for rank in missing})
        self._await_ready()
        if not self.first.creates:
            return
        if at_start and signals.some_cache_is(True):
            what = "--create_cache_tensor says that transfer processes create the KV cache, and workers have created it"
            raise TransferError(f"{what}, too: this FastDeploy's workers and its command disagree about who creates")
        if not signals.cache_is(True):  # else the workers have mapped it
            for rank in range(self.first.ranks):
                client.device_handle(rank)  # for the worker, which maps the memory when it sees the signal
            with contextlib.suppress(EngineGone):  # a Paddle on the CPU publishes nothing
                self._published = self._in_place()
            signals.cache_ready(True)

    def _in_place(self) -> tuple[bytes, ...]:
        devices = {rank: one.device for rank, one in self._launched.items()}
        return published_by_whom(_there(self._config), devices)

    def _still_ours(self) -> bool:
        """Whether the memory that workers map by name is what the daemon has published, if the daemon creates it."""
        if self._published:
            try:
                ours = self._in_place() == self._published
            except EngineGone:  # a sleep takes the names away, and nothing is transferred then
                ours = True
            if not ours and not self._foreign:
                what = "a worker of port %d has created the KV cache itself and published it in place of transferd's:"
                log.error(f"{what} no block is moved, only the GPU cache serves, until a restart", self.port)
            self._foreign = not ours
            return ours
        return True

    def _await_workers(self, timeout: float) -> None:
        give_up = time.monotonic() + timeout
        while not self.signals.cache_is(True):
            if time.monotonic() > give_up:
                raise TransferError(f"some workers did not create their KV cache within {timeout:g} s")
            self._check_daemon()
            if self.closing.wait(POLL_S):
                raise TransferError("the engine is closing")

    def _await_ready(self) -> None:
        give_up = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                return self.client.wait_ready(SERVED_TIMEOUT_S)
            except ConnectTimeout as error:
                self._check_daemon()
                if time.monotonic() > give_up or self.closing.is_set():
                    raise TransferError(f"{error}; {_there(self._companion).why()}") from None

    def _check_daemon(self) -> None:
        """Raise TransferError with its last line if the daemon has ended."""
        if not self.daemon_lives():
            raise TransferError(_there(self._companion).why())

    def close(self) -> None:
        """Disconnect, and stop a daemon that was started here. Called when the engine ends. Idempotent."""
        self.closing.set()
        client, self._client = self._client, None
        if client is not None:
            client.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads = []
        if self._replies is not None:
            self._replies.close()
            self._replies = None
        if self.routing is not None:
            self.routing.close()
            self.routing = None
        if self._companion is not None:
            self._companion.close()
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait()
        self._companion = self._keeper = None

    # --- what FastDeploy asks for -------------------------------------------------------------------

    def control(self, item: ControlItem) -> None:
        """Carry out a control request and answer it on every rank's queue. Called on one thread."""
        code, message = _there(self._control).obey(item)
        _there(self._replies).send(item.request, code, message)

    def _serve_status(self) -> None:
        control = _there(self._control)
        self.signals.serve_status(self.closing, control.clear_weights, control.update_weights, control.look)

    # --- the daemon ---------------------------------------------------------------------------------

    def daemon_lives(self) -> bool:
        """Whether the daemon may hold memory: it runs, or it is not ours and so may be suspended."""
        with self._companion_lock:
            return self._companion is not None and self._companion.lives()

    def have_daemon(self) -> None:
        """Start a daemon of ours that has ended; return when it has our engine. Raises TransferError, OSError."""
        with self._companion_lock:
            companion = _there(self._companion)
            if not companion.lives():
                companion.start()
                companion.await_answer()
        give_up = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            with contextlib.suppress(TransferError):
                if self._engine in self.client.stats()["engines"]:
                    return
            self._check_daemon()
            if time.monotonic() > give_up or self.closing.wait(POLL_S):
                raise DaemonLost(f"the transferd daemon at {companion.endpoint} does not answer")

    def _keep_daemon(self) -> None:
        """Start a daemon of ours again when it ends, but not while FastDeploy sleeps: it would allocate memory.

        The client reconnects, registers and offers memory again by itself; for memory that the daemon created, see the
        module.
        """
        complained = ""
        while not self.closing.wait(POLL_S):
            try:
                with self._companion_lock:
                    said = "" if _there(self._control).asleep else _there(self._companion).look()
            except Exception as error:  # noqa: BLE001 - such as a full disk; the next look may find it mended
                said = f"cannot start the transferd daemon: {error}"
                if said == complained:
                    continue
                complained = said
            if said:
                log.error("%s", said)


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
