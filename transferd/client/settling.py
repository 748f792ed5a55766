"""Tasks that ended without a settled result, and how the client learns that their blocks are free.

A result is *settled* when no byte of the task's device and host blocks is read or written for it any more. The daemon
says so in nearly all of its results. If the client ends a task itself (`daemon_lost`, `no_answer`, `closed`), or a rank
was left behind at a deadline, that is not known: a suspended daemon continues with the task when it wakes up. Three
things make it known (docs/adr/0069):

* the daemon's process has ended (its pidfd is readable; a process in another PID namespace cannot be seen);
* another daemon answers at the endpoint (another boot_id), unless the first one is seen to live on beside it;
* the same daemon answers, and confirms it (`wire.Settled`).

The tasks are kept until one of these is known, at most MOST_TASKS of them. If there are more, nothing is claimed for
those of that daemon that are not kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

from transferd.errors import RequestError, TransferError
from transferd.tiers.owner import WatchedProcess
from transferd.wire import protocol as wire

log = logging.getLogger("transferd.client")

MOST_TASKS = 65_536  # about 20 MiB
MOST_ASKED = 32  # questions under way: the daemon bounds how many of a client's requests may wait
ASK_AGAIN_S = 0.1  # the pause after the daemon could not answer the question
ASK_LIMIT_S = 24 * 3600.0  # for one question: the daemon answers it when it can
LOOK_S = 0.5  # how often we look for a process that has no pidfd
COMPLAIN_S = 10.0  # how often a wait is logged


class Boot:
    """One daemon, from its first Welcome. over: it can touch no block any more."""

    def __init__(self, boot_id: str, process: WatchedProcess | None) -> None:
        self.boot_id = boot_id
        self.process = process
        self.replaced = False  # another daemon has answered since
        self.forgotten = False  # more of its tasks were given up than are kept
        self._changed: set[asyncio.Future[None]] = set()

    @property
    def over(self) -> bool:
        return self.replaced or (self.process is not None and self.process.ended)

    def changed(self) -> None:
        """Wake those who wait in `wait`."""
        for future in self._changed:
            if not future.done():
                future.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Wait until this may be over, or something else has changed, at most this long."""
        loop, fd = asyncio.get_running_loop(), -1 if self.process is None else self.process.fd
        if self.process is not None and fd < 0:
            seconds = min(seconds, LOOK_S)
        future: asyncio.Future[None] = loop.create_future()
        self._changed.add(future)
        if fd >= 0:
            loop.add_reader(fd, self.changed)
        try:
            await asyncio.wait({future}, timeout=seconds)
        finally:
            self._changed.discard(future)
            if fd >= 0 and not self._changed:
                loop.remove_reader(fd)


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """A task that was sent to a daemon, in a session."""

    boot: Boot
    session: int


class Asks(Protocol):
    """The conversation, as far as this module needs it."""

    endpoint: str

    @property
    def now(self) -> float: ...

    @property
    def present(self) -> str:
        """The boot_id of the daemon that answers now; "" for none."""
        ...

    async def request(self, body: wire.Control, timeout: float) -> Any: ...


class Settling:
    """The tasks of one conversation that ended unsettled. Used on its loop.

    push: what to note in a task that is sent now; None before a daemon has answered.
    """

    def __init__(self, conversation: Asks) -> None:
        self.push: Push | None = None
        self._conversation = conversation
        self._tasks: OrderedDict[str, Push] = OrderedDict()  # the oldest first
        self._asked: dict[str, asyncio.Task[None]] = {}  # a question to the daemon is under way

    @property
    def task_ids(self) -> list[str]:
        """The tasks that may still use their blocks."""
        self._drop_known()
        return list(self._tasks)

    def __contains__(self, task_id: str) -> bool:
        """Whether the task is not known to be settled."""
        given = self._tasks.get(task_id)
        return given is not None and not given.boot.over

    def welcomed(self, welcome: wire.Welcome) -> None:
        """A daemon has answered. Call it before the tasks of an earlier daemon are given up."""
        last = None if self.push is None else self.push.boot
        if last is not None and last.boot_id == welcome.boot_id:
            self.push = Push(last, welcome.session)
            last.changed()
            return
        process = WatchedProcess.find(welcome.process)
        for boot in self._boots():
            # A daemon that is seen to live on beside its successor (visible or not) may still touch blocks.
            old = boot.process
            beside = old is not None and not old.ended and (process is None or old.owner != process.owner)
            boot.replaced = boot.replaced or not beside
            boot.changed()
        self.push = Push(Boot(welcome.boot_id, process), welcome.session)

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
        self._tasks[task_id] = Push(push.boot, push.session)  # a new object: this push, not an earlier one of this id
        if len(self._tasks) > MOST_TASKS:
            self._drop_known()
        while len(self._tasks) > MOST_TASKS:
            self._tasks.popitem(last=False)[1].boot.forgotten = True

    async def settled(self, task_id: str, timeout: float) -> bool:
        """Wait until nothing touches the task's blocks any more. Returns False if that is not known in time."""
        conversation = self._conversation
        began = complained = conversation.now
        while True:
            given = self._tasks.get(task_id) or self._forgotten()
            if given is None or given.boot.over:
                self._tasks.pop(task_id, None)
                return True
            left = began + timeout - conversation.now
            if left <= 0:
                return False
            if conversation.now - complained >= COMPLAIN_S:
                complained = conversation.now
                what = "%s: it is not known yet whether the daemon still touches the blocks of task %s (%.0f s)"
                log.warning(what, conversation.endpoint, task_id, complained - began)
            pause = COMPLAIN_S
            kept = task_id in self._tasks  # a forgotten task cannot be asked about: its session is not known
            if kept and conversation.present == given.boot.boot_id and task_id not in self._asked:
                if len(self._asked) < MOST_ASKED:
                    self._asked[task_id] = asyncio.ensure_future(self._ask(task_id, given))
                else:
                    pause = ASK_AGAIN_S
            await given.boot.wait(min(left, pause))

    async def _ask(self, task_id: str, given: Push) -> None:
        """Ask the daemon, which answers once the task is settled."""
        try:
            if await self._conversation.request(wire.Settled(task_id, given.session), ASK_LIMIT_S) is not True:
                return
            if self._tasks.get(task_id) is given:
                del self._tasks[task_id]
        except RequestError:  # an older daemon, which does not know the question
            await given.boot.wait(ASK_LIMIT_S)
        except TransferError:  # lost again, closed, stopping, or too many ask
            await given.boot.wait(ASK_AGAIN_S)
        finally:
            del self._asked[task_id]
            given.boot.changed()

    def _forgotten(self) -> Push | None:
        """A stand-in for a task that is not kept; None if no such task was forgotten."""
        return next((Push(boot, 0) for boot in self._boots() if boot.forgotten and not boot.over), None)

    def _boots(self) -> set[Boot]:
        boots = {given.boot for given in self._tasks.values()}
        return boots if self.push is None else boots | {self.push.boot}

    def _drop_known(self) -> None:
        for task_id in [task_id for task_id, given in self._tasks.items() if given.boot.over]:
            del self._tasks[task_id]
