"""One direction of one device: a thread that submits copies a window ahead, in turns, and completes them.

A copy is cut into chunks (submitter.py). The thread submits some chunks of one copy, then some of the next, and
keeps at most a window of them on the device's queues. So

* a copy of one block does not wait for the ten gigabytes that were requested before it;
* a stopped copy ends after the chunks already submitted: no further byte moves;
* the driver's launch queue never fills. A call that finds it full blocks inside the driver, perhaps with the lock of
  the whole context.

The thread sleeps in cuEventSynchronize until the oldest turn has ended. Its window covers several turns, so the
device has work while it waits for Python's lock. A copy comes here only once the engine's own work is done
(docs/adr/0044).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from transferd.blocks.copyplan import CopyPlan
from transferd.errors import Closed, DeviceLost, InvariantError, TierError, TransferError
from transferd.runtime.threads import start_thread
from transferd.tiers.base import HostMemory
from transferd.tiers.cuda.costs import CopyPath
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.owned import CopyHung
from transferd.tiers.cuda.submitter import KernelTable, Submitted, Submitter
from transferd.tiers.cuda.timeline import StreamGate

WINDOW = 4  # turns on the device's queues
TURN_BYTES = 32 * 1024**2  # 0.6 ms of PCIe 5: four such turns outlast the wait for Python's lock
# A channel takes about 1024 entries before calls block. A chunk's kernel and events are five, a DMA is one.
TURN_DMAS = 192
QUEUE_DMAS = 512  # no further turn while this many are on the queues: a chunk of small blocks may have 448
PROBE_S = 5.0  # how often the thread checks that an idle device still answers
MOST_FAILURES = 16  # copies in a row that the driver refuses: a context that was reset under us never recovers
CLOSE_S = 10.0  # how long `stop` waits for a copy that hangs; all others have ended by then

Completed = Callable[[TransferError | None], None]


class Pace:
    """Limits the rate of copies out of a device: stores are never urgent, and the engine and its loads need the bus.

    rate: bytes per second, which may change at any time; 0 for no limit. One thread uses it.

    A turn may start once the rate has covered all earlier turns. So the limit holds over time, while each turn runs at
    full speed: splitting turns would cost the daemon more and gain the engine nothing, since no DMA is long.
    """

    def __init__(self, rate: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._owed = 0.0  # bytes of earlier turns that the rate has not covered yet
        self._since = clock()

    def wait_s(self) -> float:
        """Seconds until the next turn may go, at the current rate; 0 if it may go now."""
        now, rate = self._clock(), self._rate()
        if not rate:
            self._owed = 0.0
        self._owed = max(0.0, self._owed - (now - self._since) * rate)
        self._since = now
        return self._owed / rate if rate else 0.0

    def took(self, nbytes: int) -> None:
        """Report a turn of this many bytes, which goes now."""
        self.wait_s()
        self._owed += nbytes


class Stopped(TransferError):
    """The copy was withdrawn after some of its bytes had moved, and has ended."""

    code = "stopped"


class Copy:
    """One copy on its way through a pipeline."""

    __slots__ = ("_state", "_wake", "completed", "host", "left", "plan", "released", "steps", "stopped")

    def __init__(
        self, plan: CopyPlan, host: HostMemory, completed: Completed, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.plan = plan
        self.host = host
        self.completed = completed
        self._wake = wake
        self.steps: Iterator[Submitted] | None = None
        self.left = plan.nbytes  # bytes that have not been submitted
        self.released = False  # the engine's work is done
        self.stopped = False
        self._state = [True]  # popped once: by the pipeline that begins the copy, or by the owner that withdraws it

    def withdraw(self) -> bool:
        """Stop the copy. Returns True if it has not begun: it never will, and `completed` is not called.

        Returns False if it has begun; it ends after the submitted chunks.
        """
        self.stopped = True
        if self.take():
            return True
        self._wake()  # the pipeline may be waiting for the time of its next turn
        return False

    def take(self) -> bool:
        """Take the right to begin or withdraw the copy. False if it was taken before."""
        try:
            return self._state.pop()
        except IndexError:
            return False


class _Wake:
    """A message in the inbox: the thread examines the begun copies again."""


class EventGate:
    """Holds copies until what the engine recorded last in the shared event has happened (see `gate`).

    For engines that record the event instead of advancing a timeline. If the event is not recorded or has happened, it
    costs only a query per copy. event: 0 means that there is nothing to wait for.
    """

    def __init__(self, driver: Driver, context: int, event: int) -> None:
        self._driver = driver
        self._event = event
        self._number = 0
        self._lock = threading.Lock()
        self.gate = StreamGate(driver, context, "transferd-cuda-engine", self._wait, newest=True)

    def _wait(self, stream: int, _number: int) -> None:
        self._driver.wait(stream, self._event)

    def holds(self, passed: Completed) -> bool:
        """Whether the copy must wait. If so, calls `passed` from another thread when it may go. Raises TransferError.

        Requires the context.
        """
        if not self._event or self._driver.passed(self._event):
            return False
        with self._lock:
            self._number += 1
            number = self._number
        self.gate.hold(number, passed)
        return True


class CopyPipeline:
    """One direction. Owns a submitter and a thread, until `close`.

    outward: device → host.
    engine: the gate that every copy passes first.
    copy_path: see Submitter.
    lost: called once, in the pipeline's thread, when a copy or a probe of the idle device finds that the device is
        lost.
    pace: limits the rate of all copies except those of `urgent` host memory.

    Creating and closing require the context to be current. Raises TierError.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        kernel_table: KernelTable,
        *,
        outward: bool,
        engine: EventGate | None = None,
        copy_path: CopyPath | None = None,
        lost: Callable[[DeviceLost], None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.outward = outward
        self._tell_lost = lost
        self._pace = pace if pace is not None else Pace(lambda: 0)
        self._failures = 0
        self.submitter = Submitter(driver, kernel_table, outward=outward, copy_path=copy_path)
        self._driver = driver
        self._context = context
        self._engine = engine
        self._inbox: queue.SimpleQueue[Copy | _Wake | None] = queue.SimpleQueue()
        self._active: deque[Copy] = deque()
        # Each turn's event, the copy that it completes, and how many DMAs it has.
        self._turns: deque[tuple[int, Copy | None, int]] = deque()
        self._queued = 0  # DMAs of all turns on the queues
        self._idle_events: list[int] = []
        self._closing = False
        self._ended = False
        self._submitting = threading.Lock()
        self._lost: DeviceLost | None = None
        self._waiting_since: float | None = None
        try:
            self._thread = start_thread(f"transferd-cuda-{'out' if outward else 'in'}", self._serve)
        except BaseException:
            self.submitter.release()
            raise

    @property
    def counts(self) -> dict[str, int]:
        """Copies so far, by path."""
        return self.submitter.counts

    @property
    def busy(self) -> bool:
        """Whether copies are under way or about to be."""
        return bool(self._active or self._turns or not self._inbox.empty())

    @property
    def waiting_s(self) -> float:
        """For how long the thread has been in a waiting call to the driver; 0 if it is in none."""
        since = self._waiting_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, plan: CopyPlan, host: HostMemory, completed: Completed) -> Copy:
        """Hand over a copy, from any thread. The pipeline's thread calls `completed` once, when the copy has ended.

        Never blocks. Raises Closed.
        """
        copy = Copy(plan, host, completed, lambda: self._inbox.put(_Wake()))
        with self._submitting:
            if self._closing:
                raise Closed("the copy pipeline is closed")
            self._inbox.put(copy)
        return copy

    # --- the thread ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        with contextlib.suppress(DeviceLost), self._driver.current(self._context):
            while not self._ended or self._active or self._turns:
                self._admit()
                with self._losing():
                    self._submit_turns()
                with self._losing():
                    self._await_turn()
        while not self._ended:  # if the context cannot be made current any more
            copy = self._inbox.get()
            if copy is None:
                return
            if isinstance(copy, Copy):
                self._finish(copy, self._lost or DeviceLost("the device is lost"))

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """If the device is lost in here, or on an unexpected error, every running copy ends with DeviceLost."""
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - otherwise the thread ends, and no copy ever does
            error = raised if isinstance(raised, DeviceLost) else DeviceLost(f"the copy pipeline failed: {raised!r}")
            self._is_lost(error)
            ending = [*(copy for _, copy, _ in self._turns if copy is not None), *self._active]
            self._turns.clear()
            self._queued = 0
            self._active.clear()
            for copy in dict.fromkeys(ending):
                self._finish(copy, error)

    def _admit(self) -> None:
        """Take the copies that have arrived; wait for one if there is no other work."""
        while not self._ended:
            wait = self._may_sleep_s()
            try:
                copy = self._inbox.get(block=wait != 0, timeout=wait)
            except queue.Empty:
                if self._active or self._turns:
                    return
                self._probe()
                continue
            if copy is None:
                self._ended = True
            elif isinstance(copy, Copy):
                self._begin(copy)
            else:
                return

    def _may_sleep_s(self) -> float | None:
        """How many seconds to wait for another copy to arrive.

        Returns 0 while there is work, the time until the next turn if the pace delays it, else the time until the next
        probe. Returns None (for ever) if the device is lost.
        """
        if self._turns:
            return 0.0
        if self._active:
            return 0.0 if any(self._unpaced(copy) for copy in self._active) else self._pace.wait_s()
        return None if self._lost else PROBE_S

    @staticmethod
    def _unpaced(copy: Copy) -> bool:
        return copy.stopped or copy.host.urgent

    def _probe(self) -> None:
        """Check whether an idle device still works."""
        with self._losing(), self._in_driver():
            event = self._take_event()
            self._driver.record(event, self.submitter.tail)
            self._driver.synchronize(event)
            self._idle_events.append(event)

    def _take_event(self) -> int:
        return self._idle_events.pop() if self._idle_events else self.submitter.event()

    def _is_lost(self, error: DeviceLost) -> None:
        if self._lost is None:
            self._lost = error
            if self._tell_lost is not None:
                self._tell_lost(error)

    def _begin(self, copy: Copy) -> None:
        if self._lost is not None:
            self._finish(copy, self._lost)
            return
        engine = None if copy.released else self._engine
        try:
            if engine is not None and self._held(engine, copy):
                return
        except DeviceLost as error:
            self._is_lost(error)
            self._finish(copy, error)
            return
        except TransferError as error:
            self._finish(copy, error)
            return
        self._active.append(copy)

    def _held(self, engine: EventGate, copy: Copy) -> bool:
        with self._in_driver():
            return engine.holds(lambda error: self._engine_passed(copy, error))

    def _engine_passed(self, copy: Copy, error: TransferError | None) -> None:
        """The gate's thread reports that the engine's work is done."""
        if error is None:
            copy.released = True
            self._inbox.put(copy)
        elif copy.take():
            copy.completed(error)

    def _finish(self, copy: Copy, error: TransferError | None) -> None:
        if copy.steps is not None or copy.take():
            copy.completed(error)

    # --- turns --------------------------------------------------------------------------------------

    def _submit_turns(self) -> None:
        while len(self._turns) < WINDOW and self._queued < QUEUE_DMAS:
            copy = self._next()
            if copy is None:
                return
            if copy.steps is None:
                if not copy.take():  # withdrawn
                    continue
                copy.steps = self.submitter.steps(copy.plan, copy.host)
            dmas = 0
            try:
                if not copy.stopped:
                    dmas = self._submit(copy, copy.steps)
                with self._in_driver():
                    event = self._take_event()
                    self._driver.record(event, self.submitter.tail)
                self._failures = 0
            except DeviceLost:
                self._active.append(copy)
                raise
            except Exception as error:
                self._failures += 1
                if self._failures >= MOST_FAILURES:
                    self._active.append(copy)
                    raise DeviceLost(
                        f"the driver refused {self._failures} copies in a row, the last: {error}"
                    ) from error
                try:
                    self._quiesce()
                except Exception:
                    self._active.append(copy)  # so that it ends with DeviceLost
                    raise
                self._finish(copy, error if isinstance(error, TransferError) else InvariantError(repr(error)))
                continue
            over = copy.stopped or not copy.left
            self._turns.append((event, copy if over else None, dmas))
            self._queued += dmas
            if not over:
                self._active.append(copy)

    def _next(self) -> Copy | None:
        """The copy for the next turn; None if no copy may take one now. A closing pipeline ignores the pace."""
        if self._active and (self._ended or not self._pace.wait_s()):
            return self._active.popleft()
        for copy in self._active:
            if self._unpaced(copy):
                self._active.remove(copy)
                return copy
        return None

    def _submit(self, copy: Copy, steps: Iterator[Submitted]) -> int:
        """One turn of a copy. Returns how many DMAs it has."""
        nbytes = dmas = 0
        with self._in_driver():
            while copy.left and nbytes < TURN_BYTES and dmas < TURN_DMAS:
                step = next(steps)
                nbytes, dmas, copy.left = nbytes + step.nbytes, dmas + step.dmas, copy.left - step.nbytes
        if not copy.host.urgent:
            self._pace.took(nbytes)
        return dmas

    @contextlib.contextmanager
    def _in_driver(self) -> Iterator[None]:
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def _await_turn(self) -> None:
        """Sleep until the oldest turn has ended."""
        if not self._turns:
            return
        event, copy, dmas = self._turns[0]
        problem: TransferError | None = None
        try:
            with self._in_driver():
                self._driver.synchronize(event)
        except DeviceLost:
            raise
        except TierError as error:
            problem = error
        self._turns.popleft()
        self._queued -= dmas
        self._idle_events.append(event)
        if copy is not None:
            if copy.left:
                problem = problem or Stopped("the copy was stopped before it was complete")
            self._finish(copy, problem)

    def _quiesce(self) -> None:
        """After a failure, wait until no submitted copy moves bytes any more, so that the failure can be reported."""
        with self._in_driver():
            self.submitter.quiesce()
        while self._turns:
            self._await_turn()

    # --- the end ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no more copies and wait for those in flight. Idempotent; needs no context and frees nothing.

        Raises CopyHung if a copy does not end.
        """
        with self._submitting:
            if not self._closing:
                self._closing = True
                self._inbox.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise CopyHung(
                f"a copy {'out of' if self.outward else 'into'} the device has not ended; its memory stays allocated"
            )

    def close(self) -> None:
        """`stop`, then free everything. Idempotent. Raises the first TierError, after the rest.

        Raises CopyHung if a copy does not end; then it frees nothing.
        """
        self.stop()
        self.submitter.release()
