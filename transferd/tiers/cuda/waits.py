"""Keeps calls that free memory apart from streams that wait for another process.

While a stream of a context waits for an engine's word or event, cuMemFree and cuMemHostUnregister also wait, and hold
the context's lock: no other call of the context ends, not even the copy that would end the wait (measured on an H100
with driver 580, `make gpu-check`: calls_beside_a_pending_wait). A leaving engine would stop every copy of the others on
its GPU, for ever if a stream waits for an engine that has died. So the daemon makes such calls only while no stream of
the context waits, and a new wait begins after them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.owned import CopyHung

PATIENCE_S = 30.0  # how long closing waits for the steps of engines
# New waits stay behind a call only until the oldest wait has lasted this long. So a call gets its turn where waits
# overlap without end, and an engine that hangs delays the others' new waits once, however many calls wait for it.
BEHIND_S = 0.5


class WaitLasts(CopyHung):
    """The wait for an engine's step took too long."""


class ForeignWaits:
    """The waits of one context for other processes. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun: dict[object, float] = {}  # when each wait began, the oldest first
        self._calls = 0  # calls that free memory now
        self._wanted = 0  # such calls that wait for their turn

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, a stream may wait for another process."""
        this = object()
        with self._changed:
            oldest = next(iter(self._begun.values()), 0.0)
            self._changed.wait_for(lambda: not self._wanted, max(0.0, oldest + BEHIND_S - time.monotonic()))
            self._changed.wait_for(lambda: not self._calls)
            self._begun[this] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del self._begun[this]
                self._changed.notify_all()

    @contextmanager
    def apart(self, what: str, patience: float | None = None) -> Iterator[None]:
        """Within, no stream of the context waits for another process. Blocks until then.

        patience: seconds, or None for no limit; after that this raises WaitLasts.
        what: the call that has to wait, in words for that error.
        """
        with self._changed:
            self._wanted += 1
            try:
                if not self._changed.wait_for(lambda: not self._begun, patience):
                    raise WaitLasts(
                        f"{what}: not yet, because for {patience:.0f} s a task has waited for an engine's step on this "
                        "GPU; it is done when that wait ends"
                    )
                self._calls += 1
            finally:
                self._wanted -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()


_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[Driver, dict[int, ForeignWaits]] = weakref.WeakKeyDictionary()


def waits_of(driver: Driver, context: int) -> ForeignWaits:
    """The waits of this context: one object for the whole process."""
    with _lock:
        return _known.setdefault(driver, {}).setdefault(context, ForeignWaits())
