"""The loan of a task's blocks to I/O threads, which ends with the task."""

from __future__ import annotations

import asyncio
import threading


class Loan:
    """The right of I/O threads to touch a task's blocks. After `end`, no thread touches them."""

    __slots__ = ("_holders", "_lock", "_returned", "over")

    def __init__(self) -> None:
        self.over = False
        self._holders = 0
        self._lock = threading.Lock()
        self._returned: asyncio.Future[None] | None = None  # set if `end` waits

    def take(self) -> bool:
        """Call in a thread before it touches a block, then call `give_back`. False: it must not touch the block."""
        with self._lock:
            self._holders += not self.over
            return not self.over

    def give_back(self) -> None:
        with self._lock:
            self._holders -= 1
            returned = None if self._holders else self._returned
        if returned is not None:
            returned.get_loop().call_soon_threadsafe(returned.set_result, None)

    def end(self) -> asyncio.Future[None] | None:
        """End it. Returns a future of when no thread touches a block any more; None: that is so now.

        A thread touches a block only while it copies memory, never during I/O.
        """
        with self._lock:
            self.over = True
            if self._holders:
                self._returned = asyncio.get_running_loop().create_future()
        return self._returned
