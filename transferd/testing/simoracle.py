"""Oracle: what must hold inside a simulated daemon after every single step of its loop.

The judge (simjudge.py) checks promises to engines; this checks the daemon's own books while nobody
asks: the dispatcher's (queue and lanes within their bounds, results within theirs, no two tasks at
work on one block), that there is exactly one open round for each running task, that staging never
exceeds its size, and that each push is answered at most once.

Checking all of it at each step would make a story ten times as long, and between two events the books
do not change: so a step is checked when the dispatcher heard something in it.
"""

from __future__ import annotations

from collections import Counter

from transferd import events as ev
from transferd.tasks import TaskResult
from transferd.testing.dispatch import check_dispatcher
from transferd.testing.simworld import SimWorld


class Oracle:
    """Watches one world from its making on; what it finds ends the run."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self._owed: Counter[tuple[bytes, int]] = Counter()  # answers, by client and seq
        self._broken = ""
        self._moved = False
        daemon = world.daemon
        self._handle = daemon.dispatcher.handle
        self._deliver = daemon.coordinator.deliver
        daemon.dispatcher.handle = self._heard  # type: ignore[method-assign] # an instrument, of this world only
        daemon.coordinator.deliver = self._answered
        world.loop.after_step = self._after_step

    def stop(self) -> None:
        self.world.loop.after_step = None

    def at_end(self) -> None:
        """After the daemon has stopped: everything given out has come back, every fault was counted."""
        world = self.world
        assert world.watch.conflicts == [], world.watch.conflicts
        assert len(world.watch) == 0, "somebody is still at work on memory"
        assert world.daemon.barrier.statistics().open == 0, "a round is still open"
        owed = [f"push {seq} of {client!r}" for (client, seq), answers in self._owed.items() if answers]
        assert not owed, f"never answered: {owed}"
        damaged = world.storage.counts["flipped"] + world.storage.counts["short"]
        noticed = sum(worker.corrupt for worker in world.daemon.coordinator.workers)
        assert noticed == damaged, f"{damaged} damaged objects were delivered, {noticed} noticed"

    # --- instruments --------------------------------------------------------------------------------

    def _heard(self, event: ev.Event) -> list[ev.Instruction]:
        self._moved = True
        if isinstance(event, ev.TaskSubmitted):
            self._owed[event.client, event.seq] += 1
        elif isinstance(event, ev.ClientGone):  # nobody is left to be answered
            self._owed = Counter({push: owed for push, owed in self._owed.items() if push[0] != event.client})
        return self._handle(event)

    def _answered(self, client: bytes, seq: int, result: TaskResult) -> None:
        self._owed[client, seq] -= 1
        if self._owed[client, seq] < 0:
            self._broken = f"push {seq} of {client!r} was answered once too often, now with {result}"
        self._deliver(client, seq, result)

    def _after_step(self) -> None:
        if not self._moved:
            return
        self._moved = False
        assert not self._broken, self._broken
        daemon = self.world.daemon
        check_dispatcher(daemon.dispatcher)
        statistics, rounds = daemon.dispatcher.statistics(), daemon.barrier.statistics()
        assert rounds.open == statistics.running, f"{rounds.open} rounds for {statistics.running} running tasks"
        for worker in daemon.coordinator.workers:
            staging = worker.context.staging.statistics()
            assert staging["used"] <= staging["capacity"], staging
