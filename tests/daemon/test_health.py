"""The daemon's health: how late the event loop is, what is a concern, and no timer without a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.daemon.test_engines import configured
from transferd.daemon.daemon import Daemon
from transferd.daemon.health import LAGS_KEPT, LATE, HealthCheck
from transferd.observability.concerns import EVERY_S, REMEMBERED_S
from transferd.runtime.clock import Clock
from transferd.runtime.loop_turns import finished


class World:
    """A daemon whose clock a test turns."""

    def __init__(self, endpoint: str) -> None:
        self.now = 1000.0
        self.daemon = Daemon(configured(endpoint), clock=Clock(monotonic=lambda: self.now))
        self.health: HealthCheck = self.daemon._health


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(f"ipc://{tmp_path}/s")
    yield made
    made.health.close()
    assert not made.health._pulse
    assert await made.daemon.stop(lambda: 5.0) == []


async def test_messages_make_it_look_at_most_once_a_second(world: World) -> None:
    world.health.hello_arrived()
    first = world.health._pulse.handle
    assert first is not None
    world.health.hello_arrived()
    assert world.health._pulse.handle is first
    world.health._pulse.cancel()
    world.health._beat(asyncio.get_running_loop().time())
    world.health.hello_arrived()
    assert not world.health._pulse, "it has just looked"
    world.now += EVERY_S
    world.health.hello_arrived()
    assert world.health._pulse


async def test_a_report_counts_as_a_look_and_without_clients_no_timer_runs(world: World) -> None:
    assert finished(world.health.report()).boot_id == world.daemon.boot_id
    world.health.hello_arrived()
    assert not world.health._pulse


async def test_the_loop_is_late_if_several_of_the_last_looks_were_and_until_they_are_forgotten(world: World) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(LATE - 1):
        world.health._beat(loop.time() - 300.0)
    assert world.health._measured().lag_s == 0.0, "a machine stands still now and then"
    world.health._beat(loop.time() - 200.0)
    assert 200.0 <= world.health._measured().lag_s < 300.0
    for _ in range(LAGS_KEPT - LATE):
        world.health._beat(loop.time())
    assert world.health._measured().lag_s >= 200.0
    world.health._beat(loop.time())
    assert world.health._measured().lag_s < 200.0


async def test_a_loop_that_was_late_before_the_clients_left_is_not_late_for_ever(world: World) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(LATE):
        world.health._beat(loop.time() - 300.0)
    assert world.health._measured().lag_s >= 200.0
    world.now += REMEMBERED_S
    assert world.health._measured().lag_s >= 200.0
    world.now += 1
    assert world.health._measured().lag_s == 0.0


async def test_a_daemon_that_is_not_ready_reports_a_concern(world: World) -> None:
    assert world.health._measured().not_ready == world.daemon.not_ready != ""
    concerns = finished(world.health.report()).concerns
    assert concerns
    assert concerns == world.daemon.report().concerns
