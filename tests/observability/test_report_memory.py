"""Looking costs a share of the CPU at most, and nobody sees a report that is older than a second."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from transferd.observability.report import Report
from transferd.observability.report_memory import BURST_S, CHEAP_S, EVERY_S, SHARE, ReportMemory
from transferd.runtime.clock import Clock


class World:
    """cost: CPU seconds of a report; render: of what is made of it."""

    def __init__(self, cost: float, render: float = 0.0) -> None:
        self.now = self.cpu = 0.0
        self.cost, self.render = cost, render
        self.memory = ReportMemory(self.make, Clock(monotonic=lambda: self.now, cpu=lambda: self.cpu))

    def make(self) -> Generator[None, None, Report]:
        """In two pieces."""
        at = self.now
        self.cpu += self.cost / 2
        yield
        self.cpu += self.cost / 2
        return Report(uptime_s=at)

    def rendered(self, report: Report) -> float:
        self.cpu += self.render
        return report.uptime_s

    async def age(self) -> float:
        made = self.memory.made(self.rendered)
        return self.now - (await made if isinstance(made, asyncio.Future) else made)


async def test_a_cheap_report_is_new_each_time_while_few_are_asked_for() -> None:
    world = World(CHEAP_S / 4)
    for _ in range(100):
        world.now += 0.1
        assert await world.age() == 0


async def test_a_flood_gets_what_there_is_and_nothing_older_than_a_second() -> None:
    world = World(CHEAP_S / 2, render=0.01)
    ages = []
    for _ in range(10_000):
        world.now += 0.001
        ages.append(await world.age())
    assert 0 < max(ages) <= EVERY_S
    assert world.cpu <= BURST_S + 10 * (SHARE + (CHEAP_S / 2 + 0.01) / EVERY_S) + 0.02


async def test_a_costly_report_is_made_once_a_second() -> None:
    world = World(20 * CHEAP_S)
    ages = []
    for _ in range(1000):
        world.now += 0.01
        ages.append(await world.age())
    assert world.cpu <= 20 * CHEAP_S * 11
    assert max(ages) <= EVERY_S


async def test_each_rendering_is_made_once_for_a_report() -> None:
    world = World(20 * CHEAP_S, render=1.0)
    assert await world.age() == 0
    assert await world.age() == 0
    assert world.cpu == 20 * CHEAP_S + 1.0
    world.memory.spend(BURST_S)
    report = world.memory.report()
    assert world.memory.report() is report


async def test_a_costly_report_is_made_in_turns_of_the_loop_and_once_for_all_who_come_meanwhile() -> None:
    world = World(20 * CHEAP_S)
    first = world.memory.report()
    assert isinstance(first, Report), "what it costs is known now"
    world.now += EVERY_S
    coming = [world.memory.report() for _ in range(3)]
    assert all(isinstance(one, asyncio.Future) for one in coming)
    began = world.cpu
    asyncio.get_running_loop().call_soon(lambda: turns.append(world.cpu - began))
    turns: list[float] = []
    reports = {id(await one) for one in coming if isinstance(one, asyncio.Future)}
    assert len(reports) == 1
    assert turns == [pytest.approx(10 * CHEAP_S)], "another callback ran between its pieces"
    assert world.memory.report() is not first


async def test_a_report_that_cannot_be_made_is_made_again_for_the_next_one() -> None:
    world = World(20 * CHEAP_S)
    world.memory.report()
    world.now += EVERY_S
    world.cost = float("nan")
    world.memory._make = _broken
    with pytest.raises(ZeroDivisionError):
        await world.age()
    world.memory._make, world.cost = world.make, CHEAP_S
    assert await world.age() == 0


def _broken() -> Generator[None, None, Report]:
    yield
    raise ZeroDivisionError
