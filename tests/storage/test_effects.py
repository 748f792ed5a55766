"""Effects occupy their names until they have ended; test_indexed.py has them under an index."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.support.simulation.loop import simulate
from tests.support.simulation.threads import SimThreads
from tests.support.waits import until
from transferd.errors import StorageError, StorageUnavailable
from transferd.runtime.threads import Direction, ThreadPools
from transferd.storage.effects import Effects


def test_an_effect_waits_for_what_comes_first_and_says_which_names_it_could_not_change() -> None:
    async def story(_: object) -> None:
        threads = SimThreads(2)
        threads.open()
        effects, gate, done = Effects(threads, 2), asyncio.Event(), list[str]()
        failed: list[str] = []

        def effect(name: str) -> None:
            if name == "bad":
                raise StorageError("stuck")
            done.append(name)

        async def first() -> None:
            await gate.wait()

        task = effects.begin(["a", "bad", "b"], effect, failed.extend, after=first())
        await asyncio.sleep(1.0)
        assert (set(effects.busy), done) == ({"a", "bad", "b"}, [])
        gate.set()
        await task
        await effects.end()
        assert (effects.busy, sorted(done), failed) == ({}, ["a", "b"], ["bad"])
        threads.close()

    simulate(story, 1)


def test_a_bug_in_an_effect_is_raised_and_nothing_waits_for_its_names() -> None:
    async def story(_: object) -> None:
        threads = SimThreads(2)
        threads.open()
        effects, failed = Effects(threads, 2), list[str]()

        def effect(name: str) -> None:
            raise KeyError(name)

        task = effects.begin(["a", "b"], effect, failed.extend)
        with pytest.raises(KeyError):
            await task
        await effects.end()
        assert (effects.busy, failed) == ({}, [])
        threads.close()

    simulate(story, 1)


def test_with_quick_effects_everything_happens_on_the_loop_itself() -> None:
    """Of a store in memory, for which a thread would cost more."""

    async def story(_: object) -> None:
        threads = SimThreads(2)  # none of them is started
        effects, done, failed = Effects(threads, 2, quick=True), list[str](), list[str]()

        def effect(name: str) -> None:
            if name == "bad":
                raise StorageError("stuck")
            done.append(name)

        await effects.begin(["bad", "a"], effect, failed.extend)
        assert (done, failed, effects.busy, threads.started) == (["a"], ["bad"], {}, 0)

    simulate(story, 1)


def test_two_effects_on_one_name_are_a_bug() -> None:
    async def story(_: object) -> None:
        loop = asyncio.get_running_loop()
        effects, one, other = Effects(SimThreads(1), 1), loop.create_future(), loop.create_future()
        effects.occupy(["a", "b"], one)
        effects.occupy(["c"], one)
        with pytest.raises(AssertionError):
            effects.occupy(["b"], other)
        effects.vacate(one)
        assert (effects.busy, one.done(), other.done()) == ({}, True, False)

    simulate(story, 1)


@pytest.mark.parametrize(("at_once", "together"), [(0, 4), (2, 2), (9, 4)])
async def test_at_most_so_many_threads_work_and_results_keep_their_order(at_once: int, together: int) -> None:
    threads, at_work = ThreadPools(6), set[int]()
    effects, barrier = Effects(threads, 4), threading.Barrier(together)

    def effect(number: int) -> int:
        at_work.add(threading.get_ident())
        barrier.wait(20)  # too few would never pass it
        return -number

    try:
        assert await effects.run(Direction.OUT, [], effect) == []
        items = [*range(4 * together)]
        results = await effects.run(Direction.OUT, items, effect, at_once=at_once)
    finally:
        threads.close()
    assert results == [-number for number in items]
    assert len(at_work) == together


async def test_refused_is_what_no_thread_has_begun_and_what_comes_until_it_is_not() -> None:
    threads, begun, over, lost = ThreadPools(1), threading.Event(), threading.Event(), [""]
    effects = Effects(threads, 2, lambda: lost[0])

    def effect(run: list[str]) -> list[str]:
        begun.set()
        return run if run != ["slow"] or over.wait(20) else []

    try:
        first = asyncio.ensure_future(effects.run(Direction.IN, [["one"], ["slow"], ["two"]], effect))
        await asyncio.to_thread(begun.wait, 20)
        await until(lambda: effects.steps == 1, "the first item is done")
        second = asyncio.ensure_future(effects.run(Direction.IN, [["three"]], effect))
        await asyncio.sleep(0)
        lost[0] = "it hangs"
        effects.refuse()
        assert effects.refused.done()
        with pytest.raises(StorageUnavailable, match="it hangs"):
            await second
        with pytest.raises(StorageUnavailable, match="it hangs"):
            await effects.run(Direction.OUT, [["four"]], effect)
        assert not first.done()
        over.set()
        assert await first == [["one"], ["slow"], ["two"]], "a thread had begun it"
        before = effects.steps
        lost[0] = ""
        del effects.refused
        assert not effects.refused.done()
        assert await effects.run(Direction.IN, [["five"]], effect) == [["five"]]
        assert effects.steps == before + 1
    finally:
        over.set()
        threads.close()
