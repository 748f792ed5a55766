"""Runs cells, one after another, in one world that outlives them.

The order of a cell:

1. the phase's gate is armed, the engine is told to push a task, and the gate is reached;
2. the fault: the process is killed, stopped for a while, or made to stand still most of the time; then the
   gate opens, so what stood there goes on in a world with the fault in it;
3. the engine hears its result, unless it is the one that died;
4. what died is started again, and within RECOVERY_S the daemon serves as before;
5. the checks (judge.py): exactly one result, in time, claiming nothing that is not so; every key ever
   written is right byte for byte or a miss; nothing runs, staging is empty, no shared memory of the dead is
   left; the engine's next task goes well; the second engine has noticed nothing but faults of what it shares
   (watch.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

from tests.machine.faults.cell import (
    ANSWER_S,
    GATE_S,
    HOLD_S,
    MOVING_S,
    PHASES,
    RECOVERY_S,
    STILL_S,
    TASK_BLOCKS,
    TASK_TIMEOUT_S,
    Cell,
    Row,
    latest_result_s,
    ripe,
)
from tests.machine.faults.contents import DEVICE_BLOCKS
from tests.machine.faults.keeper import Passage
from tests.machine.faults.operator import Operator
from tests.machine.faults.watch import Watch
from tests.machine.faults.world import World
from tests.support.freezing import freeze, thaw
from transferd import Status, TransferError
from transferd.runtime.compat import Self


class Runner:
    """Owns its world and its operator while it is entered."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.operator = Operator(world.endpoint)
        self.watch = Watch(world)
        self._idle: Passage | None = None
        self._cells = 0

    async def __aenter__(self) -> Self:
        try:
            await self.world.open()
            await self.operator.open()
            await self.watch.open(GATE_S)
        except BaseException:
            await self.world.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._idle is not None:
            self._idle.go("end")
        self.watch.close()
        await self.operator.close()
        await self.world.close()

    async def run(self, cell: Cell) -> Row:
        """Run one cell. Raises nothing for what the cell finds: that is in `problems`."""
        row = Row(cell)
        self._cells += 1
        try:
            await self._run(cell, row)
        except (TimeoutError, TransferError, RuntimeError, OSError) as error:
            row.problems.append(f"{type(error).__name__}: {error}")
        finally:
            self.world.keeper.release()
            self.watch.go()
        return row

    async def _run(self, cell: Cell, row: Row) -> None:
        world, operator = self.world, self.operator
        await operator.served(RECOVERY_S)
        keys = await self._prepared(cell)
        await self._engine_idle(GATE_S)
        self.watch.begin()
        task_id, old_daemon = f"cell-{self._cells}", world.pid("daemon")
        if cell.phase == "push":
            await operator.client.pause()  # so that the task is there and has certainly not begun
        world.keeper.arm(cell.phase, ripe(cell.phase))
        self._order(PHASES[cell.phase], task_id, keys)
        await world.keeper.reached(GATE_S)
        began = time.monotonic()
        await self._befall(cell)
        if cell.fault == "kill -9":
            await world.start(cell.victim)
        await operator.resumed(RECOVERY_S)
        if cell.fault != "kill -9" or cell.victim != "engine":
            await self._engine_idle(ANSWER_S)
            self._judge_result(cell, task_id, began, row)
        await operator.served(RECOVERY_S)
        await operator.read_everything_back(row, RECOVERY_S)
        row.served_s = time.monotonic() - began
        if row.gone and not cell.forgets:
            row.problems.append(f"{row.gone} keys that were called stored are gone")
        await self.watch.judge(cell, row, RECOVERY_S)
        row.problems += await operator.left_over()
        self.watch.go()
        if cell.fault == "kill -9" and cell.victim == "daemon":
            row.problems += [f"shared memory left behind: {name}" for name in world.shared_memory_of(old_daemon)]
            row.problems += [f"half a file left behind: {name}" for name in world.half_files()]
        await self._next_task(cell, row)

    async def _prepared(self, cell: Cell) -> list[str]:
        """The keys of the cell's task; for a read they are stored first."""
        keys = [f"cell-{self._cells}-{i}" for i in range(TASK_BLOCKS)]
        if PHASES[cell.phase] == "read":
            written = await self.operator.write(keys, list(range(TASK_BLOCKS)))
            if written.status is not Status.OK:
                raise RuntimeError(f"the world was not well before the cell: {written}")
        else:
            self.operator.expect(keys)
        return keys

    # --- the fault ----------------------------------------------------------------------------------

    async def _befall(self, cell: Cell) -> None:
        """The fault begins, the gate opens, the fault ends (except for a death)."""
        world, victim = self.world, cell.victim
        if cell.fault == "kill -9":
            await world.kill(victim)
            await self._go_on(cell)
        elif cell.fault == "stop":
            freeze(world.pid(victim))
            try:
                await self._go_on(cell)
                await asyncio.sleep(HOLD_S[victim])
            finally:
                thaw(world.pid(victim))
        else:
            async with self._slow_motion(victim):
                await self._go_on(cell)
                await self._engine_idle(ANSWER_S)

    async def _go_on(self, cell: Cell) -> None:
        self.world.keeper.release()
        if cell.phase == "push" and (cell.victim != "daemon" or cell.fault == "slow"):
            await self.operator.client.resume()

    @contextlib.asynccontextmanager
    async def _slow_motion(self, victim: str) -> AsyncIterator[None]:
        pid = self.world.pid(victim)

        async def still_and_moving() -> None:
            while True:
                freeze(pid)
                await asyncio.sleep(STILL_S)
                thaw(pid)
                await asyncio.sleep(MOVING_S)

        moving = asyncio.ensure_future(still_and_moving())
        try:
            yield
        finally:
            moving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await moving
            thaw(pid)

    # --- the engine ---------------------------------------------------------------------------------

    async def _engine_idle(self, timeout: float) -> None:
        """Wait until the engine that lives now has been told everything and asks for more."""
        pid = self.world.pid("engine")
        if self._idle is None or self._idle.message["pid"] != pid:
            self._idle = await self.world.keeper.idle_engine(pid, timeout)

    def _order(self, kind: str, task_id: str, keys: list[str]) -> None:
        assert self._idle is not None
        blocks = list(range(DEVICE_BLOCKS - TASK_BLOCKS, DEVICE_BLOCKS))
        order = {"kind": kind, "task_id": task_id, "keys": keys, "blocks": blocks, "timeout": TASK_TIMEOUT_S}
        idle, self._idle = self._idle, None
        idle.go(json.dumps(order))

    def _told(self, task_id: str, event: str = "told") -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self.world.journal.read_text().splitlines()]
        return [line for line in lines if line["event"] == event and line["task_id"] == task_id]

    def _judge_result(self, cell: Cell, task_id: str, began: float, row: Row) -> None:
        told = self._told(task_id)
        if len(told) != 1:
            row.problems.append(f"the engine was told {len(told)} times")
            return
        line = told[0]
        row.told = " ".join(filter(None, (str(line["status"]), str(line["code"]))))
        row.result_s = float(str(line["t"])) - began
        self.operator.stored(list(line["stored"]) if PHASES[cell.phase] == "write" else [])  # type: ignore[call-overload]
        if not line["right"]:
            row.wrong += 1
            row.problems.append("the result claims blocks that do not hold what belongs there")
        if row.result_s > latest_result_s(cell):
            row.problems.append(f"the result came after {row.result_s:.1f} s")
        if line["status"] == "failed" and not line["code"]:
            row.problems.append("a failure without a code")

    async def _next_task(self, cell: Cell, row: Row) -> None:
        """The engine goes on with its work, in its old life or in a new one: write, and read the same."""
        await self._engine_idle(GATE_S)
        keys = [f"after-{self._cells}-{i}" for i in range(TASK_BLOCKS)]
        self.operator.expect(keys)
        for kind in ("write", "read"):
            task_id = f"after-{self._cells}-{kind}"
            self._order(kind, task_id, keys)
            await self._engine_idle(ANSWER_S)
            told = self._told(task_id)
            if [(line["status"], line["right"]) for line in told] != [("ok", True)]:
                row.problems.append(f"the engine's next {kind}: {told}")
        if cell.fault == "kill -9" and cell.victim == "daemon":
            went_on = self._told(f"after-{self._cells}-write", "went on")
            answers = [(line["status"], line["code"], line["blocks"]) for line in went_on]
            if answers != [("rejected", "not_attached", 0)]:
                row.problems.append(f"the engine that went on in memory of the dead daemon: {went_on}")
