"""Stop a process and let it continue, by signal or by a cgroup."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.support.waits import wait_until
from transferd.client import heartbeat


def freeze(pid: int) -> None:
    """SIGSTOP a child of this process, and wait until all its threads have stopped. The signal alone does not wait."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def thaw(pid: int) -> None:
    """SIGCONT: the process continues, with its connections."""
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def noticed_soon() -> Iterator[None]:
    """Clients of this process give up a silent daemon after a second or two, and not after 5 or 16 s.

    For a wait under a daemon that stands still, beside no other one: a busy daemon is silent for as long.
    """
    with mock.patch.object(heartbeat, "SILENCE_S", 0.5), mock.patch.object(heartbeat, "SLOW_S", 1.0):
        yield


class Freezer:
    """A cgroup that stops processes as `docker pause` does: they get no signal, and cannot know. Version 1 or 2.

    Raises OSError where this process may not make one.
    """

    def __init__(self, name: str) -> None:
        first = Path("/sys/fs/cgroup/freezer")
        root = first if first.is_dir() else Path("/sys/fs/cgroup")
        self._place = root / f"transferd-test-{os.getpid()}-{name}"
        self._place.mkdir()
        self._state = self._place / ("freezer.state" if first.is_dir() else "cgroup.freeze")
        self._words = ("FROZEN", "THAWED") if first.is_dir() else ("1", "0")
        self._root = root

    def freeze(self, pid: int) -> None:
        """Stop a process, and wait until all its threads have stopped."""
        (self._place / "cgroup.procs").write_text(str(pid))
        self._state.write_text(self._words[0])
        wait_until(self._frozen, "the freezer has stopped it")

    def _frozen(self) -> bool:
        if self._words[0] == "FROZEN":
            return self._state.read_text().strip() == "FROZEN"
        return "frozen 1" in (self._place / "cgroup.events").read_text()

    def thaw(self) -> None:
        self._state.write_text(self._words[1])

    def close(self) -> None:
        """Let everything continue, and remove the cgroup."""
        self.thaw()
        for pid in (self._place / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (self._root / "cgroup.procs").write_text(pid)
        wait_until(self._removed, "the cgroup is empty")

    def _removed(self) -> bool:
        try:
            self._place.rmdir()
        except OSError:
            return False
        return True
