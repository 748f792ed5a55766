"""The daemon behind an engine: a running one, or one that we start with defaults.

    where           the `endpoint` of the configuration, else TRANSFERD_ENDPOINT, else the packaged socket if a daemon
                    listens there that can map our memory, else a socket in this user's directory
    runs already    we use it as it is, and never stop it
    does not run    with a named endpoint, the engine runs without a daemon and connects once one is there;
                    without, we start one that stores files under a cache directory

Several engines of a user share the daemon that was started first. It ends when the last of them has left, whoever
started it, and however they end.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transferd.adapters.common.directories import own_directory, own_socket, remove_leftovers, sees_all_gpus
from transferd.adapters.common.packaged import nobody_listens, packaged_endpoint
from transferd.adapters.common.program import Program
from transferd.adapters.common.users import Users
from transferd.client.launch import DaemonProcess, spawn
from transferd.errors import ConfigError, TransferError

ENDPOINT_VARIABLE = "TRANSFERD_ENDPOINT"
FREE_SHARE = 0.5  # the share of the free space for the blocks of a daemon started here
CAPACITY_FILE = "capacity"  # beside the blocks, so that a restart does not take half of the remaining space again
LEAST_STAGING = 64 * 1024**2
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between two starts of a daemon that keeps ending
LOOK_S = 1.0  # between two looks for a daemon that another engine has started
SOON_S = 0.05  # how often a start looks for a daemon that starts
STAGED_BLOCKS = 4  # the least that staging holds, so that storage I/O and copies overlap


@dataclass(eq=False, kw_only=True)
class StartedDaemon:
    """A daemon that engines of this user start at `endpoint` when none is there. Not thread-safe.

    It lives until the last of its users has left, whoever started it, and however they end. If it ends before, one of
    them starts it again.

    directory: its private one, for its configuration, its log and what counts its users.
    environment: its variables.
    process: it, if it was started here.
    """

    endpoint: str
    directory: Path = Path()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    process: DaemonProcess | None = None
    _start_at: float = -math.inf
    _pause: float = FIRST_PAUSE_S / 2

    def __post_init__(self) -> None:
        self._users = Users(self.directory)

    def configuration(self) -> Mapping[str, Any]:
        """The sections to start it with, made for each start. Raises TransferError, OSError."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether no daemon serves or starts, as far as this can be seen. This engine is a user of one that does."""
        if (self.process is not None and not self.process.ended()) or self._users.join():
            return False
        return not self.endpoint.startswith("ipc:") or nobody_listens(self.endpoint)

    def look(self) -> str:
        """Start a daemon if there is none, at growing intervals, because the cause may end it again.

        Returns why the last one is gone, "" if none was started. Raises TransferError, OSError.
        """
        now = time.monotonic()
        if now < self._start_at:
            return ""
        lived = now - self._start_at > LONGEST_PAUSE_S  # then it has not ended by the cause of an earlier end
        if self.process is None or self.process.ended():
            self._start_at = now + LOOK_S
        if not self.ended:
            return ""
        why = "the daemon that another engine had started is gone" if self.process is None else self.process.ended()
        self._pause = FIRST_PAUSE_S if lived else min(2 * self._pause, LONGEST_PAUSE_S)
        self._start_at = now + self._pause
        self.start()
        return why

    def start(self) -> None:
        """Start the daemon, which does not answer yet, unless another engine has just done so. Raises like `look`."""
        if self.process is not None:
            self.process.stop()  # it has ended
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.directory / "start").open("wb") as alone:
            fcntl.flock(alone, fcntl.LOCK_EX)
            if not self.ended:
                self.process = None  # ours has ended, and another engine's serves
                return
            remove_leftovers(self.directory)
            sections = self.configuration()
            with self._users.watched() as end:
                self.process = spawn(
                    sections, self.directory, name=str(os.getpid()), until=end, environment=self.environment
                )

    def close(self, timeout: float) -> None:
        """Be a user no more; wait for the end of a daemon that was started here if no user is left, so many seconds."""
        last = self._users.leave()
        if self.process is not None and last:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.process.wait(timeout)


@dataclass(eq=False, kw_only=True)
class FilesDaemon(StartedDaemon):
    """A daemon with defaults, which stores files.

    blocks: the directory of its store. capacity: 0 if the operator has not set it. block_bytes: of the largest block.
    """

    blocks: Path
    capacity: int
    block_bytes: int

    def configuration(self) -> Mapping[str, Any]:
        self.blocks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.capacity = self.capacity or _capacity_of(self.blocks)
        file = {"path": str(self.blocks / "blocks"), "capacity": self.capacity}
        return {
            "server": {"endpoint": self.endpoint},
            "host": {"staging": max(LEAST_STAGING, STAGED_BLOCKS * self.block_bytes)},
            "storage": {"backend": "file", "file": file},
            "metrics": {"listen": ""},
            "recorder": {"directory": str(self.directory / "flight")},
        }


class DaemonFinder:
    """Where the daemon is, and how to start it if none is there.

    program: the one that the engine runs in.
    endpoint, path, capacity: the operator's settings, "" or 0 if not set.
    block_bytes: of the engine's largest block, for which a daemon must have room; 0 if another process starts it, that
        of rank 0.
    gpu: whether the daemon has to map memory of a GPU.
    started: the daemon that this process may start, once it has looked for one; None before, or if it starts none.
    """

    def __init__(
        self,
        program: Program,
        *,
        endpoint: str = "",
        path: str = "",
        capacity: int = 0,
        block_bytes: int = 0,
        gpu: bool = False,
    ) -> None:
        named = endpoint_named(endpoint)
        if named and (path or capacity):
            what = "are for a daemon that the engine starts; the one at this endpoint has its own configuration"
            raise ConfigError("path, capacity", what, named)
        self.program = program
        self._path, self._capacity, self._block_bytes, self._gpu = path, capacity, block_bytes, gpu
        self._endpoint = named
        self._ours = False  # whether the endpoint is the one where engines of this user start a daemon
        self.started: FilesDaemon | None = None

    @property
    def listening(self) -> bool:
        """Whether a daemon listens where the last `find` has looked, as far as can be known."""
        return bool(self._endpoint) and not nobody_listens(self._endpoint)

    @property
    def starting(self) -> bool:
        """Whether a daemon that an engine of this user starts is still coming up."""
        if not self._ours or not nobody_listens(self._endpoint):
            return False
        return self.started is None or not self.started.ended  # None: rank 0 starts it, and logs a failure

    def find(self) -> str:
        """The endpoint to connect to, always the same. Starts a daemon there if none listens and no endpoint is named.

        The daemon may not answer yet. Raises TransferError, OSError.
        """
        if not self._endpoint:
            self._endpoint = packaged_endpoint(self.program.title, self.program.log, gpu=self._gpu)
        if not self._endpoint:
            directory, self._ours = own_directory(self.program.folder), True
            self._endpoint = own_socket(directory)
            if self._block_bytes:
                self.started = FilesDaemon(
                    endpoint=self._endpoint, directory=directory, environment=sees_all_gpus(), capacity=self._capacity,
                    blocks=store_directory(self.program, self._path), block_bytes=self._block_bytes,
                )  # fmt: skip
        if self.started is not None:
            self._have(self.started)
        return self._endpoint

    def _have(self, daemon: FilesDaemon) -> None:
        before = daemon.process
        ended = daemon.look()
        if before is not None and ended:
            self.program.log.warning("%s", ended)
        if (process := daemon.process) is not None and process is not before:
            what = "no transferd daemon was running, so this engine started one: pid %d, up to %.1f GiB in %s"
            gib = daemon.capacity / 2**30
            self.program.log.info(f"{what}, log in %s", process.pid, gib, daemon.blocks, process.log_file)

    def close(self, timeout: float) -> None:
        """Leave the daemon that engines of this user have started, if any; wait for its end if no other one uses it."""
        if self.started is not None:
            self.started.close(timeout)


class OneDaemon(DaemonFinder):
    """The daemon of all links of this process. The first link starts it; `end` leaves it."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._lock = threading.Lock()

    def find(self) -> str:
        with self._lock:
            return super().find()

    def listens_within(self, timeout: float) -> bool:
        """Find or start the daemon and wait until it listens, at most so many seconds. Logs errors, and raises none."""
        give_up, pause = time.monotonic() + timeout, threading.Event()
        try:
            while not (self.find() and self.listening):
                if time.monotonic() > give_up:
                    return False
                pause.wait(SOON_S)
        except (TransferError, OSError) as error:
            self.program.log.warning("transferd: not in use yet: %s", error)
            return False
        return True

    def close(self, timeout: float) -> None:
        """Called for each link: the others go on."""

    def end(self, timeout: float) -> None:
        super().close(timeout)


def endpoint_named(chosen: str) -> str:
    """The endpoint that the operator names, in an engine's settings or in the environment; "" for none."""
    return chosen or os.environ.get(ENDPOINT_VARIABLE, "")


def store_directory(program: Program, chosen: str) -> Path:
    """Where a daemon that is started here stores blocks. chosen: the operator's path, "" for none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else cache / "transferd" / program.store


def _capacity_of(blocks: Path) -> int:
    """Half of the space that was free when this directory was first used."""
    file = blocks / CAPACITY_FILE
    try:
        return int(file.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        capacity = int(shutil.disk_usage(blocks).free * FREE_SHARE)
    try:
        file.write_text(str(capacity), encoding="ascii")
    except OSError as error:
        raise TransferError(f"cannot write to {blocks}: {error.strerror}; name another one with `path`") from error
    return capacity
