"""A real Mooncake pool on loopback, for tests, demos and benchmarks: a master, and processes that lend memory.

    with Master(directory / "master.log") as master, Lender(master, 64 * 1024**2, directory / "lender.log"):
        ...

Join at `master.address`. Both can be stopped and restarted.
"""

from __future__ import annotations

import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from transferd.cli.pool.master import free_port, master_command, wheel_program
from transferd.errors import TransferError
from transferd.runtime.compat import Self

START_TIMEOUT_S = 20.0
HTTP_TIMEOUT_S = 5.0


class _Process:
    """A program of the wheel, with its output in a file. A context manager; owns the process from `start` to `stop`."""

    def __init__(self, program: str, log_file: Path) -> None:
        self._program = program
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self) -> Sequence[str]:
        """The command line. Raises TransferError if the program is not installed."""
        raise NotImplementedError

    def _is_up(self) -> bool:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """The process id. Raises RuntimeError if it is not running."""
        if self._process is None:
            raise RuntimeError(f"{self._program} is not running")
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until it is up. Raises RuntimeError with the end of its log."""
        with self._log_file.open("ab") as log:
            self._process = process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if not wait_until(lambda: process.poll() is not None or self._is_up()) or process.poll() is not None:
            self.stop()
            log_end = self._log_file.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self._program} did not start: {log_end}")

    def stop(self) -> None:
        """Kill the process (SIGKILL) and wait until it has ended. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Master(_Process):
    """A master, restartable on the same ports.

    lease_ttl: how long a lookup protects an object from eviction, such as "2s".
    """

    def __init__(self, log_file: Path, lease_ttl: str = "2s") -> None:
        super().__init__("mooncake_master", log_file)
        self.port, self.metrics_port = free_port(), free_port()
        self._lease_ttl = lease_ttl

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def segments(self) -> list[str]:
        """The names of the segments lent to it. Raises OSError if it does not answer."""
        return self._page("/get_all_segments").split()

    def counter(self, name: str) -> int:
        """The value of one of its metrics. Raises OSError if it does not answer, KeyError for an unknown metric."""
        found = re.search(rf"^{re.escape(name)} (\d+)", self._page("/metrics"), re.MULTILINE)
        if found is None:
            raise KeyError(name)
        return int(found[1])

    def _page(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=HTTP_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text

    def _command(self) -> Sequence[str]:
        return master_command("127.0.0.1", self.port, self.metrics_port, self._lease_ttl)

    def _is_up(self) -> bool:
        with socket.socket() as dial:
            dial.settimeout(0.2)
            if dial.connect_ex(("127.0.0.1", self.port)) != 0:
                return False
        try:
            self.segments()
        except OSError:
            return False
        return True


class Lender(_Process):
    """A node of the pool that only lends memory: `nbytes` of it, at least 16 MiB, in one segment."""

    def __init__(self, master: Master, nbytes: int, log_file: Path) -> None:
        super().__init__("mooncake_client", log_file)
        self._master = master
        self._nbytes = nbytes
        self._known: set[str] = set()

    def start(self) -> None:
        self._known = set(self._master.segments())
        super().start()

    def _command(self) -> Sequence[str]:
        executable = wheel_program("mooncake_client")
        if executable is None:
            raise TransferError("mooncake_client is not installed")
        return [
            executable,
            "--host=127.0.0.1",
            f"--port={free_port()}",
            f"--master_server_address={self._master.address}",
            "--metadata_server=P2PHANDSHAKE",
            f"--global_segment_size={self._nbytes}",
            "--local_buffer_size=0",
            "--logtostderr=true",
        ]

    def _is_up(self) -> bool:
        return bool(set(self._master.segments()) - self._known)


def wait_until(condition: Callable[[], bool], timeout: float = START_TIMEOUT_S) -> bool:
    """Check every 20 ms until the condition holds. False if it does not in time."""
    give_up, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        if time.monotonic() > give_up:
            return False
        pause.wait(0.02)
    return True
