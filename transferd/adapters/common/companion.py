"""The daemon behind an engine: a running one, or one that we start with defaults. Ours ends with the engine.

    where           the `endpoint` of the configuration, else TRANSFERD_ENDPOINT, else the packaged socket if a daemon
                    listens there that can map our memory, else a socket in this user's directory
    runs already    we use it as it is, and never stop it
    does not run    with a named endpoint, the engine runs without a daemon and connects once one is there;
                    without, we start one that stores files under a cache directory

Several engines of a user share the daemon that was started first. It ends with the engine that started it, even if that
engine crashes; the others then start another daemon.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transferd.adapters.common.directories import own_directory, own_socket, remove_leftovers, sees_all_gpus
from transferd.adapters.common.packaged import nobody_listens, packaged_endpoint
from transferd.adapters.common.program import Program
from transferd.client.launch import DaemonProcess, spawn
from transferd.errors import ConfigError, TransferError

ENDPOINT_VARIABLE = "TRANSFERD_ENDPOINT"
FREE_SHARE = 0.5  # the share of the free space for the blocks of a daemon started here
CAPACITY_FILE = "capacity"  # beside the blocks, so that a restart does not take half of the remaining space again
LEAST_STAGING = 64 * 1024**2
START_AGAIN_S = 5.0  # the least time between two starts of a daemon that fails to start
LOOK_S = 0.05  # how often a start looks for a daemon that starts
STAGED_BLOCKS = 4  # the least that staging holds, so that storage I/O and copies overlap


class Sized(Protocol):
    """What a daemon must have room for. block_bytes: of the engine's largest block."""

    @property
    def block_bytes(self) -> int: ...


class DaemonFinder:
    """Where the daemon is, and its process if it was started here.

    program: the one that the engine runs in.
    endpoint, path, capacity: the operator's settings, "" or 0 if not set.
    engine: None if another process starts the daemon, that of rank 0.
    gpu: whether the daemon has to map memory of a GPU.
    """

    def __init__(
        self,
        program: Program,
        *,
        endpoint: str = "",
        path: str = "",
        capacity: int = 0,
        engine: Sized | None = None,
        gpu: bool = False,
    ) -> None:
        named = endpoint or os.environ.get(ENDPOINT_VARIABLE, "")
        if named and (path or capacity):
            what = "are for a daemon that the engine starts; the one at this endpoint has its own configuration"
            raise ConfigError("path, capacity", what, named)
        self.program = program
        self._path, self._capacity, self._engine, self._gpu = path, capacity, engine, gpu
        self._endpoint = named
        self._ours = False  # whether the endpoint is the one where engines of this user start a daemon
        self._process: DaemonProcess | None = None
        self._started = -math.inf

    @property
    def listening(self) -> bool:
        """Whether a daemon listens where the last `find` has looked, as far as can be known."""
        return bool(self._endpoint) and not nobody_listens(self._endpoint)

    @property
    def starting(self) -> bool:
        """Whether a daemon started by this engine is still coming up."""
        if self._engine is None:  # rank 0 starts it, and logs a failure
            return self._ours and nobody_listens(self._endpoint)
        return self._process is not None and not self._process.ended() and nobody_listens(self._endpoint)

    def find(self) -> str:
        """The endpoint to connect to, always the same. Starts a daemon there if none listens and no endpoint is named.

        The daemon may not answer yet. Raises TransferError, OSError.
        """
        if not self._endpoint:
            packaged = packaged_endpoint(self.program.title, self.program.log, gpu=self._gpu)
            self._ours = not packaged
            self._endpoint = packaged or own_socket(own_directory(self.program.folder))
        if (
            self._ours
            and self._engine is not None
            and nobody_listens(self._endpoint)
            and time.monotonic() - self._started > START_AGAIN_S
        ):
            self._start(own_directory(self.program.folder), self._endpoint)
        return self._endpoint

    def _start(self, directory: Path, endpoint: str) -> None:
        if self._process is not None:
            if not (why := self._process.ended()):
                return  # the started daemon has not bound its socket yet
            self.program.log.warning("%s", why)
            self._process.stop()
        self._started = time.monotonic()
        remove_leftovers(directory)
        sections, blocks, capacity = self._sections(directory, endpoint)
        self._process = spawn(sections, directory, name=str(os.getpid()), tied=True, environment=sees_all_gpus())
        what = "no transferd daemon was running, so this engine started one: pid %d, up to %.1f GiB in %s, log in %s"
        self.program.log.info(what, self._process.pid, capacity / 2**30, blocks, self._process.log_file)

    def _sections(self, directory: Path, endpoint: str) -> tuple[Mapping[str, Any], Path, int]:
        blocks = Path(self._path) if self._path else cache_directory() / self.program.store
        blocks.mkdir(mode=0o700, parents=True, exist_ok=True)
        capacity = self._capacity or _capacity_of(blocks)
        assert self._engine is not None
        staging = max(LEAST_STAGING, STAGED_BLOCKS * self._engine.block_bytes)
        return (
            {
                "server": {"endpoint": endpoint},
                "host": {"staging": staging},
                "storage": {"backend": "file", "file": {"path": str(blocks / "blocks"), "capacity": capacity}},
                "metrics": {"listen": ""},
                "recorder": {"directory": str(directory / "flight")},
            },
            blocks,
            capacity,
        )

    def close(self, timeout: float) -> None:
        """Stop the daemon that was started here, if any, and kill it after `timeout` seconds."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it was killed
                process.stop(timeout)


@dataclass(frozen=True, slots=True)
class LargestBlock:
    """What a daemon that is started here must have room for, before the first block is seen."""

    block_bytes: int


class OneDaemon(DaemonFinder):
    """The daemon of all links of this process. The first link starts it; `end` ends it."""

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
                pause.wait(LOOK_S)
        except (TransferError, OSError) as error:
            self.program.log.warning("transferd: not in use yet: %s", error)
            return False
        return True

    def close(self, timeout: float) -> None:
        """Called for each link: the others go on."""

    def end(self, timeout: float) -> None:
        super().close(timeout)


def cache_directory() -> Path:
    """Where blocks are stored if the operator names no path."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transferd"


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
