"""A circuit breaker: after a failure of the whole backend, calls fail at once instead of waiting for a timeout each.

    closed     calls go through
    open       calls fail at once; a probe starts `probe_interval` seconds later
    half_open  the probe runs; calls still fail at once

`failed` opens it, after an answer that means that the backend is unavailable, or when a call is overdue. A
successful probe closes it. While closed it costs nothing: no timer, no task. While open it probes, one probe at a
time, until one succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from transferd.errors import StorageError, StorageUnavailable
from transferd.runtime.compat import StrEnum

log = structlog.get_logger(__name__)


class BreakerState(StrEnum):
    """Whether calls go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Guards one backend, on one event loop.

    probe: makes a cheap call to the backend. Returns True if it answered; otherwise returns False or raises
        StorageError. It bounds its own time.
    opens: called each time it opens.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], Awaitable[bool]],
        probe_interval: float,
        opens: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0  # how often it has opened
        self.reason = ""  # the last failure; empty while closed
        self._name = name
        self._probe = probe
        self._probe_interval = probe_interval
        self._opens = opens
        self._timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Task[None] | None = None
        self._over = False

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
            self._probe_later()
            self._opens()

    async def close(self) -> None:
        """Stop probing, and wait until a running probe has ended. For shutdown. Idempotent."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._probing is not None:
            await asyncio.wait([self._probing])

    def _probe_later(self) -> None:
        if not self._over:
            self._timer = asyncio.get_running_loop().call_later(self._probe_interval, self._start_probe)

    def _start_probe(self) -> None:
        self.state = BreakerState.HALF_OPEN
        self._probing = asyncio.get_running_loop().create_task(self._run_probe())

    async def _run_probe(self) -> None:
        try:
            answered = await self._probe()
        except StorageError as error:
            answered, self.reason = False, str(error)
        except Exception as error:  # a bug; the probes go on, or calls would fail until the daemon's end
            log.exception("a probe of storage failed unexpectedly (bug)", backend=self._name)
            answered, self.reason = False, f"{type(error).__name__}: {error}"
        if answered:
            self.state, self.reason = BreakerState.CLOSED, ""
            log.info("storage answers again", backend=self._name)
        else:
            self.state = BreakerState.OPEN
            self._probe_later()
