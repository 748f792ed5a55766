"""SimLoop: an asyncio event loop whose time is virtual and whose every choice comes from one seed.

Theory of operation
-------------------
The loop never waits. When no callback is ready, its clock jumps to the next timer; a minute of
deadlines costs microseconds. Nothing outside can reach it: no sockets, no threads, no wall clock. So a
run is a function of the program and the seed, and a seed that fails, fails again.

What the seed decides is the order of callbacks that are ready at the same moment. Steps of different
tasks and timers that are due together go in any order, as code must not depend on it; callbacks
handed to `call_soon` keep their order among each other, because asyncio promises that. Sets of tasks
are iterated in the order of memory addresses (TaskGroup cancels its tasks so), which differs from run
to run; therefore task steps are first brought into the order of the tasks' creation, then shuffled.

Two things end a run that would go on for ever: nothing is ready and no timer is set (`SimDeadlock`),
or more steps or virtual time than allowed (`SimRunaway`). Both tell which tasks wait, and where.

Every step leaves a line in the trace, and parts that make a choice of their own add theirs with
`note`. Two runs are the same run exactly when their `fingerprint`s are equal.

This is a loop of its own rather than a BaseEventLoop with a false selector: it needs the public
contract of asyncio only, and what it cannot do raises NotImplementedError by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import random
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from unittest import mock

import xxhash

from tests.support.simulation.task import SimTask
from transferd.runtime import loop_turns

if TYPE_CHECKING:
    from typing import TypeVarTuple, Unpack  # from Python 3.11 on

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")

# Which simulated process a callback belongs to; tasks and timers inherit it. "": one that is never suspended.
PROCESS: ContextVar[str] = ContextVar("PROCESS", default="")
START = 1000.0  # virtual seconds at the beginning: not 0, so that nobody mistakes a time for a missing one
STORY_LINES = 40  # of the trace, told with a failure


class SimError(Exception):
    """A simulated program did what it must not do."""


class SimDeadlock(SimError):
    """Nothing is ready and no timer is set, but the program has not ended."""


class SimRunaway(SimError):
    """More steps or more virtual time than the run was given."""


class SimLeak(SimError):
    """The program ended, but left tasks behind that still run, or errors that nobody has heard."""


class _Callback(asyncio.Handle):
    """A callback with what the loop must know of it: a name that is the same in every run, and its task."""

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], loop: SimLoop, context: Context | None
    ) -> None:
        super().__init__(callback, args, loop, context)
        owner = getattr(callback, "__self__", None)
        self.task = owner if isinstance(owner, SimTask) else None
        self._name = _qualname(callback)

    @property
    def name(self) -> str:
        return self._name if self.task is None else self.task.get_name()  # asyncio names a task after making it

    @property
    def process(self) -> str:
        return str(self._context.get(PROCESS, ""))  # type: ignore[attr-defined] # of asyncio.Handle

    def run(self) -> None:
        self._run()


class _Timer(_Callback, asyncio.TimerHandle):
    """A callback at a time. `cancel` only marks it; the loop drops it when its time has come."""

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: SimLoop,
        context: Context | None,
    ) -> None:
        asyncio.TimerHandle.__init__(self, when, callback, args, loop, context)
        self.task = None
        self._name = _qualname(callback)


class SimLoop(asyncio.AbstractEventLoop):
    """See the module's theory of operation. Use `simulate`, which also checks how the program ended.

    seed: decides everything. shuffle: False keeps every callback in the order it became ready.
    max_steps, max_time: callbacks and virtual seconds a run may take. keep_trace: lines of `trace` to
    keep, None for all; the fingerprint covers all of them anyway.
    """

    def __init__(
        self,
        seed: int,
        *,
        shuffle: bool = True,
        max_steps: int = 1_000_000,
        max_time: float = 86_400.0,
        keep_trace: int | None = STORY_LINES,
    ) -> None:
        self.seed = seed
        self.steps = 0
        self.trace: deque[str] = deque(maxlen=keep_trace)
        self.unheard: list[str] = []  # what asyncio could report to nobody
        self.after_step: Callable[[], None] | None = None  # an oracle; what it raises ends the run
        self._now = START
        self._end_of_time = START + max_time
        self._max_steps = max_steps
        self._order = self.stream("schedule") if shuffle else None
        self._digest = xxhash.xxh3_128()
        self._ready: deque[_Callback] = deque()
        self._timers: list[tuple[float, int, _Timer]] = []  # heap; ties in the order of setting
        self._numbers = itertools.count(1)  # of tasks and timers
        self._tasks: list[weakref.ref[SimTask[Any]]] = []  # weak: a task kept alive keeps alive all it touched
        self._suspended: dict[str, deque[_Callback]] = {}  # by process: what waits until it goes on
        self._killed: dict[str, list[SimTask[Any]]] = {}  # by process: its tasks, which must not be collected meanwhile
        self._stopping = False
        self._running = False
        self._closed = False
        self._thread = threading.get_ident()

    # --- what a program and its fakes use -----------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds; moves only between callbacks."""
        return self._now

    def stream(self, name: str) -> random.Random:
        """A source of chance for one part, a function of seed and name: parts do not disturb each other."""
        return random.Random(f"{self.seed}/{name}")

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self._now - START:.9f} {text}\n"
        self.trace.append(line)
        self._digest.update(line.encode())

    def stand_still(self, seconds: float) -> None:
        """Time passes and nothing runs, as when the whole process is stopped; what was due meanwhile is late."""
        self._now += seconds
        self.note(f"stood still for {seconds:g} s")

    def suspend(self, process: str) -> None:
        """Stop one process (SIGSTOP): its callbacks wait, however late they get, while all others go on."""
        self._suspended.setdefault(process, deque())
        self.note(f"{process} suspended")

    def resume(self, process: str) -> None:
        """Let a process go on (SIGCONT), with all that has become due meanwhile."""
        self._ready.extend(self._suspended.pop(process, ()))
        self.note(f"{process} resumed")

    def kill(self, process: str) -> None:
        """End one process (SIGKILL): nothing of it ever runs again, and nobody misses its tasks."""
        self._suspended.pop(process, None)
        self._killed[process] = [task for task in self._alive() if task.process == process]
        self.note(f"{process} killed")

    @property
    def fingerprint(self) -> str:
        """Digest of the whole trace so far."""
        return self._digest.hexdigest()

    def pending(self) -> list[SimTask[Any]]:
        """Tasks that have not ended, in the order of creation."""
        return [task for task in self._alive() if not task.done() and task.process not in self._killed]

    def _alive(self) -> list[SimTask[Any]]:
        return [task for reference in self._tasks if (task := reference()) is not None]

    def story(self) -> str:
        """Seed, time, waiting tasks and the last steps: what a person needs to find the fault."""
        lines = [f"seed {self.seed}, {self.steps} steps, {self._now - START:.6f} virtual seconds"]
        lines += [f"  {task.get_name()} waits {task.where}" for task in self.pending()]
        lines += ["the last steps:", *(f"  {line.rstrip()}" for line in list(self.trace)[-STORY_LINES:])]
        return "\n".join(lines)

    def check_end(self) -> None:
        """Raise SimLeak if the program left anything behind."""
        left = [f"{task.get_name()} still waits {task.where}" for task in self.pending()]
        left += [
            f"{task.get_name()} failed and nobody asked: {task.hear()!r}"
            for task in self._alive()
            if task.unheard and task.process not in self._killed
        ]
        left += self.unheard
        if left:
            raise SimLeak("; ".join(left))

    def abandon(self) -> None:
        """Cancel what has not ended, and let it end if it does so at once. For the end of a failed run."""
        killed = list(self._killed.values())  # until they have ended: nobody else may have their tasks
        self._killed.clear()  # their tasks clean up as well, or the interpreter complains of them
        for task in self.pending():
            task.cancel("the simulation is over")
        # What waits for time to pass in its clean-up is dropped: time is over.
        with self._entered():
            for _ in range(100):
                if not self._ready:
                    break
                with contextlib.suppress(Exception):
                    self._run_ready()
            closed: set[SimTask[Any]] = set()
            # They end now, and not when they are collected: the loop is closed then. Their ends may begin more tasks.
            while left := [task for task in self.pending() if task not in closed]:
                closed.update(left)
                for task in left:
                    with contextlib.suppress(Exception, asyncio.CancelledError), warnings.catch_warnings():
                        warnings.simplefilter("ignore", RuntimeWarning)  # what it was about to await has not begun
                        task.get_coro().close()
        for task in self._alive():
            task.forget()
        del killed

    # --- running ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """This loop is the running one of this thread."""
        if self._running or self._closed:
            raise RuntimeError(f"this loop is {'running' if self._running else 'closed'}")
        self._running = True
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            self._running = False
            asyncio._set_running_loop(None)

    def run_forever(self) -> None:
        with self._entered():
            self._stopping = False
            while not self._stopping:
                if not self._ready:
                    self._jump()
                self._take_due()
                self._run_ready()

    def run_until_complete(self, future: Any) -> Any:
        main: asyncio.Future[Any] = asyncio.ensure_future(future, loop=self)

        def stop(_: object) -> None:
            self.stop()

        main.add_done_callback(stop)
        try:
            self.run_forever()
        finally:
            main.remove_done_callback(stop)
        if not main.done():
            raise RuntimeError("the loop was stopped before its program ended")
        return main.result()

    def _run_ready(self) -> None:
        """Run what is ready now; what becomes ready meanwhile is for the next round."""
        if self._order is not None and len(self._ready) > 1:
            self._ready = deque(self._shuffled(self._ready, self._order))
        for _ in range(len(self._ready)):
            callback = self._ready.popleft()
            if callback.cancelled():
                continue
            if callback.process in self._killed:
                continue
            if self._suspended and (waiting := self._suspended.get(callback.process)) is not None:
                waiting.append(callback)
                continue
            self.steps += 1
            if self.steps > self._max_steps:
                raise SimRunaway(f"more than {self._max_steps} steps\n{self.story()}")
            self.note(callback.name)
            callback.run()
            if self.after_step is not None:
                self.after_step()

    def _jump(self) -> None:
        """Nothing is ready: on to the next timer."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise SimDeadlock(f"nothing is ready and no timer is set\n{self.story()}")
        self._now = max(self._now, self._timers[0][0])
        if self._now > self._end_of_time:
            raise SimRunaway(f"more than {self._end_of_time - START:g} virtual seconds\n{self.story()}")

    def _take_due(self) -> None:
        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])

    @staticmethod
    def _shuffled(ready: deque[_Callback], order: random.Random) -> list[_Callback]:
        """Ready callbacks in an order of the seed's choice; see the module's theory of operation."""
        steps: list[tuple[int, _Callback]] = []
        due: list[_Callback] = []
        promised: list[_Callback] = []  # plain call_soon callbacks, which keep their order
        for callback in ready:
            if callback.task is not None:
                steps.append((callback.task.number, callback))
            else:
                (due if isinstance(callback, _Timer) else promised).append(callback)
        steps.sort(key=lambda step: step[0])
        # Shuffle places: each is either a free callback's own or the next promised one's.
        places = [callback for _, callback in steps] + due + [None for _ in promised]
        order.shuffle(places)
        in_order = iter(promised)
        return [next(in_order) if place is None else place for place in places]

    # --- the contract of asyncio --------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: Unpack[Ts], context: Context | None = None
    ) -> asyncio.Handle:
        self._check_open()
        handle = _Callback(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: Unpack[Ts], context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise SimError(f"another thread called {_qualname(callback)} into a simulation")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: Unpack[Ts], context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: Unpack[Ts], context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_open()
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> SimTask[T]:
        self._check_open()
        task = SimTask(coro, self, next(self._numbers), name=name, context=context)
        task.process = PROCESS.get() if context is None else context.get(PROCESS, "")
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) % 1024 == 0:
            self._tasks = [weakref.ref(t) for t in self._alive() if not t.done() or t.unheard]
        return task

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if self._running:
            raise RuntimeError("this loop is running")
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    async def shutdown_asyncgens(self) -> None:
        """Asynchronous generators are left to the garbage collector."""

    async def shutdown_default_executor(self) -> None:
        """There is none."""

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Debug mode checks threads and measures real time; neither exists here."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        source = context.get("task") or context.get("future")
        who = f"{source.get_name()}: " if isinstance(source, SimTask) else ""
        self.unheard.append(f"{who}{context.get('message')}: {context.get('exception')!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """TimerHandle.cancel tells its loop."""

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this loop is closed")

    # --- what a simulated program must not reach ----------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: Unpack[Ts]) -> asyncio.Future[T]:
        raise SimError(f"a simulation has no threads: give {_qualname(func)} to a SimThreads")

    def add_reader(self, fd: Any, callback: Callable[[Unpack[Ts]], Any], *args: Unpack[Ts]) -> NoReturn:
        raise SimError(f"a simulation has no sockets: {_qualname(callback)} cannot wait for {fd!r}")

    def add_writer(self, fd: Any, callback: Callable[[Unpack[Ts]], Any], *args: Unpack[Ts]) -> NoReturn:
        raise SimError(f"a simulation has no sockets: {_qualname(callback)} cannot wait for {fd!r}")


def simulate(main: Callable[[SimLoop], Coroutine[Any, Any, T]], seed: int, **options: Any) -> T:
    """Run `main(loop)` on a new SimLoop to its end and return what it returns.

    Raises what main raises, SimDeadlock, SimRunaway, or SimLeak when it left tasks or unheard errors
    behind; each tells the seed and the last steps. options: those of SimLoop.
    """
    loop = SimLoop(seed, **options)  # type: ignore[abstract] # sockets and processes are left out on purpose
    others = random.getstate()
    random.seed(seed)  # the jitter of pauses
    try:
        with mock.patch.object(loop_turns, "PIECE_S", math.inf):  # no step hangs on how fast this machine is
            result: T = loop.run_until_complete(main(loop))
        loop.check_end()
    except BaseException as error:
        if not isinstance(error, SimDeadlock | SimRunaway):  # these tell it themselves
            error.__notes__ = [*getattr(error, "__notes__", ()), loop.story()]  # add_note, from Python 3.11 on
        raise
    finally:
        random.setstate(others)
        loop.abandon()
        loop.close()
    return result


def _qualname(function: Any) -> str:
    """A name without addresses and global counters, so that it is the same in every run."""
    function = getattr(function, "func", function)  # functools.partial
    return str(getattr(function, "__qualname__", type(function).__qualname__))
