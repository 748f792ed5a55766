"""Starts a daemon in its own process: for an engine's adapter, and for tests, demos and benchmarks.

    with running(config_tree, directory) as daemon:
        async with Client(daemon.endpoint) as client: ...

The daemon logs to a file in `directory`; an error about it quotes the last line there. Only this process is stopped, by
its pid.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transferd.config.toml import to_toml
from transferd.errors import ConnectTimeout, TransferError
from transferd.runtime.address import socket_path

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
LOOK_S = 0.01  # how often to look for the socket of a daemon that starts
LOG_END = 4000  # bytes of the log in which the last line is looked for


@dataclass(slots=True)
class DaemonProcess:
    """A running daemon. Owns the process until `stop` or `kill`."""

    process: subprocess.Popen[bytes]
    endpoint: str
    config_file: Path
    log_file: Path
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed once the process has ended

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def ended(self) -> str:
        """How the daemon ended, in one line, with its exit code and the last line of its log; "" if it runs."""
        code = self.process.poll()
        return "" if code is None else f"the transferd daemon ended (exit code {code}): {self.last_line}"

    @property
    def last_line(self) -> str:
        """The last line of the log, and where that is."""
        try:
            end = self.log_file.read_bytes()[-LOG_END:].decode("utf-8", "replace").split("\n")
        except OSError as error:
            return f"its log {self.log_file} cannot be read: {error.strerror}"
        line = next((line.strip() for line in reversed(end) if line.strip()), "it has logged nothing")
        return f"{line} (log: {self.log_file})"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        self.cleanup.close()

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM and return the exit code. Kills a process that does not stop in time; raises TimeoutExpired."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self.cleanup.close()
        return code


def spawn(
    sections: Mapping[str, Any],
    directory: Path,
    *,
    name: str = "daemon",
    until: int | None = None,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> DaemonProcess:
    """Start a daemon with this configuration, which names its endpoint; it does not answer yet.

    directory: for NAME.toml and NAME.log, to which the daemon appends.
    until: the daemon stops, as on SIGTERM, when this descriptor reads its end. It leads a session of its own: a signal
        to our group is not for it.
    prefix: a command to put in front, such as `nsenter …`; it must exec the rest in its own process.
    environment: default this process's.
    Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config_file, log_file = directory / f"{name}.toml", directory / f"{name}.log"
    config_file.write_text(to_toml(sections), encoding="utf-8")
    command = [*prefix, sys.executable, "-m", "transferd", "serve", "--config", str(config_file)]
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            command if until is None else [*command, "--until-stdin-ends"],
            stdin=subprocess.DEVNULL if until is None else until,
            stdout=log,
            stderr=log,
            env={**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"},
            start_new_session=until is not None,
        )
    named = sections["server"]["endpoint"]
    endpoint = str(named[0] if isinstance(named, list) else named)  # we ask at the first of several
    return DaemonProcess(process, endpoint, config_file, log_file)


def start(
    tree: Mapping[str, Any],
    directory: Path,
    *,
    name: str = "daemon",
    wait: bool = True,
    prefix: Sequence[str] = (),
) -> DaemonProcess:
    """Start a daemon with this configuration; wait until it is ready.

    tree: configuration sections as plain data. server.endpoint, storage.file.path and recorder.directory
        default to places inside `directory` (a socket whose path would be too long: in /tmp); metrics.listen defaults
        to off.
    prefix: as for `spawn`.

    Raises TransferError with the end of the log if the daemon does not start.
    """
    sections: dict[str, dict[str, Any]] = copy.deepcopy(dict(tree))  # a copy, because defaults are filled in below
    cleanup = contextlib.ExitStack()
    if "endpoint" not in sections.setdefault("server", {}):
        sections["server"]["endpoint"] = f"ipc://{cleanup.enter_context(socket_path(directory, f'{name}.sock'))}"
    sections.setdefault("metrics", {}).setdefault("listen", "")
    sections.setdefault("storage", {}).setdefault("file", {}).setdefault("path", str(directory / "blocks"))
    sections.setdefault("recorder", {}).setdefault("directory", str(directory / "flight"))
    daemon = spawn(sections, directory, name=name, prefix=prefix)
    daemon.cleanup = cleanup
    if wait:
        try:
            _await_ready(daemon, engine="cache" in sections)
        except BaseException:  # leave no daemon behind, even after Ctrl-C
            daemon.stop()
            raise
    return daemon


@contextlib.contextmanager
def running(
    tree: Mapping[str, Any], directory: Path, *, name: str = "daemon", prefix: Sequence[str] = ()
) -> Iterator[DaemonProcess]:
    """Start a daemon; stop it at the end, even after an error."""
    daemon = start(tree, directory, name=name, prefix=prefix)
    try:
        yield daemon
    finally:
        daemon.stop()


def _await_ready(daemon: DaemonProcess, *, engine: bool) -> None:
    """Wait until the daemon serves the engine of [cache] or, without one, answers."""
    from transferd.client.sync_client import SyncClient

    give_up = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up and daemon.process.poll() is None:
        if daemon.endpoint.startswith("ipc:///") and not os.path.exists(daemon.endpoint.removeprefix("ipc://")):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.process.wait(LOOK_S)
            continue
        with contextlib.suppress(ConnectTimeout), SyncClient(daemon.endpoint, connect_timeout=5.0, await_ready=engine):
            return
    code = daemon.process.poll()
    if code is None:
        daemon.kill()
    raise TransferError(f"the daemon did not start (exit code {code}); its log ends:\n{daemon.log[-LOG_END:]}")
