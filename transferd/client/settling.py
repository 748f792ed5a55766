"""Tasks that ended without a settled result, and how the client learns that their blocks are free.

A result is *settled* when no byte of the task's device and host blocks is read or written for it any more. The daemon
says so in nearly all of its results. If the client ends a task itself (`daemon_lost`, `no_answer`, `closed`), or a rank
was left behind at a deadline, that is not known: a suspended daemon continues with the task when it wakes up. Three
things make it known (docs/adr/0069):

* the daemon's process has ended (its pidfd says so; a process in another PID namespace cannot be seen);
* another daemon answers at the endpoint (another boot_id), unless the first one is seen to live on beside it;
* the same daemon answers, and confirms it (`wire.Settled`).

The tasks are kept until one of these is known, at most MOST_TASKS of them. If there are more, nothing is claimed for
those of that daemon that are not kept.

Each caller waits on a future of its own. One question to the daemon is about many tasks, so ten thousand of them cost
the engine's loop as many steps, and forty questions.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from transferd.errors import TransferError
from transferd.runtime.aio import Timer, resolve
from transferd.tiers.owner import WatchedProcess
from transferd.wire import protocol as wire

log = logging.getLogger("transferd.client")

MOST_TASKS = 65_536  # about 20 MiB
MOST_ASKED = 32  # questions under way: the daemon bounds how many of a client's requests may wait
LOOK_S = 0.5  # how often we look at what nothing reports, and ask again what the daemon could not answer
ASK_LIMIT_S = 24 * 3600.0  # for one question: the daemon answers it when it can
COMPLAIN_S = 10.0  # how often waits are logged
SLICE = 256  # waits that end in one turn of the loop: some 10 ms of it
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Boot:
    """One daemon, from its first Welcome. over: it can touch no block any more."""

    boot_id: str
    process: WatchedProcess | None
    replaced: bool = False  # another daemon has answered since
    forgotten: bool = False  # more of its tasks were given up than are kept

    @property
    def over(self) -> bool:
        return self.replaced or (self.process is not None and self.process.ended)


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """A task that was sent to a daemon, in a session."""

    boot: Boot
    session: int


class Asks(Protocol):
    """The conversation, as far as this module needs it."""

    endpoint: str
    session: wire.Welcome  # the newest one; many: how many task ids one question may have

    @property
    def now(self) -> float: ...

    @property
    def present(self) -> str:
        """The boot_id of the daemon that answers now; "" for none."""
        ...

    async def request(self, body: wire.ControlRequest, timeout: float) -> Any: ...


class Settling:
    """The tasks of one conversation that ended unsettled. Used on its loop.

    push: what to note in a task that is sent now; None before a daemon has answered.
    """

    def __init__(self, conversation: Asks) -> None:
        self.push: Push | None = None
        self._conversation = conversation
        self._tasks: OrderedDict[str, Push] = OrderedDict()  # the oldest first
        self._boots: set[Boot] = set()  # of these tasks, and of forgotten ones; some may be over
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}  # callers, by task
        self._unasked: dict[str, None] = {}  # tasks to ask the daemon about, in the order of the calls
        self._questions: set[asyncio.Task[None]] = set()  # under way
        self._asking: asyncio.Handle | None = None
        self._looking = Timer()
        self._complain_at = 0.0
        self._told_at = -math.inf  # of tasks that nobody waits for any more

    @property
    def task_ids(self) -> list[str]:
        """The tasks that may still use their blocks."""
        self._drop_known()
        return list(self._tasks)

    def __contains__(self, task_id: str) -> bool:
        """Whether the task is not known to be settled."""
        self._drop_known()
        return task_id in self._tasks

    def welcomed(self, welcome: wire.Welcome) -> None:
        """A daemon has answered. Call it before the tasks of an earlier daemon are given up."""
        last = None if self.push is None else self.push.boot
        if last is not None and last.boot_id == welcome.boot_id:
            self.push = Push(last, welcome.session)
            self._ask_soon()
            return
        process = WatchedProcess.find(welcome.process)
        self._drop_known()
        for boot in self._boots if last is None else self._boots | {last}:
            # A daemon that is seen to live on beside its successor (visible or not) may still touch blocks.
            old = boot.process
            beside = old is not None and not old.ended and (process is None or old.owner != process.owner)
            boot.replaced = boot.replaced or not beside
        self.push = Push(Boot(welcome.boot_id, process), welcome.session)
        self._wake_known()

    def listens(self, pid: int) -> None:
        """The kernel says that this process listens at the endpoint: use that for a daemon that we cannot see."""
        if self.push is not None and self.push.boot.process is None:
            self.push.boot.process = WatchedProcess.of_pid(pid)

    def closed(self) -> None:
        """The conversation has ended. What is unsettled stays known."""
        if not self._tasks:
            self.push = None

    def gave_up(self, task_id: str, push: Push) -> None:
        """Note a task that ended with an unsettled result."""
        self._tasks.pop(task_id, None)
        self._boots.add(push.boot)
        self._tasks[task_id] = Push(push.boot, push.session)  # a new object: this push, not an earlier one of this id
        if len(self._tasks) > MOST_TASKS:
            self._drop_known()
        while len(self._tasks) > MOST_TASKS:
            self._tasks.popitem(last=False)[1].boot.forgotten = True

    async def settled(self, task_id: str, timeout: float) -> bool:
        """Wait until nothing touches the task's blocks any more. Returns False if that is not known in time."""
        if self._known(task_id):
            return True
        if timeout <= 0:
            return False
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task_id, set()).add(future)
        self._unasked[task_id] = None
        self._ask_soon()
        if not self._looking:
            self._complain_at = self._conversation.now + COMPLAIN_S
            self._looking.set(LOOK_S, self._look)
        try:
            await asyncio.wait({future}, timeout=None if timeout == math.inf else timeout)
        finally:
            self._waiting[task_id].discard(future)
            if not self._waiting[task_id]:
                del self._waiting[task_id]
                self._unasked.pop(task_id, None)
            if not self._waiting:
                self._looking.cancel()
        return (future.done() and task_id not in self) or self._known(task_id)  # else it was given up again meanwhile

    def unknown(self, task_id: str) -> None:
        """Log that a cancelled task may still use its blocks; of many at once, the first."""
        if (now := self._conversation.now) >= self._told_at + COMPLAIN_S:
            self._told_at = now
            what = (
                "%s: task %s was cancelled, and it is not known whether the daemon still touches its blocks (%d such)"
            )
            log.warning(what, self._conversation.endpoint, task_id, len(self._tasks))

    def _known(self, task_id: str) -> bool:
        """Whether nothing touches the task's blocks."""
        return task_id not in self and not self._has_forgotten

    # --- asking the daemon --------------------------------------------------------------------------

    def _ask_soon(self) -> None:
        """Ask at the end of this turn of the loop, about all tasks of the turn together."""
        if self._unasked and self._asking is None:
            self._asking = asyncio.get_running_loop().call_soon(self._ask_all)

    def _ask_all(self) -> None:
        self._asking = None
        present, most = self._conversation.present, max(self._conversation.session.many, 1)
        by_session: dict[int, list[tuple[str, Push]]] = {}
        for task_id in self._unasked:
            given = self._tasks.get(task_id)  # not of a forgotten one: its session is not known
            if given is not None and given.boot.boot_id == present:
                by_session.setdefault(given.session, []).append((task_id, given))
        for session, tasks in by_session.items():
            for start in range(0, len(tasks), most):
                if len(self._questions) >= MOST_ASKED:
                    return  # the end of one asks the next
                those = dict(tasks[start : start + most])
                for task_id in those:
                    del self._unasked[task_id]
                question = asyncio.get_running_loop().create_task(self._ask(session, those))
                self._questions.add(question)

    async def _ask(self, session: int, tasks: dict[str, Push]) -> None:
        """Ask the daemon about these tasks, which answers once some are settled."""
        again = True
        task_id, *more = tasks
        try:
            said = await self._conversation.request(wire.Settled(task_id, session, more), ASK_LIMIT_S)
            for settled in (task_id,) if said is True else said if isinstance(said, list) else ():
                if settled in tasks and self._tasks.get(settled) is tasks[settled]:
                    del self._tasks[settled]
                    self._wake(settled)
        except TransferError:  # lost again, closed, stopping, or too many ask
            again = False  # `_look` does
        finally:
            self._questions.discard(asyncio.current_task())
            self._unasked |= {task_id: None for task_id in tasks if task_id in self._waiting}
        if again:
            self._ask_soon()

    def _wake(self, task_id: str) -> None:
        """Tell the callers that the task is settled."""
        self._unasked.pop(task_id, None)
        for future in self._waiting.get(task_id, ()):
            resolve(future, None)

    # --- looking ------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._wake_known()
        self._ask_soon()
        if (now := self._conversation.now) >= self._complain_at and self._waiting:
            self._complain_at = now + COMPLAIN_S
            what = "%s: it is not known yet whether the daemon still touches the blocks of %d tasks, such as %s"
            log.warning(what, self._conversation.endpoint, len(self._waiting), next(iter(self._waiting)))
        if self._waiting:
            self._looking.set(LOOK_S, self._look)

    def _wake_known(self) -> None:
        """Wake those whose daemon is over."""
        self._drop_known()
        if not self._has_forgotten:
            in_slices([task_id for task_id in self._waiting if task_id not in self._tasks], self._wake)

    @property
    def _has_forgotten(self) -> bool:
        """Whether a task that is not kept may not be settled."""
        return any(boot.forgotten for boot in self._boots)

    def _drop_known(self) -> None:
        """Forget the tasks of daemons that are over, and these daemons."""
        if over := {boot for boot in self._boots if boot.over}:
            self._boots -= over
            for task_id in [task_id for task_id, given in self._tasks.items() if given.boot in over]:
                del self._tasks[task_id]


def in_slices(each: Sequence[T], act: Callable[[T], object], size: int = SLICE) -> None:
    """Act on each, on `size` of them in a turn of the loop: whoever they wake runs in the same turn."""
    for one in each[:size]:
        act(one)
    if len(each) > size:
        asyncio.get_running_loop().call_soon(in_slices, each[size:], act)
