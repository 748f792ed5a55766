"""Effects occupy their names until they have ended; test_indexed.py has them under an index."""

from __future__ import annotations

import asyncio

from tests.support.simulation.loop import simulate
from tests.support.simulation.threads import SimThreads
from transferd.errors import StorageError
from transferd.storage.effects import Effects


def test_an_effect_waits_for_what_comes_first_and_says_which_names_it_could_not_change() -> None:
    async def story(_: object) -> None:
        threads = SimThreads(2)
        threads.open()
        effects, gate, done = Effects(threads, 2), asyncio.Event(), list[str]()
        failed: list[int] = []

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
        assert (effects.busy, sorted(done), failed) == ({}, ["a", "b"], [1])
        threads.close()

    simulate(story, 1)
