"""A real `mooncake_master` on loopback, started for a test or a demo and stopped by its pid."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

from transferd.pool.master import free_port, master_command, master_executable

__all__ = ["Master", "free_port", "master_executable"]

START_TIMEOUT_S = 20.0


class Master:
    """A master process. Restartable on the same ports; owns the process until `stop`."""

    def __init__(self, log_file: Path, lease_ttl: str = "2s") -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self._log_file = log_file
        self._lease_ttl = lease_ttl
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until it listens. Raises RuntimeError with the log's end."""
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                master_command("127.0.0.1", self.port, self.metrics_port, self._lease_ttl),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        give_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up and self._process.poll() is None:
            with socket.socket() as dial:
                dial.settimeout(0.2)
                if dial.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            self._wait_a_moment()
        self.stop()
        raise RuntimeError(f"mooncake_master did not start: {self._log_file.read_text(errors='replace')[-2000:]}")

    def _wait_a_moment(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(0.05)
            except subprocess.TimeoutExpired:
                return

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """SIGKILL, and wait until it is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
