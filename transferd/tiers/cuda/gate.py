"""Gates: copies wait here for the engine, outside the pipelines.

A wait on a pipeline's stream would delay everything behind it, and block it for ever if the engine dies first. So each
thing to wait for has a stream of its own, and a thread that sleeps until the wait is over. Only then does the copy
enter its pipeline (docs/adr/0043).
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from transferd.errors import Closed, TierError, TransferError
from transferd.runtime.threads import start_thread
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.owned import Owned

CLOSE_S = 10.0  # how long `stop` waits for a wait that should have been released

Passed = Callable[[TransferError | None], None]


class GateWait:
    """Something that waits at a gate."""

    __slots__ = ("_gate", "passed", "value")

    def __init__(self, gate: StreamGate, value: int, passed: Passed) -> None:
        self._gate = gate
        self.value = value
        self.passed = passed

    def withdraw(self) -> bool:
        """Stop waiting. False: `passed` has been called, or is about to be."""
        return self._gate.withdraw(self)


class StreamGate:
    """One thing to wait for. Owns a stream, an event and a thread from the first wait until `close`.

    wait: puts a wait for a value on a stream. All waiters for that value or a smaller one pass together.
    newest: always wait for the largest requested value, not for the smallest. name: the thread's name.
    """

    def __init__(
        self, driver: Driver, context: int, name: str, wait: Callable[[int, int], None], *, newest: bool = False
    ) -> None:
        self.reached = 0  # the largest value whose wait is over
        self._driver = driver
        self._context = context
        self._name = name
        self._wait = wait
        self._newest = newest
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, GateWait]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._lost: TierError | None = None
        self._owned = Owned()
        self.waits_for: int | None = None  # the value that the thread waits for now

    def hold(self, value: int, passed: Passed) -> GateWait:
        """Call `passed` from the gate's thread once `value` is reached. Raises NoThreads, Closed, DeviceLost."""
        with self._changed:
            if self._closing:
                raise Closed("the device memory is being closed")
            if self._lost is not None:
                raise self._lost
            if self._thread is None:
                self._thread = start_thread(self._name, self._serve)
            held = GateWait(self, value, passed)
            heapq.heappush(self._waiting, (value, next(self._numbers), held))
            self._changed.notify()
        return held

    def withdraw(self, held: GateWait) -> bool:
        with self._changed:
            before = len(self._waiting)
            self._waiting = [item for item in self._waiting if item[2] is not held]
            heapq.heapify(self._waiting)
            return len(self._waiting) < before

    def _serve(self) -> None:
        try:
            with self._driver.current(self._context):
                stream, event = self._driver.create_stream(), self._driver.create_event()
                self._owned.add(lambda: self._driver.destroy_stream(stream))
                self._owned.add(lambda: self._driver.destroy_event(event))
                while (value := self._next()) is not None:
                    self._wait(stream, value)
                    self._driver.record(event, stream)
                    self._driver.synchronize(event)
                    self._passed(value)
        except TierError as error:
            self._lost = error
            self._end(error)

    def _next(self) -> int | None:
        """The next value to wait for; None after `dismiss`."""
        with self._changed:
            self.waits_for = None
            while not self._waiting and not self._closing:
                self._changed.wait()
            if self._closing:
                return None
            values = [value for value, _, _ in self._waiting]
            self.waits_for = max(values) if self._newest else values[0]
            return self.waits_for

    def _passed(self, value: int) -> None:
        with self._changed:
            self.reached = max(self.reached, value)
            over = self._take(value)
        for held in over:
            held.passed(None)

    def _end(self, error: TransferError) -> None:
        """Let every waiter go with this error."""
        with self._changed:
            over = self._take()
            self._changed.notify()
        for held in over:
            held.passed(error)

    def _take(self, value: int | None = None) -> list[GateWait]:
        """Take those that wait for at most this value, or all, in order. Needs the lock."""
        over = [item for item in sorted(self._waiting, key=lambda item: item[:2]) if value is None or item[0] <= value]
        self._waiting = [item for item in self._waiting if value is not None and item[0] > value]
        heapq.heapify(self._waiting)
        return [held for _, _, held in over]

    def dismiss(self) -> None:
        """Accept no more waiters; those present get Closed. The thread ends when its current wait is over."""
        self._closing = True
        self._end(Closed("the device memory is being closed"))

    def ended(self, within: float) -> bool:
        """Wait for the thread to end. Returns False if it still waits for the device."""
        if self._thread is None:
            return True
        self._thread.join(within)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Free the stream and the event, after `ended`. Needs the context. Raises TierError."""
        self._owned.release()
