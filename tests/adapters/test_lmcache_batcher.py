"""Requests that come close together are one task: which ones, when, and who gets which answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence

import pytest

from tests.support.waits import until
from transferd.adapters.lmcache.batcher import AT_ONCE, MOST_BYTES, MOST_OBJECTS, Batcher

FIRST = [f"first-{i}" for i in range(AT_ONCE)]


class Daemon:
    """Carries out a task when `end` is called. tasks: the keys of each, in the order of their arrival."""

    def __init__(self, timeout: float = 30.0, object_bytes: int = 1) -> None:
        self.tasks: list[list[str]] = []
        self.blocks: list[list[int]] = []
        self.timeouts: list[float] = []
        self._ends: list[asyncio.Future[list[bool]]] = []
        self.batcher = Batcher(self._run, timeout, object_bytes)

    async def _run(self, keys: list[str], blocks: list[int], timeout: float) -> list[bool]:
        self.tasks.append(keys)
        self.blocks.append(blocks)
        self.timeouts.append(timeout)
        self._ends.append(asyncio.get_running_loop().create_future())
        return await self._ends[-1]

    def end(self, number: int, missing: Iterable[str] = ()) -> None:
        self._ends[number].set_result([key not in set(missing) for key in self.tasks[number]])

    def fail(self, number: int, error: Exception) -> None:
        self._ends[number].set_exception(error)

    def move(self, *keys: str, blocks: Sequence[int] | None = None) -> asyncio.Future[list[bool]]:
        where = [int.from_bytes(key.encode(), "big") for key in keys] if blocks is None else blocks
        moving: Awaitable[list[bool]] = self.batcher.move(keys, where)
        return asyncio.ensure_future(moving)

    async def busy(self) -> list[asyncio.Future[list[bool]]]:
        """Have as many tasks under way as there may be before requests wait."""
        moving = [self.move(key) for key in FIRST]
        await until(lambda: len(self.tasks) == AT_ONCE)
        return moving


async def test_requests_become_tasks_at_once_while_few_are_under_way() -> None:
    daemon = Daemon()
    first, second = await daemon.busy()
    assert daemon.tasks == [[key] for key in FIRST]
    daemon.end(0)
    daemon.end(1, missing=FIRST)
    assert (await first, await second) == ([True], [False])


async def test_waiting_requests_are_one_task_and_each_gets_its_own_answer() -> None:
    daemon = Daemon()
    await daemon.busy()
    several = [daemon.move("a", "b", blocks=[7, 8]), daemon.move("c", blocks=[9]), daemon.move("d", "e", blocks=[1, 2])]
    await asyncio.sleep(0)
    daemon.end(0)
    await until(lambda: len(daemon.tasks) == AT_ONCE + 1)
    assert (daemon.tasks[-1], daemon.blocks[-1]) == (["a", "b", "c", "d", "e"], [7, 8, 9, 1, 2])
    daemon.end(AT_ONCE, missing=["b", "d"])
    assert await asyncio.gather(*several) == [[True, False], [True], [False, True]]


async def test_no_request_waits_for_a_task_that_does_not_end() -> None:
    daemon = Daemon()
    await daemon.busy()
    late = daemon.move("late")
    await until(lambda: daemon.tasks[AT_ONCE:] == [["late"]])
    daemon.end(AT_ONCE)
    assert await late == [True]


@pytest.mark.parametrize("object_bytes", [1, MOST_BYTES // 2, 2 * MOST_BYTES])
async def test_a_task_is_bounded(object_bytes: int) -> None:
    daemon = Daemon(object_bytes=object_bytes)
    await daemon.busy()
    many = [daemon.move(f"k{i}") for i in range(2 * MOST_OBJECTS)]
    await until(lambda: sum(map(len, daemon.tasks)) == AT_ONCE + len(many))
    most = max(1, min(MOST_OBJECTS, MOST_BYTES // object_bytes))
    assert {len(task) for task in daemon.tasks[AT_ONCE:]} == {most}


async def test_a_request_larger_than_the_bound_is_one_task() -> None:
    daemon = Daemon()
    keys = [f"k{i}" for i in range(MOST_OBJECTS + 1)]
    moving = daemon.move(*keys)
    await until(lambda: daemon.tasks == [keys])
    daemon.end(0)
    assert await moving == [True] * len(keys)


@pytest.mark.parametrize(
    ("one", "other"), [((["k"], [1]), (["k"], [2])), ((["k"], [1]), (["m"], [1]))], ids=["key", "block"]
)
async def test_no_task_has_a_key_or_a_block_twice(
    one: tuple[list[str], list[int]], other: tuple[list[str], list[int]]
) -> None:
    daemon = Daemon()
    await daemon.busy()
    for keys, blocks in (one, other):
        daemon.move(*keys, blocks=blocks)
    await until(lambda: len(daemon.tasks) == AT_ONCE + 2)
    assert daemon.tasks[AT_ONCE:] == [one[0], other[0]]


async def test_a_task_has_the_time_that_its_oldest_request_has_left() -> None:
    daemon = Daemon(timeout=30.0)
    await daemon.busy()
    began = time.monotonic()  # uvloop's clock has milliseconds
    daemon.move("a")
    await asyncio.sleep(0)
    daemon.move("b")
    await until(lambda: len(daemon.tasks) > AT_ONCE)
    waited = time.monotonic() - began
    assert daemon.tasks[AT_ONCE] == ["a", "b"]
    assert 30.0 - waited <= daemon.timeouts[AT_ONCE] < 30.0


async def test_a_request_whose_time_is_up_is_not_begun() -> None:
    daemon = Daemon(timeout=0.0)
    moving = daemon.move("a", "b")
    await until(moving.done, within=5)
    assert moving.result() == [False, False]
    assert daemon.tasks == []


async def test_an_error_reaches_each_request_of_the_task_and_a_cancelled_one_harms_no_other() -> None:
    daemon = Daemon()
    await daemon.busy()
    several = [daemon.move("a"), daemon.move("b"), daemon.move("c")]
    await until(lambda: len(daemon.tasks) > AT_ONCE)
    several[1].cancel()
    daemon.fail(AT_ONCE, OSError("no"))
    found = await asyncio.gather(*several, return_exceptions=True)
    assert [type(one) for one in found] == [OSError, asyncio.CancelledError, OSError]
