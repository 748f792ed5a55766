"""The loan of a task's blocks to I/O threads, which ends with the task."""

from __future__ import annotations

import asyncio
import contextlib
import threading

with contextlib.suppress(ImportError):  # the installation had no compiler: nobody asks for `word`
    from transferd.workers import _inplace


class Loan:
    """The right of I/O threads to touch a task's blocks. After `end`, no thread touches them.

    The extension takes it without Python's lock: `word` counts those holders.
    """

    __slots__ = ("_holders", "_lock", "_returned", "_word", "over")

    def __init__(self) -> None:
        self.over = False
        self._holders = 0
        self._lock = threading.Lock()
        self._returned: asyncio.Future[None] | None = None  # set if `end` waits
        self._word: bytearray | None = None

    def take(self) -> bool:
        """Call in a thread before it touches a block, then call `give_back`. False: it must not touch the block."""
        with self._lock:
            self._holders += not self.over
            return not self.over

    def give_back(self) -> None:
        with self._lock:
            self._holders -= 1
            waited_for = self._returned is not None
        if waited_for:
            self.tell_end()

    @property
    def word(self) -> bytearray:
        """For the extension, which takes the loan itself. In a thread; call `tell_end` after its last call."""
        with self._lock:
            if self._word is None:
                self._word = bytearray(8)
                if self.over:
                    _inplace.end_loan(self._word)
            return self._word

    def tell_end(self) -> None:
        """In a thread that holds nothing any more: tell `end` if it was the last one."""
        with self._lock:
            returned = self._returned
            if returned is None or self._holders or (self._word is not None and _inplace.end_loan(self._word)):
                return
            self._returned = None
        returned.get_loop().call_soon_threadsafe(returned.set_result, None)

    def end(self) -> asyncio.Future[None] | None:
        """End it. Returns a future of when no thread touches a block any more; None: that is so now.

        A thread touches a block only while it copies memory, never during I/O.
        """
        with self._lock:
            self.over = True
            holders = self._holders
            if self._word is not None:
                holders += _inplace.end_loan(self._word)
            if holders:
                self._returned = asyncio.get_running_loop().create_future()
            return self._returned
