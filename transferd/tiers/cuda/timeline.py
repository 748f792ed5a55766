"""Timelines: numbers in memory that both sides share, for the progress of an engine's streams.

A rank has SLOTS timelines, one 64-bit word each, in memory of the daemon's that the rank's handle names: in device
memory, and where the device notices those sooner (`Tuning.host_words`) also in host memory (host_words.py). The
engine's process of that rank puts the write of a larger number on its compute stream (`EngineTimelines.advance`). A
task names a timeline and a number (`after`, from client.timeline); on each rank its copies begin once that rank's
word has reached the number. So the order of the task's push and the rank's write does not matter: copies wait for a
rank that is a step behind, and another stream uses another word. (docs/adr/0043)

The daemon owns the words, so they survive an engine's death. Each word on the device has its own stream for waits, so
a wait delays only tasks that name the word. Before the daemon frees the words, it ends every wait itself.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import threading
from collections.abc import Callable

from transferd.errors import Closed, RequestError, TierError, TransferError
from transferd.runtime.threads import start_thread
from transferd.tasks import TIMELINE_SLOTS as SLOTS
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.host_words import STRIDE, HostWait, HostWords, Passed, watch
from transferd.tiers.cuda.ipc import BLOCK, ExportedTimelines
from transferd.tiers.cuda.owned import CopyHung, Owned
from transferd.tiers.cuda.waits import waits_of

NBYTES = BLOCK
END = 2**63 - 1  # larger than every number that a task may name


class Timelines:
    """The daemon's side of one rank: the words, and a gate for each word on the device that a task has waited for.

    host: have the words in host memory, too, and wait for those once an engine has mapped them.

    Creating requires the context to be current. Raises TierError; then nothing is left behind. Owns words and gates
    until `stop` and `close`.
    """

    def __init__(self, driver: Driver, context: int, *, host: bool = False) -> None:
        self._driver = driver
        self._context = context
        self._owned = Owned()
        self._gates: dict[int, StreamGate] = {}
        self._page: HostWords | None = None
        self._stopped = False
        try:
            self._words = driver.allocate(NBYTES)
            self._owned.add(lambda: driver.free(self._words))
            # Created before any wait: this stream ends waits, so it must never queue behind one.
            self._release = driver.create_stream(urgent=True)
            self._owned.add(lambda: driver.destroy_stream(self._release))
            driver.fill(self._words, 0, NBYTES, self._release)
            driver.synchronize_stream(self._release)
            self._handle = driver.export_memory(self._words).hex()
            if host:
                self._page = HostWords()
                self._owned.add(self._page.close)
        except BaseException:
            self._owned.release()
            raise

    def exported(self) -> ExportedTimelines:
        """The words for an engine that asks for them now."""
        page = None if self._page is None else self._page.given()
        return ExportedTimelines(handle=self._handle, slots=SLOTS, stride=STRIDE, page=page)

    def _gate(self, slot: int) -> StreamGate:
        gate = self._gates.get(slot)
        if gate is None:
            word = self._words + slot * STRIDE

            def wait(stream: int, value: int) -> None:
                self._driver.wait_value(word, value, stream)

            gate = self._gates[slot] = StreamGate(self._driver, self._context, f"transferd-cuda-timeline-{slot}", wait)
        return gate

    def reached(self, slot: int) -> int:
        """A number that this timeline is known to have reached; it may have passed it."""
        _check(slot, SLOTS)
        gate, page = self._gates.get(slot), self._page
        return max(0 if gate is None else gate.reached, 0 if page is None or self._stopped else page.reached(slot))

    def hold(self, slot: int, value: int, passed: Passed) -> GateWait | HostWait:
        """Call `passed`, from another thread, when the timeline has reached `value`. Raises Closed, NoThreads."""
        if self._stopped:
            raise Closed("the device memory is being closed")
        if self._page is not None and self.in_host:
            return watch.hold(HostWait(self._page, slot, value, passed))
        return self._gate(slot).hold(value, passed)

    @property
    def in_host(self) -> bool:
        """Whether tasks wait for words in host memory: the engine has mapped them."""
        return self._page is not None and self._page.mapped

    @property
    def waiting(self) -> dict[int, int]:
        """{slot: number waited for} of the timelines that have waiters now."""
        on_device = [(slot, gate.waits_for) for slot, gate in self._gates.items()]
        in_host = {} if self._page is None else watch.waiting(self._page)
        return in_host | {slot: value for slot, value in on_device if value is not None}

    def stop(self) -> None:
        """End every wait, even if the engine is dead. Idempotent. Raises CopyHung if a wait does not end."""
        self._stopped = True
        if self._page is not None:
            watch.end(self._page)
        for gate in self._gates.values():
            gate.dismiss()
        stuck = [slot for slot, gate in self._gates.items() if not gate.ended(0.0)]
        if stuck:
            self._let_go(stuck)
        for slot in stuck:
            if not self._gates[slot].ended(CLOSE_S):
                raise CopyHung(f"the wait for timeline {slot} does not end; the device's memory stays allocated")

    def _let_go(self, slots: list[int]) -> None:
        end = ctypes.c_int64(END)
        with self._driver.current(self._context):
            for slot in slots:
                self._driver.copy(self._words + slot * STRIDE, ctypes.addressof(end), 8, self._release)
            self._driver.synchronize_stream(self._release)

    def close(self) -> None:
        """Free everything, after `stop`. Requires the context. Raises the first TierError, after the rest."""
        first: TierError | None = None
        for gate in self._gates.values():
            try:
                gate.close()
            except TierError as error:
                first = first or error
        self._owned.release()
        if first is not None:
            raise first


class EngineTimelines:
    """The engine's side: the words of one rank, mapped. Obtained from `engine.attach` or `engine.timelines`."""

    def __init__(
        self, driver: Driver, context: int, words: int, exported: ExportedTimelines, owner: object, *, page: int = 0
    ) -> None:
        self._driver = driver
        self._context = context
        self._words = words
        self._page = page  # the address of the words in host memory; 0 without them
        self._exported = exported
        self._owner = owner  # keeps the mapping alive

    def advance(self, after: tuple[int, int], stream: int) -> None:
        """Advance the timeline behind all work that is on this CUDA stream (its address) now.

        after: the pair that the waiting tasks name (`client.timeline`). Call it on every rank. It puts
        one or two small writes on the stream and waits for nothing. Raises RequestError, TierError.
        """
        slot, value = after
        _check(slot, self._exported.slots)
        with self._driver.current(self._context):
            for words in (self._page, self._words):  # a daemon waits for one of them
                if words:
                    self._driver.write_value(words + slot * self._exported.stride, value, stream)


def _check(slot: int, slots: int) -> None:
    if not 0 <= slot < slots:
        raise RequestError(f"a rank has timelines 0 to {slots - 1}, not {slot}", code="bad_value")


CLOSE_S = 10.0  # how long `stop` waits for a wait that should have been released


class GateWait:
    """Something that waits at a gate."""

    __slots__ = ("_gate", "passed", "value")

    def __init__(self, gate: StreamGate, value: int, passed: Passed) -> None:
        self._gate = gate
        self.value = value
        self.passed = passed

    def withdraw(self) -> bool:
        """Stop waiting. Returns False if `passed` has been called, or is about to be."""
        return self._gate.withdraw(self)


# A wait on a pipeline's stream would delay everything behind it, and block it for ever if the engine dies first. So
# each thing to wait for has its own stream and a thread that sleeps until the wait is over (docs/adr/0043).
class StreamGate:
    """One thing to wait for. Owns a stream, an event and a thread from the first wait until `close`.

    wait: puts a wait for a value on a stream. All waiters for that value or a smaller one pass together.
    newest: always wait for the largest requested value, not for the smallest.
    name: the thread's name.
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
                raise self._lost.with_traceback(None)  # else each caller's frames stay
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
                waits = waits_of(self._driver, self._context)
                while (value := self._next()) is not None:
                    with waits.waiting():
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
