"""A real control group with a memory limit, of version 1 or 2, for a process that a test has started."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from transferd.runtime import limits


class MemoryGroup:
    def __init__(self, path: Path) -> None:
        self.path = path

    def take(self, pid: int) -> None:
        """Move a process into it. Memory that the process has already counts where it was made."""
        (self.path / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """A group below this process's own. Skips the test where none can be made. Its processes must have ended."""
    parent = next((one for one, _ in limits._directories("memory")), None)
    if os.geteuid() != 0 or parent is None:
        pytest.skip("only root, with a control group that limits memory, can make another")
    made = parent / f"transferd-test-{secrets.token_hex(4)}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        files = [made / one for one in ("memory.max", "memory.limit_in_bytes") if (made / one).exists()]
        if not files:
            pytest.skip("new control groups have no memory limit here")
        files[0].write_text(str(limit))
        yield MemoryGroup(made)
    finally:
        with contextlib.suppress(OSError):
            made.rmdir()
