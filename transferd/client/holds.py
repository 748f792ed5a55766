"""A client's pause and drain: they outlive its connections and end when it resumes or closes."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from transferd.errors import TransferError
from transferd.wire import protocol as wire

Ask = Callable[[wire.Control, float], Awaitable[Any]]
QUIET_TIMEOUT_S = 24 * 3600.0  # a pause and a drain wait for tasks, which have their own deadlines


class Holds:
    """A client's pause and drain. ask: sends a request and returns its value, or raises TransferError.

    A client that was created before a fork is a different holder in each process: one process must not end the pause
    of another.
    """

    def __init__(self, name: str, fresh_id: Callable[[], str], ask: Ask) -> None:
        self._name = name[:64]
        self._fresh_id = fresh_id
        self._known_as: tuple[int, str, str] = 0, "", ""  # process id; the holder's name and proof in that process
        self._ask = ask
        self._held: set[wire.Control] = set()
        self._resumes = 0

    async def pause(self) -> None:
        await self._hold(wire.Pause(*self._holder()))

    async def drain(self) -> None:
        await self._hold(wire.Drain(*self._holder()))

    async def _hold(self, hold: wire.Pause | wire.Drain) -> None:
        held, resumes = True, self._resumes
        try:
            await self._ask(hold, QUIET_TIMEOUT_S)
        except TransferError:
            held = False
            raise
        finally:
            if held and resumes == self._resumes:  # else `resume` was called meanwhile
                self._held.add(hold)

    async def resume(self, timeout: float) -> None:
        self.clear()
        await self._ask(wire.Resume(*self._holder()), timeout)

    def clear(self) -> None:
        """Forget the pause and the drain: they were resumed, or the client is closed."""
        self._resumes += 1
        self._held.clear()

    def again(self) -> list[wire.Control]:
        """The requests to repeat in a new session."""
        return list(self._held)

    def _holder(self) -> tuple[str, str]:
        process = os.getpid()
        if self._known_as[0] != process:
            name = f"{self._name or f'pid {process}'} ({self._fresh_id()[:8]})"
            self._known_as = process, name, self._fresh_id()
        return self._known_as[1:]
