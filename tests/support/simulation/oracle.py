"""Oracle: what must hold inside a simulated daemon after every single step of its loop.

The judge (judge.py) checks promises to engines; this checks the daemon's own books while nobody
asks: the dispatcher's (queue and lanes within their bounds, results within theirs, no two tasks at
work on one block), that there is exactly one open round for each running task, that staging never
exceeds its size, that each push is answered at most once, and that no copy begins that would write to
a block which no task at work names.

Checking all of it at each step would make a story ten times as long, and between two events the books
do not change: so a step is checked when the dispatcher heard something in it.
"""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import numpy.typing as npt

from tests.support.dispatch import blocks_to_write, check_dispatcher
from tests.support.simulation.blocks import Blocks
from tests.support.simulation.effects import FAULTS
from tests.support.simulation.storage import WATCHES
from tests.support.simulation.world import SimWorld
from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout.base import Geometry
from transferd.control import instructions as do
from transferd.tasks import Task, TaskResult
from transferd.tiers.base import HostMemory


class Oracle:
    """Watches one world from its making on; what it finds ends the run."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self._damaged_before = self._damaged
        self._owed: Counter[tuple[bytes, int]] = Counter()  # answers, by client and seq
        self._broken = ""
        self._moved = False
        daemon = world.daemon
        coordinator = daemon.default.coordinator
        self._carry_out = coordinator._carry_out
        self._deliver = coordinator.deliver
        # Instruments, of this world only.
        coordinator._carry_out = self._heard  # type: ignore[method-assign]
        coordinator.deliver = self._answered
        self._submit, self._gone = daemon.default.dispatcher.submit, daemon.default.dispatcher.client_gone
        daemon.default.dispatcher.submit = self._submitted  # type: ignore[method-assign]
        daemon.default.dispatcher.client_gone = self._client_gone  # type: ignore[method-assign]
        for rank, device in enumerate(world.devices):
            device.begins = functools.partial(self._copy_begins, rank)
        WATCHES[:] = [self._load_begins]
        world.loop.after_step = self._after_step

    def stop(self) -> None:
        self.world.loop.after_step = None
        WATCHES.clear()

    def at_end(self) -> None:
        """After the daemon has stopped: everything given out has come back, every fault was counted."""
        world = self.world
        assert world.watch.conflicts == [], world.watch.conflicts
        assert len(world.watch) == 0, "somebody is still at work on memory"
        assert world.daemon.default.barrier.statistics()["open"] == 0, "a round is still open"
        owed = [f"push {seq} of {client!r}" for (client, seq), answers in self._owed.items() if answers]
        assert not owed, f"never answered: {owed}"
        raised = {FAULTS[kind]: count for kind, count in world.daemon.default.coordinator.effects_failed.items()}
        assert raised == world.effects.dice.drawn, f"effects raised: {raised}, drawn: {world.effects.dice.drawn}"
        world.log.check()
        damaged = self._damaged - self._damaged_before
        noticed = sum(worker.corrupt for worker in world.daemon.default.coordinator.workers)
        # What a stopped task never copied was never checked, and tasks that share a load notice its damage each.
        storage = world.daemon.storage
        shared = 0 if storage is None else storage.statistics().get("shared_loads", 0)
        assert noticed <= damaged + shared, f"{damaged} damaged objects were delivered, {noticed} noticed"

    @property
    def _damaged(self) -> int:
        """Objects that storage has delivered damaged."""
        return self.world.storage.counts["flipped"] + self.world.storage.counts["short"]

    # --- instruments --------------------------------------------------------------------------------

    def _heard(self, instructions: list[do.Instruction]) -> None:
        self._moved = True
        self._carry_out(instructions)

    def _submitted(self, now: float, client: bytes, seq: int, task: Task, again: bool = False) -> list[do.Instruction]:
        refused = self._refused
        instructions = self._submit(now, client, seq, task, again)
        self._owed[client, seq] += not again or self._refused == refused
        return instructions

    def _client_gone(self, now: float, client: bytes) -> list[do.Instruction]:
        self._owed = Counter({push: owed for push, owed in self._owed.items() if push[0] != client})  # nobody is left
        return self._gone(now, client)

    @property
    def _refused(self) -> int:
        return sum(self.world.daemon.default.dispatcher.rejects.values())

    def _answered(self, client: bytes, seq: int, result: TaskResult) -> None:
        self._owed[client, seq] -= 1
        if self._owed[client, seq] < 0:
            self._broken = f"push {seq} of {client!r} was answered once too often, now with {result}"
        self._deliver(client, seq, result)

    def _copy_begins(self, rank: int, operation: str, plan: CopyPlan, host: HostMemory) -> None:
        daemon = self.world.daemon
        tier, geometry = "device", daemon.default.layout.device
        if operation == "copy_out":
            pool = daemon.default.coordinator.workers[rank].context.host
            if pool is None or host is not pool.memory:
                return  # to staging, which is nobody's block
            tier, geometry = "host", daemon.default.layout.host
        self._check_writes(f"{operation} of rank {rank}", tier, geometry, plan.runs[:, 1:])

    def _load_begins(self, pieces: npt.NDArray[np.int64]) -> None:
        """pieces: int64 [n, 2], address and bytes, in the memory of some rank's device, or in nobody's."""
        geometry = self.world.daemon.default.layout.device
        for rank, device in enumerate(self.world.devices):
            here = pieces - (device.arena.origin, 0)
            mine = here[(here[:, 0] >= 0) & (here[:, 0] < geometry.extent)]
            self._check_writes(f"load in place of rank {rank}", "device", geometry, mine)

    def _check_writes(self, who: str, tier: str, geometry: Geometry, pieces: npt.NDArray[np.int64]) -> None:
        """Some task must name every block that these bytes belong to. pieces: offset and bytes."""
        owners = _owners(geometry)
        touched = {int(block) for to, nbytes in pieces.tolist() for block in np.unique(owners[to : to + nbytes])}
        strange = touched - blocks_to_write(self.world.daemon.default.dispatcher, tier)
        if strange:
            self._broken = f"{who} writes to {tier} blocks {sorted(strange)}, which no task names"
            self._moved = True

    def _after_step(self) -> None:
        if not self._moved:
            return
        self._moved = False
        assert not self._broken, self._broken
        daemon = self.world.daemon
        check_dispatcher(daemon.default.dispatcher)
        running, rounds = daemon.default.dispatcher.lanes.running, daemon.default.barrier.statistics()
        assert rounds["open"] == running, f"{rounds['open']} rounds for {running} running tasks"
        for worker in daemon.default.coordinator.workers:
            staging = worker.context.staging.statistics()
            assert staging["used"] <= staging["capacity"], staging


@functools.lru_cache(maxsize=8)
def _owners(geometry: Geometry) -> npt.NDArray[np.int64]:
    """The block that each byte of a memory belongs to; -1 between them."""
    owners = np.full(geometry.extent, -1, dtype=np.int64)
    owners[Blocks.of(geometry, [], []).places] = np.arange(geometry.blocks)[:, None]
    return owners
