"""The steps of a shutdown under one time budget: no step is skipped, and none takes longer than the budget allows.

A step that does not end in time is abandoned with everything that it uses: `hanging` names it, and the process must
exit without waiting for it (process.py). Its memory is not freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from transferd.errors import StillRunning
from transferd.runtime.aio import Background
from transferd.runtime.clock import Clock

log = structlog.get_logger(__name__)

LEAST_S = 1.0  # for each step after the budget is used up: a step that does not hang ends well within it
LOOK_S = 0.25  # how soon we notice that a second signal has shortened the budget


class Shutdown:
    """Runs the steps.

    hanging: names of steps that did not end.
    errors: what the other steps raised.

    budget_s: returns the seconds left for all steps. Called before and during each wait, so that a second signal can
    shorten it.
    """

    def __init__(self, budget_s: Callable[[], float], clock: Clock) -> None:
        self.hanging: list[str] = []
        self.errors: list[Exception] = []
        self._budget_s = budget_s
        self._now = clock.monotonic
        self._left_behind = Background()

    async def within(self, seconds: float, waiting: Coroutine[Any, Any, None]) -> bool:
        """Wait at most `seconds`. Returns False if `waiting` has not ended by then."""
        task = asyncio.ensure_future(waiting)
        if await self._ended(task, seconds, least=0.0):
            task.result()
            return True
        task.cancel()
        return False

    async def step(self, name: str, work: Awaitable[None]) -> bool:
        """Do one step. Returns True if it has ended, perhaps with an error; False if it hangs and was abandoned."""
        task = asyncio.ensure_future(work)
        if not await self._ended(task, self._budget_s(), least=LEAST_S):
            self._left_behind.begin(task)
            self._hangs(name)
            return False
        try:
            task.result()
        except StillRunning as error:
            self._hangs(f"{name}: {error}")
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the steps after it still have to happen
            log.warning("shutdown step failed", step=name, error=repr(error))
            self.errors.append(error)
        return True

    def _hangs(self, what: str) -> None:
        log.error("shutdown step hangs; abandoning it and the memory it uses", step=what)
        self.hanging.append(what)

    async def _ended(self, task: asyncio.Future[Any], seconds: float, *, least: float) -> bool:
        began = self._now()
        while not task.done():
            passed = self._now() - began
            left = max(min(seconds - passed, self._budget_s()), least - passed)  # the budget falls by itself
            if left <= 0:
                return False
            await asyncio.wait({task}, timeout=min(left, LOOK_S))
        return True
