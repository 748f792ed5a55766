"""A daemon without memory or storage in a process of its own: the real wire, the real server, and a MemoryCore.

    with serving(endpoint) as process: ...

Tasks whose id begins with `held` are admitted and not answered; for `busy` the daemon is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from tests.support.memory_core import MemoryCore, serve
from transferd.config import ServerSection
from transferd.tasks import Task
from transferd.wire.transport import ZmqServerTransport


class HoldsSome(MemoryCore):
    """Holds the tasks that ask for it."""

    def submit(self, client: bytes, seq: int, task: Task, *, again: bool = False) -> bool:
        self.busy = task.task_id.startswith("busy")
        self.hold = task.task_id.startswith("held")
        return super().submit(client, seq, task, again=again)


@contextlib.contextmanager
def serving(endpoint: str, boot_id: str = "boot-1", *, ready: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """Start it, wait until it listens, and kill it at the end."""
    command = [sys.executable, "-m", __name__, endpoint, boot_id, "ready" if ready else "never ready"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listening\n"
            yield process
        finally:
            process.kill()


async def _serve(endpoint: str, boot_id: str, ready: str) -> None:
    core = HoldsSome(boot_id)
    core.ready = ready == "ready"
    core.cache.why = "" if core.ready else "no engine has offered memory"
    server = serve(ZmqServerTransport(ServerSection(endpoint=endpoint)), core)
    await server.start()
    print("listening", flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads the pipe any more: a log would fill it and hang us
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
