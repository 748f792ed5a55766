"""A task of one tiny block by an asyncio client, as `transferd bench control` has it; or the bare echo beside it.

python -m benchmarks.peers.transferd_tasks swap | echo
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import tempfile
import time
from pathlib import Path

import uvloop
import zmq

from benchmarks.peers.program import Caller, Order, serve
from transferd import Client, Status
from transferd.cli.bench.control import Echo, TaskMaker, config, echo
from transferd.client.launch import running
from transferd.runtime.compat import Runner


class Swap(Caller):
    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._tasks = TaskMaker()

    def prepare(self, order: Order) -> str:  # noqa: ARG002 -- it moves one tiny block
        place = self._open.enter_context(tempfile.TemporaryDirectory(prefix="transferd-peers-"))
        daemon = self._open.enter_context(running(config(1), Path(place)))
        self._runner = self._open.enter_context(Runner(loop_factory=uvloop.new_event_loop))
        self._client = Client(daemon.endpoint)
        self._runner.run(self._client.connect())
        self._open.callback(lambda: self._runner.run(self._client.close()))
        self._runner.run(self._client.attach(0))
        return f"transferd {importlib.metadata.version('transferd')}"

    def calls(self, count: int) -> list[float]:
        return self._runner.run(self._calls(count))

    def close(self) -> None:
        self._open.close()

    async def _calls(self, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            task = self._tasks.swap()
            before = time.perf_counter()
            result = await self._client.submit(task)
            taken.append(time.perf_counter() - before)
            if result.status is not Status.OK or result.task_id != task.task_id:
                raise OSError(f"the task ended badly: {result}")
        return taken


class Bare(Caller):
    def __init__(self) -> None:
        self._open = contextlib.ExitStack()

    def prepare(self, order: Order) -> str:  # noqa: ARG002
        place = self._open.enter_context(tempfile.TemporaryDirectory(prefix="transferd-peers-"))
        self._echo: Echo = self._open.enter_context(echo(Path(place)))
        return f"pyzmq {zmq.__version__}"

    def calls(self, count: int) -> list[float]:
        return [self._echo.round_trip_us(1) / 1e6 for _ in range(count)]

    def close(self) -> None:
        self._open.close()


if __name__ == "__main__":
    serve(Bare() if sys.argv[1] == "echo" else Swap())
