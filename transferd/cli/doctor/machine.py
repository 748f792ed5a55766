"""What the doctor inspects. Each question is one method, so that a test can replace the answers."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import resource
import socket
from pathlib import Path

from transferd.runtime.descriptors import CAP_IPC_LOCK, CAP_SYS_RESOURCE, has_capability
from transferd.runtime.limits import ControlGroup, pids_left
from transferd.storage.file_io import direct_io_problem

NO_LIMIT = 2**63
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized


class Machine:
    """This machine. Nothing here leaves a trace, and nothing waits for longer than a second."""

    def text(self, path: str) -> str | None:
        """The text of a small file in /proc or /sys; None if it does not exist."""
        try:
            return Path(path).read_text(errors="replace").strip()
        except OSError:
            return None

    def entries(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def limit(self, name: str) -> int:
        """A soft limit by its name in the resource module: "NOFILE"."""
        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        return NO_LIMIT if soft == resource.RLIM_INFINITY else soft

    def hard_limit(self, name: str) -> int:
        _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        return NO_LIMIT if hard == resource.RLIM_INFINITY else hard

    def may_lock_any_memory(self) -> bool:
        return has_capability(CAP_IPC_LOCK)

    def has_no_thread_limit(self) -> bool:
        """Whether RLIMIT_NPROC does not apply to this process."""
        return os.geteuid() == 0 or has_capability(CAP_SYS_RESOURCE)

    def fewest_pids(self) -> ControlGroup | None:
        """The control group in which fewest threads can still start; None if none limits them."""
        return pids_left()

    def space(self, path: str) -> tuple[int, int]:
        """(total, free for this user) bytes of the file system that a path is in, or would be."""
        found = os.statvfs(self.existing(path))
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def existing(self, path: str) -> str:
        """The longest part of the path that exists."""
        there = Path(path).absolute()
        while not there.exists() and there != there.parent:
            there = there.parent
        return str(there)

    def writable(self, path: str) -> bool:
        return os.access(path, os.W_OK | os.X_OK)

    def variable(self, name: str) -> str:
        """An environment variable; "" if it is not set."""
        return os.environ.get(name, "")

    def user(self) -> int:
        return os.geteuid()

    def direct_io(self, directory: str) -> str:
        """See `direct_io_problem`."""
        return direct_io_problem(directory)

    def file_system(self, path: str) -> str:
        """The type of the file system that a path is in, from the mount point that is the longest prefix of it."""
        best, kind = "", ""
        for line in (self.text("/proc/self/mountinfo") or "").splitlines():
            before, _, after = line.partition(" - ")
            point = before.split()[4].replace("\\040", " ")
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, after.split()[0]
        return kind

    def tasks_of_user(self) -> int:
        """The number of this user's threads, in all processes that we can see."""
        count = 0
        for entry in self.entries("/proc"):
            if entry.isdigit():
                status = self.text(f"/proc/{entry}/status") or ""
                words = {key: value.split() for key, _, value in (line.partition(":") for line in status.splitlines())}
                if words.get("Uid", ["-1"])[0] == str(os.getuid()):
                    count += int(words.get("Threads", ["1"])[0])
        return count

    def package(self, name: str) -> str | None:
        """The version of an installed distribution; None if it is not installed."""
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def module(self, name: str) -> bool:
        """Whether a module can be found. Imports at most its parent packages."""
        try:
            return importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            return False

    def connects(self, host: str, port: int) -> str:
        """Why a tcp connection to that address fails within a second; "" if it succeeds."""
        try:
            with socket.create_connection((host, port), timeout=1.0):
                return ""
        except OSError as error:
            return error.strerror or str(error)

    def clock_synchronized(self) -> bool | None:
        """Whether the kernel's clock follows a time server; None if the kernel does not say."""
        try:
            return bool(
                ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(256)) != _TIME_ERROR
            )  # modes 0: only read
        except (OSError, AttributeError):
            return None
