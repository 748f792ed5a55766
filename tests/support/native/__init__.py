"""Faults in the real process: a small C library, preloaded, that makes calls of the C library fail (faults.c).

`environment()` compiles it if need be, and says how to start a process under it. In that process `Faults` arms it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("faults.c")
ROOT = Path(__file__).parent.parent.parent.parent
BUILT = ROOT / "build" / "tests"
SHORT = 0  # in place of an errno: half of the bytes
NEVER = -1  # in place of an errno: the call does not return


def under(fault: str, path: str = "") -> list[str]:
    """A command's prefix that puts it under the library."""
    return ["env", *(f"{key}={value}" for key, value in environment(fault, path).items() if value)]


@functools.cache
def library() -> Path:
    """The compiled library. Skips the test, with the reason, where it cannot be made."""
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD is Linux's")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the faults library cannot be made")
    made_of = SOURCE.read_bytes() + f"{compiler} {os.uname().machine}".encode()
    made = BUILT / f"faults-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not made.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as directory:  # other test processes may make it at the same time
            part = Path(directory) / made.name
            command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(part), str(SOURCE), "-ldl"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            part.replace(made)
    return made


def environment(fault: str = "", path: str = "") -> dict[str, str]:
    """The environment of a process under the library.

    fault: "call:skip:count:errno", armed from its first instruction. path: as in `Faults.armed`.
    """
    return {
        **os.environ,
        "TRANSFERD_FAULT_PATH": path,
        "LD_PRELOAD": str(library()),
        "TRANSFERD_FAULT": fault,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def run(program: str, *arguments: str, timeout: float = 120, **more: str) -> str:
    """Run a Python program under the library; its standard output. Fails when it fails."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment() | more,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Faults:
    """The library of this process, which was started under it. See faults.c for the names of calls."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    @contextmanager
    def armed(self, call: str, error: int, *, skip: int = 0, count: int = 1, path: str = "") -> Iterator[None]:
        """Let `skip` such calls pass, fail the next `count` (-1: all). path: only of files whose path has it."""
        self._library.faults_path(path.encode())
        self._library.faults_arm(call.encode(), skip, count, error)
        try:
            yield
        finally:
            self._library.faults_disarm()

    @property
    def hits(self) -> int:
        """How many calls failed since the last `armed`."""
        return int(self._library.faults_hits())
