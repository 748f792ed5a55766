"""Keeps calls that free memory apart from streams that wait for another process.

While a stream of a context waits for an engine's word or event, cuMemFree and cuMemHostUnregister wait, too, and hold
the context's lock meanwhile: no other call of the context ends, not even the copy that would end the wait (measured
on an H100 with driver 580, `make gpu-check`: calls_beside_a_pending_wait). One engine that leaves would stop every copy
of the others on its GPU, and an engine that died while it was waited for would stop them for ever. So such calls are
made only while no stream of the context waits, and a wait that begins meanwhile begins after them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.owned import CopyHung

PATIENCE_S = 30.0  # how long closing waits for the steps of engines
# For how long a new wait stays behind a call that waits for older ones. So a call gets its turn where waits overlap
# without end, and an engine that hangs delays the others' new waits by no more than this.
BEHIND_S = 0.5


class WaitLasts(CopyHung):
    """An engine's step was waited for too long."""


class ForeignWaits:
    """Those of one context. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits = 0
        self._calls = 0  # that are being made
        self._wanted = 0  # that wait for their turn

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, a stream may wait for another process."""
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted, BEHIND_S)
            self._changed.wait_for(lambda: not self._calls)
            self._waits += 1
        try:
            yield
        finally:
            with self._changed:
                self._waits -= 1
                self._changed.notify_all()

    @contextmanager
    def apart(self, what: str, patience: float | None = None) -> Iterator[None]:
        """Within, no stream of the context waits for another process. Blocks until then.

        patience: seconds; None: no limit.
        what: is about to happen, for the WaitLasts that ends the patience.
        """
        with self._changed:
            self._wanted += 1
            try:
                if not self._changed.wait_for(lambda: not self._waits, patience):
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
    """Those of this context, the same for everybody in the process."""
    with _lock:
        return _known.setdefault(driver, {}).setdefault(context, ForeignWaits())
