"""Whether tasks are admitted, and whether admitted ones are started: what stands against it, the weightiest first.

    a rank has died       `failed`, for good; nothing is started any more
    draining, shut down   `rejected`; a drain is undone by a resume, a shutdown is not
    no memory             `busy` at the start, since the same task will do later; `rejected` once the memory was
                          taken away, since the blocks that such a task names hold nothing any more

A pause is none of these: tasks are admitted and wait.

A pause or a drain is *held* by the client that asked for it, and ends with it: nobody else knows what it was
for. Several clients may hold one at once; tasks start, or are admitted, when the last of them has let go. A
resume lets go of what its own client holds. Asked by a client that holds nothing, it ends everything that is
held: that is how an operator overrules a client that hangs. (docs/adr/0030)
"""

from __future__ import annotations

from typing import NamedTuple

from transferd.tasks import ErrorInfo, Status

STARTING = ErrorInfo("starting", "the daemon is starting; not every rank is ready")
DRAINING = ErrorInfo("draining", "the daemon is draining and admits no new tasks")


class Hold(NamedTuple):
    """What keeps the gate shut. client: the connection that it ends with; since: monotonic seconds."""

    what: str
    holder: str
    client: bytes
    since: float


class Gate:
    """Changed by the dispatcher, as events say.

    refusal: what a task is answered that would be admitted otherwise. starts: admitted tasks are started.
    paused, draining: somebody asked for it; a shutdown drains, too. alive: no rank has died, and no shutdown was
    asked for.
    """

    refusal: tuple[Status, ErrorInfo] | None
    starts: bool
    paused: bool
    draining: bool

    def __init__(self, *, memory: bool) -> None:
        """memory: False while the daemon starts."""
        self._held: dict[tuple[str, str], Hold] = {}  # by what and holder
        self._shut = False
        self.alive = True
        self._dead: ErrorInfo | None = None
        self._absent: tuple[Status, ErrorInfo] | None = None if memory else (Status.BUSY, STARTING)
        self._changed()

    def _changed(self) -> None:
        """Work out what every task asks; far fewer events change it."""
        wanted = {hold.what for hold in self._held.values()}
        self.paused = "pause" in wanted
        self.draining = self._shut or "drain" in wanted
        self.starts = self.alive and not self.paused
        if self._dead is not None:
            self.refusal = Status.FAILED, self._dead
        else:
            self.refusal = (Status.REJECTED, DRAINING) if self.draining else self._absent

    @property
    def held(self) -> list[Hold]:
        """Every pause and drain, the oldest first."""
        return sorted(self._held.values(), key=lambda hold: hold.since)

    def hold(self, what: str, holder: str, client: bytes, now: float) -> None:
        """Pause or drain. Held already by the same holder: it ends with this connection of it from now on."""
        before = self._held.get((what, holder))
        self._held[what, holder] = Hold(what, holder, client, now if before is None else before.since)
        self._changed()

    def resume(self, holder: str) -> None:
        """Let go of what `holder` holds, or, if that is nothing, of everything."""
        others = {key: hold for key, hold in self._held.items() if hold.holder != holder}
        self._held = others if len(others) < len(self._held) else {}
        self._changed()

    def client_gone(self, client: bytes) -> list[Hold]:
        """Let go of what ends with this connection; returns it."""
        ended = [hold for hold in self._held.values() if hold.client == client]
        for hold in ended:
            del self._held[hold.what, hold.holder]
        self._changed()
        return ended

    def shut(self) -> None:
        """Admit and start nothing any more."""
        self._shut = True
        self.alive = False
        self._changed()

    def rank_died(self, error: ErrorInfo) -> None:
        self._dead = error
        self.alive = False
        self._changed()

    def memory_gone(self, error: ErrorInfo) -> None:
        self._absent = (Status.REJECTED, error)
        self._changed()

    def memory_there(self) -> None:
        self._absent = None
        self._changed()
