"""A circuit breaker: after a failure of the whole backend, calls fail at once instead of waiting for a timeout each.

    closed     calls go through
    open       calls fail at once; a probe starts `probe_interval` seconds later
    half_open  the probe runs; calls still fail at once

`failed` opens it, after an answer that means that the backend is unavailable, or when a call is overdue. A
successful probe closes it. While open it probes, one probe at a time, until one succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from transferd.errors import StorageError, StorageUnavailable
from transferd.runtime.compat import StrEnum

log = structlog.get_logger(__name__)


class BreakerState(StrEnum):
    """Whether calls go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(eq=False)
class CircuitBreaker:
    """Guards one backend, on one event loop.

    probe: makes a cheap call to the backend. Raises StorageError if it does not answer. It bounds its own time.
    opens: called each time it opens.
    """

    _name: str
    _probe: Callable[[], Awaitable[object]]
    _probe_interval: float
    _opens: Callable[[], None] = lambda: None
    state: BreakerState = BreakerState.CLOSED
    opened: int = 0  # how often it has opened
    reason: str = ""  # the last failure; empty while closed
    _probing: asyncio.Task[None] | None = None
    _watching: asyncio.Task[None] | None = None
    _over: bool = False

    def watch(self, ask: Callable[[], Awaitable[object]], interval: float) -> None:
        """Ask `interval` seconds after each answer until `close`, so that an outage is noticed even when no task runs.

        ask: bounds its time, runs to its end even if it is cancelled, and calls `failed` before it raises StorageError.
        """
        self._watching = asyncio.get_running_loop().create_task(self._watch(ask, interval))

    def check(self) -> None:
        """Raise StorageUnavailable unless closed."""
        if self.state is not BreakerState.CLOSED:
            raise self.refusal()

    def refusal(self) -> StorageUnavailable:
        """The error of a call while it is not closed."""
        return StorageUnavailable(
            f"{self._name} does not answer ({self.reason}); calls fail at once until a background probe succeeds"
        )

    def failed(self, reason: str) -> None:
        """Report that the whole backend did not answer."""
        if self._over:
            return
        self.reason = reason
        if self.state is BreakerState.CLOSED:
            self.state = BreakerState.OPEN
            self.opened += 1
            log.warning("storage does not answer: failing fast until it does", backend=self._name, reason=reason)
            self._probing = asyncio.get_running_loop().create_task(self._probe_until_answered())
            self._opens()

    def statistics(self) -> dict[str, str | int]:
        return {"breaker": str(self.state), "breaker_opened": self.opened, "breaker_reason": self.reason}

    async def close(self) -> None:
        """Stop probing, and wait until a running probe has ended. For shutdown. Idempotent."""
        self._over = True
        if self._watching is not None:
            self._watching.cancel()
        if self._probing is not None:
            if self.state is BreakerState.OPEN:
                self._probing.cancel()
            await asyncio.wait([self._probing])

    async def _watch(self, ask: Callable[[], Awaitable[object]], interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            await self._problem(ask)

    async def _probe_until_answered(self) -> None:
        while not self._over:
            await asyncio.sleep(self._probe_interval)
            self.state = BreakerState.HALF_OPEN
            self.reason = await self._problem(self._probe)
            if not self.reason:
                self.state = BreakerState.CLOSED
                log.info("storage answers again", backend=self._name)
                return
            self.state = BreakerState.OPEN

    async def _problem(self, ask: Callable[[], Awaitable[object]]) -> str:
        """Why the backend does not answer this; "" if it does."""
        try:
            await ask()
        except StorageError as error:
            return str(error) or "no reason given"
        except Exception as error:  # a bug; the probes go on, or calls would fail until the daemon's end
            log.exception("a probe of storage failed unexpectedly (bug)", backend=self._name)
            return f"{type(error).__name__}: {error}"
        return ""
