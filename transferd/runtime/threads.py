"""The seam for work that must not run on the event loop: copies, checksums, blocking calls.

Two pools, one for each direction, so that a burst of stores never keeps a load waiting for a
thread. A simulation hands in its own Offload that runs the function at a virtual time of its choice.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Direction(enum.Enum):
    """Out of the device (stores) or into it (loads)."""

    OUT = "out"
    IN = "in"


class Offload(Protocol):
    """Runs a plain function away from the loop. A started function always runs to its end."""

    def run(self, direction: Direction, function: Callable[[], T]) -> asyncio.Future[T]: ...
    def close(self) -> None: ...


class ThreadOffload:
    """Offload on two thread pools. Owns the threads; close() waits for what runs (bounded by a copy)."""

    def __init__(self, threads_per_direction: int) -> None:
        self._pools = {
            direction: ThreadPoolExecutor(threads_per_direction, thread_name_prefix=f"transferd-{direction.value}")
            for direction in Direction
        }

    def run(self, direction: Direction, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pools[direction], _run_once, [function])

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)


def _run_once(box: list[Callable[[], T]]) -> T:
    """Run what is in the box. The thread lets go of it, and of the memory it works on, before its result is known."""
    return box.pop()()
