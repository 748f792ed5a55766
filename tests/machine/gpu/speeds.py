"""The benchmark in rows: each layout idle, beside a busy neighbour, by one call for each piece, and in batches."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tests.machine.gpu import copy_speeds
from tests.machine.gpu.copy_speeds import Part
from tests.machine.gpu.machine import Found, Machine
from tests.machine.gpu.processes import peer
from transferd.cli.bench.harness import Row

# Of large copies, from LEAST_BLOCKS on: every way that a task can take by itself (copy_speeds.DEFAULT_WAYS).
GOALS = dict.fromkeys(copy_speeds.DEFAULT_WAYS, 0.95) | {"swap both ways": 0.9}
LEAST_BLOCKS = 256  # of fewer, the fixed time of a copy is so large a part that it decides
FEW = (16, 256)  # blocks, in rows that are compared with those of the whole series
LEAST_GBS = 25.0  # beside a busy neighbour: half of PCIe 5
NEIGHBOUR_BYTES = 32 << 20  # of one of its kernels

Check = Callable[[Machine], Coroutine[Any, Any, str | Found]]


def _blocks(row: Row) -> int:
    return int(row.name.rpartition(", ")[2].split()[0])


def _judged(machine: Machine, rows: list[Row], *, busy: bool, figures: dict[str, Any]) -> Found:
    """The row that is farthest from its goal, in words."""
    goals = [(row, GOALS.get(row.name.partition(",")[0])) for row in rows if _blocks(row) >= LEAST_BLOCKS]
    worst: tuple[float, str] | None = None
    for row, goal in goals:
        if goal is not None:
            reached = row.value / LEAST_GBS if busy else row.ratio / goal
            told = f"{row.name}: {row.value:.1f} of {row.limit:.1f} GB/s"
            worst = min(worst or (reached, told), (reached, told))
    if worst is None:
        return Found(f"{len(rows)} rows", "right", figures)
    told = f"{len(rows)} rows; the worst is {worst[1]}"
    return Found(told, "right" if machine.fake else "fast" if worst[0] >= 1 else "slow", figures)


def _check(layout: str, part: Part, *, busy: bool = False) -> Check:
    async def check(machine: Machine) -> Found:
        rows: list[Row] = []

        def told(found: list[Row]) -> None:
            rows.extend(found)
            machine.measured([row.tree() for row in found])

        few: dict[str, Any] = {}
        if machine.fake:
            few = {"counts": (2,), "runs": 1, "layouts": {n: c | {"layers": 2} for n, c in copy_speeds.LAYOUTS.items()}}
        elif busy or part != "tier":
            few = {"counts": FEW}
        if part not in copy_speeds.parts_of(machine.driver):
            return Found("this driver has no batches", "skipped")
        if not busy:
            await copy_speeds.measure(layout, part, machine.index, on_rows=told, **few)
            return _judged(machine, rows, busy=False, figures={})
        async with peer(machine) as engine:
            await engine.ask("busy", step=4096 if machine.fake else NEIGHBOUR_BYTES)
            beside = "beside a busy neighbour"
            await copy_speeds.measure(layout, part, machine.index, on_rows=told, beside=beside, **few)
            figures = await engine.ask("rest")
        return _judged(machine, rows, busy=True, figures=figures)

    return check


def _name(layout: str, what: str) -> str:
    return f"bench_{layout.split()[0].lower()}_{what}"


CHECKS: dict[str, Check] = (
    {_name(layout, "alone"): _check(layout, "tier") for layout in copy_speeds.LAYOUTS}
    | {_name(layout, "beside_a_busy_neighbour"): _check(layout, "tier", busy=True) for layout in copy_speeds.LAYOUTS}
    | {_name(layout, "one_call_for_each_piece"): _check(layout, "calls") for layout in copy_speeds.LAYOUTS}
)
LAST: dict[str, Check] = {_name(layout, "in_batches"): _check(layout, "batches") for layout in copy_speeds.LAYOUTS}
