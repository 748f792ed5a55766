"""A daemon whose loads can be held halfway: for tests that kill an engine at exactly that moment.

It runs the real file storage with a gate in it. While the file that HOLD names is there, each load stops once half
of its objects have been read, and makes the file REACHED beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transferd import Client
from transferd.client.launch import DaemonProcess, running
from transferd.storage.base import Drainer, Item, Outcome
from transferd.storage.file import FileStorage

HOLD = "TRANSFERD_TEST_HOLD"  # environment of the daemon
REACHED = "reached"
STAGING = "256KiB"  # less than a load, so that some of its blocks are in the engine's memory when it is held
ENGINES_MEMORY = ("/dev/shm/torch_", "/dev/shm/vllm_offload_")
POLL_S = 0.02
WAIT_S = 120.0  # on a busy machine


class HeldFile(FileStorage):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.slots_at_once = None  # so that loads go by slots

    def place_of(self, _name: str) -> None:
        """Nobody reads its files himself: each load is the daemon's."""

    async def load(self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        assert drain is None
        hold, middle = Path(os.environ[HOLD]), (len(items) + 1) // 2
        outcomes = list(await super().load(items[:middle], None, slots[:middle]))
        while hold.exists():
            hold.with_name(REACHED).touch()
            await asyncio.sleep(POLL_S)
        rest = await super().load(items[middle:], None, slots[middle:]) if items[middle:] else []
        return [*outcomes, *rest]


class HoldingDaemon:
    def __init__(self, process: DaemonProcess, hold: Path) -> None:
        self._process, self._hold = process, hold
        self.endpoint = process.endpoint

    def hold(self) -> None:
        self._hold.touch()

    def reached(self) -> None:
        """Wait until a load stands halfway."""
        _until(self._hold.with_name(REACHED).exists)

    def release(self) -> None:
        self._hold.unlink()

    def stats(self) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            async with Client(self.endpoint, await_ready=False) as client:
                return await client.stats()

        return asyncio.run(ask())

    def noticed(self) -> None:
        """Wait until it knows that a client is gone that did not say good-bye."""
        _until(lambda: self.stats()["server"]["clients_lost"] > 0)

    def clean(self) -> None:
        """Wait until nothing of any engine is left: no task, no claim, no memory, no damaged object."""
        _until(lambda: not self._left(), lambda: str(self._left()))

    def _left(self) -> dict[str, Any]:
        stats = self.stats()
        counts = {name: stats[name] for name in ("queued", "running", "straggling", "engines", "engines_leaving")}
        counts |= {f"barrier {name}": stats["barrier"][name] for name in ("open", "owing")}
        counts |= {"staging": stats["staging"]["used"], "host memory": stats["host"]["budget"]["taken"]}
        counts |= {name: stats["storage"][name] for name in ("in_flight_bytes", "corrupt")}
        maps = Path(f"/proc/{self._process.pid}/maps").read_text(encoding="ascii")
        counts |= {"mapped": [line for line in maps.splitlines() if any(name in line for name in ENGINES_MEMORY)]}
        return {name: count for name, count in counts.items() if count}


@contextlib.contextmanager
def holding(place: Path, client_timeout: float = 5.0) -> Iterator[HoldingDaemon]:
    """place: gets the daemon's socket, blocks and log. client_timeout: seconds until it misses an engine."""
    hold = place / "hold"
    tree = {
        "server": {"client_timeout": client_timeout},
        "host": {"staging": STAGING},
        "storage": {"backend": "tests.machine.with_vllm.held:HeldFile"},
    }
    os.environ[HOLD] = str(hold)
    try:
        with running(tree, place) as process:
            yield HoldingDaemon(process, hold)
    finally:
        del os.environ[HOLD]


def _until(true: Callable[[], bool], what: Callable[[], str] = str) -> None:
    give_up = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < give_up, what()
        time.sleep(POLL_S)
