"""Watches the bystander, an engine that no fault is for: it must notice nothing of what happens to another engine.

What is shared is another matter: while the daemon or the pool is down, the bystander's tasks end with errors, each
once and each with its code. Whatever a result claims is right in every case, and afterwards all is as before.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.machine.faults.bystander import Told
from tests.machine.faults.cell import Cell, Row
from tests.machine.faults.keeper import Passage
from tests.machine.faults.world import World
from transferd.runtime.compat import timeout

BUGS = frozenset({"internal"})  # codes that no fault explains


class Watch:
    """Lets the bystander's rounds go, one after the other, until it is told to keep it at rest."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._read = 0  # bytes of the journal that were read
        self._driver: asyncio.Task[None] | None = None
        self._open = asyncio.Event()
        self._held: Passage | None = None
        self._arrived = asyncio.Event()  # it stands at its gate

    async def open(self, within: float) -> None:
        """Returns when it has registered and its first round is over. Raises TimeoutError."""
        self._driver = asyncio.ensure_future(self._drive())
        async with timeout(within):
            await self._rest()
            await self._one_round()
        self.go()

    def close(self) -> None:
        if self._driver is not None:
            self._driver.cancel()
        if self._held is not None:
            self._held.go()

    def begin(self) -> None:
        """Forget what it was told until now."""
        self._new_rounds()

    def go(self) -> None:
        """Let it go on."""
        self._open.set()

    async def judge(self, cell: Cell, row: Row, within: float) -> None:
        """Say in the row what it was told since `begin`; leave it at rest. Raises TimeoutError."""
        rounds: list[Any] = []
        try:
            async with timeout(within):
                while not rounds or any(status != "ok" for _, status, *_ in rounds[-1]["told"]):
                    await self._rest()
                    await self._one_round()  # that begins now that everything works again
                    rounds += self._new_rounds()
        except TimeoutError:
            raise TimeoutError(f"the second engine did not recover; it was told last: {rounds[-1:]}") from None
        row.beside = dict(Counter(code or status for one in rounds for _, status, code, _, _ in one["told"]))
        for one in rounds:
            row.problems += [f"the second engine: {problem}" for problem in problems(cell, one["told"])]

    async def _rest(self) -> None:
        """Keep it at its gate, with no task under way."""
        self._open.clear()
        await self._arrived.wait()

    async def _one_round(self) -> None:
        self._arrived.clear()
        self._open.set()
        await self._rest()

    async def _drive(self) -> None:
        while True:
            self._held = await self._world.keeper.rounds.get()
            self._arrived.set()
            await self._open.wait()
            self._arrived.clear()
            self._held.go()
            self._held = None

    def _new_rounds(self) -> list[dict[str, Any]]:
        with self._world.rounds.open("rb") as journal:
            journal.seek(self._read)
            lines = journal.read()
        self._read += len(lines)
        return [json.loads(line) for line in lines.splitlines()]


def problems(cell: Cell, told: list[Told]) -> Iterator[str]:
    """What is wrong with what the tasks of one round were told. Its write comes first."""
    stored = told[0][1] == "ok"
    for kind, status, code, blocks, right in told:
        what = f"a {kind} was told {status} {code}".rstrip()
        if not right:
            yield f"{what}, and some of {blocks} blocks do not hold what belongs there"
        elif status != "ok" and not cell.shared:
            yield f"{what}, though the fault was another engine's"
        elif status in ("miss", "partial") and not code:
            if stored and not cell.forgets:
                yield f"{what}, though everything was stored"
        elif status != "ok" and (not code or code in BUGS):
            yield f"{what}, and no fault explains that"
