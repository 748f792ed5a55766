"""The benchmark in rows: each layout idle, beside a busy neighbour, by one call for each piece, and in batches.

And one layout as engines have it: beside a decode and a prefill without gaps, in a cache of 40 GB, and in tensors of an
engine's, one for each plane of a layer, as FastDeploy and SGLang make them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.machine.gpu import copy_speeds
from tests.machine.gpu.copy_speeds import Part
from tests.machine.gpu.machine import Found, Machine
from tests.machine.gpu.neighbour import Kind
from tests.machine.gpu.processes import peer
from transferd.cli.bench.harness import Row
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda import ipc

# Of large copies, from LEAST_BLOCKS on: every way that a task can take by itself (copy_speeds.DEFAULT_WAYS).
GOALS = dict.fromkeys(copy_speeds.DEFAULT_WAYS, 0.95) | {"swap both ways": 0.9}
LEAST_BLOCKS = 256  # of fewer, the fixed time of a copy is so large a part that it decides
FEW = (16, 256)  # blocks, in rows that are compared with those of the whole series
LEAST_GBS = 25.0  # beside a busy neighbour: half of PCIe 5
LEAST_APART_GBS = 30.0  # of an engine's tensors, beside an engine
LEAST_SHARE = 0.85  # of its own steps that an engine keeps beside copies
LARGE_BYTES = 40_000_000_000  # of a cache such as engines have
APART = "tensors of the engine"
NEIGHBOUR_BYTES = 32 << 20  # of one of its kernels

Check = Callable[[Machine], Coroutine[Any, Any, str | Found]]


def _blocks(row: Row) -> int:
    return int(row.name.rpartition(", ")[2].split()[0])


def _judged(
    machine: Machine, rows: list[Row], figures: dict[str, Any], *, busy: bool, least: float = LEAST_GBS
) -> Found:
    """The row that is farthest from its goal, in words. least: GB/s beside a busy neighbour.

    An engine's `share` of its own steps is a goal as well.
    """
    goals = [(row, GOALS.get(row.name.partition(",")[0])) for row in rows if _blocks(row) >= LEAST_BLOCKS]
    worst: tuple[float, str] | None = None
    for row, goal in goals:
        if goal is not None:
            reached = row.value / least if busy else row.ratio / goal
            told = f"{row.name}: {row.value:.1f} of {row.limit:.1f} GB/s"
            worst = min(worst or (reached, told), (reached, told))
    if worst is None:
        return Found(f"{len(rows)} rows", "right", figures)
    told, share = f"{len(rows)} rows; the worst is {worst[1]}", figures.get("share", 1.0)
    if "share" in figures:
        told = f"{told}; the engine keeps {share:.2f} of its steps"
    good = worst[0] >= 1 and share >= LEAST_SHARE
    return Found(told, "right" if machine.fake else "fast" if good else "slow", figures)


def _check(layout: str, part: Part, *, busy: bool = False) -> Check:
    async def check(machine: Machine) -> Found:
        rows: list[Row] = []

        def told(found: list[Row]) -> None:
            rows.extend(found)
            machine.measured([row.tree() for row in found])

        few: dict[str, Any] = _few(machine) if machine.fake or busy or part != "tier" else {}
        if part not in copy_speeds.parts_of(machine.driver):
            return Found("this driver has no batches", "skipped")
        if not busy:
            await copy_speeds.measure(layout, part, machine.index, on_rows=told, **few)
            return _judged(machine, rows, {}, busy=False)
        async with peer(machine) as engine:
            await engine.ask("busy", step=4096 if machine.fake else NEIGHBOUR_BYTES)
            beside = "beside a busy neighbour"
            await copy_speeds.measure(layout, part, machine.index, on_rows=told, beside=beside, **few)
            figures = await engine.ask("rest")
        return _judged(machine, rows, figures, busy=True)

    return check


def _few(machine: Machine) -> dict[str, Any]:
    """Fewer blocks, for copy_speeds.measure."""
    if machine.fake:
        return {"counts": (2,), "runs": 1, "layouts": {n: c | {"layers": 2} for n, c in copy_speeds.LAYOUTS.items()}}
    return {"counts": FEW}


def _as_engines_have_it(kind: Kind | None, *, apart: bool = False, cache_bytes: int = 0) -> Check:
    """The first layout. kind: of the engine's work meanwhile; None: it has none. apart: in its tensors."""

    async def check(machine: Machine) -> Found:
        if not machine.fake and machine.free() < 1.2 * cache_bytes:
            return Found(f"this GPU has no room for a cache of {cache_bytes / 1e9:.0f} GB", "skipped")
        rows: list[Row] = []

        def told(found: list[Row]) -> None:
            rows.extend(found)
            machine.measured([row.tree() for row in found])

        async with peer(machine) as engine, peer(machine) as owner:

            async def steps(seconds: float) -> float:
                await busy()
                await asyncio.sleep(seconds)
                return float((await engine.ask("rest"))["steps_per_s"])

            async def busy() -> None:  # the double runs no such kernels
                step = 4096 if machine.fake else NEIGHBOUR_BYTES
                await engine.ask("busy", step=step, kind="fills" if machine.fake else kind)

            async def handle(cache: dict[str, object]) -> DeviceHandle:
                return DeviceHandle(ipc.KIND, await owner.ask("own", cache=cache, apart=True))

            words = [APART] if apart else []
            words += [f"in {cache_bytes / 1e9:.0f} GB"] if cache_bytes else []
            words += [f"beside a {kind}"] if kind else []
            alone = await steps(0.02 if machine.fake else 1.0) if kind else 0.0
            if kind:
                await busy()
            await copy_speeds.measure(
                next(iter(copy_speeds.LAYOUTS)),
                "tier",
                machine.index,
                on_rows=told,
                beside=", ".join(words),
                cache_bytes=cache_bytes if not machine.fake else 1 << 20,
                handle=handle if apart else None,
                **_few(machine),
            )
            figures = await engine.ask("rest") if kind else {}
        if kind:
            figures["share"] = figures["steps_per_s"] / max(alone, 1e-9)
        return _judged(machine, rows, figures, busy=kind is not None, least=LEAST_APART_GBS if apart else LEAST_GBS)

    return check


def _name(layout: str, what: str) -> str:
    return f"bench_{layout.split()[0].lower()}_{what}"


CHECKS: dict[str, Check] = (
    {_name(layout, "alone"): _check(layout, "tier") for layout in copy_speeds.LAYOUTS}
    | {_name(layout, "beside_a_busy_neighbour"): _check(layout, "tier", busy=True) for layout in copy_speeds.LAYOUTS}
    | {_name(layout, "one_call_for_each_piece"): _check(layout, "calls") for layout in copy_speeds.LAYOUTS}
)
KINDS: tuple[Kind, ...] = ("decode", "prefill")
ENGINES: dict[str, Check] = (
    {"bench_gqa_in_40_gb": _as_engines_have_it(None, cache_bytes=LARGE_BYTES)}
    | {"bench_gqa_apart": _as_engines_have_it(None, apart=True)}
    | {f"bench_gqa_beside_a_{kind}": _as_engines_have_it(kind) for kind in KINDS}
    | {f"bench_gqa_apart_beside_a_{kind}": _as_engines_have_it(kind, apart=True) for kind in KINDS}
)
LAST: dict[str, Check] = {_name(layout, "in_batches"): _check(layout, "batches") for layout in copy_speeds.LAYOUTS}
