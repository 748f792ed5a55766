"""Decides whether tasks are admitted, and whether admitted tasks start. Reasons to refuse a task, strongest first:

    a rank has died       `failed`, permanently; no task starts any more
    draining, shut down   `rejected`; a resume ends a drain, but not a shutdown
    no memory             `busy` at the start, since the same task will succeed later; `rejected` once the memory was
                          removed, since the blocks that such a task names are empty

A pause refuses no task: tasks are admitted and wait.

The client that requested a pause or a drain *holds* it. The hold ends with that client, because no other client knows
its reason. Several clients may hold one at once; tasks start, or are admitted, when the last hold ends. A resume ends
the caller's own holds. If the caller holds nothing, it ends all holds, so that an operator can overrule a client that
hangs. (docs/adr/0030)
"""

from __future__ import annotations

from typing import NamedTuple

from transferd.tasks import ErrorInfo, Status

MOST_HOLDS = 1024  # of one engine; a client may name as many holders as it likes
STARTING = ErrorInfo("starting", "the daemon is starting; not every rank is ready")
DRAINING = ErrorInfo("draining", "the daemon is draining and admits no new tasks")


class Hold(NamedTuple):
    """One pause or drain."""

    what: str
    holder: str  # a name, which reports show
    client: bytes  # the hold ends when this connection is lost
    since: float  # monotonic seconds
    proof: str = ""  # a secret of the holder's; a request that contains it is the same holder's


class Gate:
    """Only the dispatcher changes it, on events.

    refusal: the answer to a task that would otherwise be admitted.
    starts: whether admitted tasks start.
    paused, draining: whether there is a hold; a shutdown drains as well.
    alive: no rank has died, and no shutdown has begun.
    """

    refusal: tuple[Status, ErrorInfo] | None

    def __init__(self, *, memory: bool) -> None:
        """memory: whether every rank has its memory; False while the daemon starts."""
        self._held: dict[tuple[str, str, str], Hold] = {}  # by what, holder and proof
        self._shut = False
        self._dead: ErrorInfo | None = None
        self._absent: tuple[Status, ErrorInfo] | None = None if memory else (Status.BUSY, STARTING)
        self._changed()

    def _changed(self) -> None:
        """Compute the answers in advance: they change rarely, and every task needs them."""
        wanted = {hold.what for hold in self._held.values()}
        self.paused = "pause" in wanted
        self.draining = self._shut or "drain" in wanted
        self.alive = not self._shut and self._dead is None
        self.starts = self.alive and not self.paused
        if self._dead is not None:
            self.refusal = Status.FAILED, self._dead
        else:
            self.refusal = (Status.REJECTED, DRAINING) if self.draining else self._absent

    @property
    def held(self) -> list[Hold]:
        """Every pause and drain, the oldest first."""
        return sorted(self._held.values(), key=lambda hold: hold.since)

    @property
    def behind(self) -> str:
        """What keeps admitted tasks from starting, for their errors; "" if nothing does."""
        paused = [hold.holder for hold in self.held if hold.what == "pause"]
        return f", behind the pause of {paused[0]}" if paused else ""

    def has_place(self, what: str, holder: str, proof: str) -> bool:
        """Whether one more request to pause or drain can be held."""
        return len(self._held) < MOST_HOLDS or (what, holder, proof) in self._held

    def hold(self, what: str, holder: str, client: bytes, now: float, proof: str = "") -> None:
        """Pause or drain. A hold that the holder already has keeps its start time and moves to this connection."""
        key = what, holder, proof
        before = self._held.get(key)
        self._held[key] = Hold(what, holder, client, now if before is None else before.since, proof)
        self._changed()

    def resume(self, holder: str, proof: str = "") -> None:
        """End the holds of `holder`, or, if there are none, all holds."""
        others = {key: hold for key, hold in self._held.items() if key[1:] != (holder, proof)}
        self._held = others if len(others) < len(self._held) else {}
        self._changed()

    def client_gone(self, client: bytes) -> list[Hold]:
        """End the holds of this connection, and return them."""
        ended = [hold for hold in self._held.values() if hold.client == client]
        for hold in ended:
            del self._held[hold.what, hold.holder, hold.proof]
        self._changed()
        return ended

    def shut(self) -> None:
        """Admit and start no more tasks."""
        self._shut = True
        self._changed()

    def rank_died(self, error: ErrorInfo) -> None:
        self._dead = error
        self._changed()

    def memory_gone(self, error: ErrorInfo) -> None:
        self._absent = (Status.REJECTED, error)
        self._changed()

    def memory_there(self) -> None:
        self._absent = None
        self._changed()
