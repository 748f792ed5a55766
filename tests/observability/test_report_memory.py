"""Looking costs a share of the CPU at most, and nobody sees a report that is older than a second."""

from __future__ import annotations

from transferd.observability.report import Report
from transferd.observability.report_memory import BURST_S, CHEAP_S, EVERY_S, SHARE, ReportMemory
from transferd.runtime.clock import Clock


class World:
    """cost: CPU seconds of a report; render: of what is made of it."""

    def __init__(self, cost: float, render: float = 0.0) -> None:
        self.now = self.cpu = 0.0
        self.cost, self.render = cost, render
        self.memory = ReportMemory(self.make, Clock(monotonic=lambda: self.now, cpu=lambda: self.cpu))

    def make(self) -> Report:
        self.cpu += self.cost
        return Report(uptime_s=self.now)

    def rendered(self, report: Report) -> float:
        self.cpu += self.render
        return report.uptime_s

    def age(self) -> float:
        return self.now - self.memory.made(self.rendered)


def test_a_cheap_report_is_new_each_time_while_few_are_asked_for() -> None:
    world = World(CHEAP_S / 4)
    for _ in range(100):
        world.now += 0.1
        assert world.age() == 0


def test_a_flood_gets_what_there_is_and_nothing_older_than_a_second() -> None:
    world = World(CHEAP_S / 2, render=0.01)
    ages = []
    for _ in range(10_000):
        world.now += 0.001
        ages.append(world.age())
    assert 0 < max(ages) <= EVERY_S
    assert world.cpu <= BURST_S + 10 * (SHARE + (CHEAP_S / 2 + 0.01) / EVERY_S) + 0.02


def test_a_costly_report_is_made_once_a_second() -> None:
    world = World(20 * CHEAP_S)
    ages = []
    for _ in range(1000):
        world.now += 0.01
        ages.append(world.age())
    assert world.cpu <= 20 * CHEAP_S * 11
    assert max(ages) <= EVERY_S


def test_each_rendering_is_made_once_for_a_report() -> None:
    world = World(20 * CHEAP_S, render=1.0)
    assert world.age() == world.age() == 0
    assert world.cpu == 20 * CHEAP_S + 1.0
    world.memory.spend(BURST_S)
    report = world.memory.report()
    assert world.memory.report() is report
