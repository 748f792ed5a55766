"""Merging: nothing waits without a reason, everything is answered with its own part, a hung call holds nobody up."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Sequence

import pytest

from transferd.errors import StorageUnavailable
from transferd.runtime.compat import timeout
from transferd.runtime.threads import whose
from transferd.storage.mooncake import native_calls as merger_module
from transferd.storage.mooncake.client import Batch, Buffer
from transferd.storage.mooncake.native_calls import MOST_BYTES, MOST_OBJECTS, Merger


class Library:
    """Calls that end when they are told to; the answer for a key is its number."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.ends: list[asyncio.Future[None]] = []

    async def __call__(self, batch: Batch) -> dict[str, int]:
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls.append(list(batch))
        self.ends.append(end)
        await end
        assert [buffer.address for buffer in batch.values()] == [int(key) + 1000 for key in batch]
        return {key: int(key) for key in batch}


def batch(*numbers: int, nbytes: int = 1) -> Batch:
    return {str(n): Buffer(n + 1000, nbytes) for n in numbers}


def answers(*numbers: int) -> dict[str, int]:
    return {str(n): n for n in numbers}


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is passed by the next one because this process stood still; a test of that sets its own."""
    monkeypatch.setattr(merger_module, "PATIENCE_S", 3600.0)


async def submit(merger: Merger[int], *batches: Batch) -> list[asyncio.Task[dict[str, int]]]:
    tasks = [asyncio.ensure_future(merger.run(each)) for each in batches]
    await turns()
    return tasks


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def keys(*numbers: int) -> Sequence[str]:
    return [str(n) for n in numbers]


async def test_the_first_goes_at_once_and_those_behind_it_together_each_with_its_own_answer(library: Library) -> None:
    merger = Merger(library, Counter())
    tasks = await submit(merger, batch(1), batch(2, 3), batch(4), batch(5, 6))
    assert library.calls == [keys(1)]
    library.ends[0].set_result(None)
    await turns()
    assert library.calls == [keys(1), keys(2, 3, 4, 5, 6)]
    library.ends[1].set_result(None)
    assert await asyncio.gather(*tasks) == [answers(1), answers(2, 3), answers(4), answers(5, 6)]
    assert (len(library.calls), merger._counts["batches_merged"]) == (2, 2)


async def test_one_after_the_other_is_one_call_each(library: Library) -> None:
    merger = Merger(library, Counter())
    for number in range(3):
        (task,) = await submit(merger, batch(number))
        library.ends[-1].set_result(None)
        assert await task == answers(number)
    assert (len(library.calls), merger._counts["batches_merged"]) == (3, 0)


async def test_a_key_that_waits_twice_is_in_two_calls(library: Library) -> None:
    merger = Merger(library, Counter())
    tasks = await submit(merger, batch(0), batch(1, 2), batch(2, 3))
    for end in range(3):
        library.ends[end].set_result(None)
        await turns()
    assert library.calls == [keys(0), keys(1, 2), keys(2, 3)]
    assert await asyncio.gather(*tasks) == [answers(0), answers(1, 2), answers(2, 3)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (batch(1, nbytes=MOST_BYTES), batch(2)),
        (batch(*range(1, MOST_OBJECTS + 1)), batch(MOST_OBJECTS + 1)),
    ],
)
async def test_a_call_has_a_largest_size(library: Library, first: Batch, second: Batch) -> None:
    merger = Merger(library, Counter())
    tasks = await submit(merger, batch(0), first, second)
    for end in range(3):
        library.ends[end].set_result(None)
        await turns()
    assert library.calls == [keys(0), list(first), list(second)]
    await asyncio.gather(*tasks)


async def test_engines_take_turns_and_each_ones_batches_keep_their_order(library: Library) -> None:
    """A quiet engine's batch is in the next call, however many large ones of another wait before it."""
    merger, most = Merger(library, Counter()), MOST_BYTES
    flood, quiet = contextvars.copy_context(), contextvars.copy_context()
    flood.run(whose.set, "flood")
    quiet.run(whose.set, "quiet")
    loop = asyncio.get_running_loop()
    tasks = [flood.run(loop.create_task, merger.run(batch(n, nbytes=most - 1))) for n in range(3)]
    await turns()
    tasks += [quiet.run(loop.create_task, merger.run(batch(n))) for n in (10, 11)]
    await turns()
    for end in range(3):
        library.ends[end].set_result(None)
        await turns()
    assert library.calls == [keys(0), keys(1, 10), keys(2, 11)]
    assert await asyncio.gather(*tasks) == [answers(n) for n in (0, 1, 2, 10, 11)]


async def test_a_batch_beyond_the_bound_is_sent_alone(library: Library) -> None:
    huge = batch(*range(2 * MOST_OBJECTS), nbytes=MOST_BYTES)
    (task,) = await submit(Merger(library, Counter()), huge)
    library.ends[0].set_result(None)
    assert len(await task) == 2 * MOST_OBJECTS


async def test_a_call_that_hangs_is_passed_by_those_behind_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merger_module, "PATIENCE_S", 0.01)
    merger = Merger(library, Counter())
    hanging, *others = await submit(merger, batch(0), batch(1), batch(2))
    async with timeout(30):
        while len(library.calls) < 2:  # noqa: ASYNC110 - patience ends by itself
            await asyncio.sleep(0.001)
    library.ends[1].set_result(None)
    assert await asyncio.gather(*others) == [answers(1), answers(2)]
    assert not hanging.done()
    (more,) = await submit(merger, batch(3))
    library.ends[2].set_result(None)
    assert await more == answers(3), "the hung call is nobody's business any more"
    library.ends[0].set_result(None)
    assert await hanging == answers(0)
    (last,) = await submit(merger, batch(4))
    library.ends[3].set_result(None)
    assert await last == answers(4)


async def test_calls_that_hang_are_passed_up_to_a_number(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merger_module, "PATIENCE_S", 0.0)
    merger = Merger(library, Counter(), most=2)
    hanging = await submit(merger, batch(0), batch(1))
    others = await submit(merger, batch(2), batch(3))
    assert library.calls == [keys(0), keys(1)]
    library.ends[0].set_result(None)
    await turns()
    assert library.calls == [keys(0), keys(1), keys(2, 3)]
    for end in library.ends[1:]:
        end.set_result(None)
    assert await asyncio.gather(*hanging, *others) == [answers(n) for n in range(4)]
    assert not merger._queues
    assert not merger._under_way


async def test_every_caller_of_a_merged_call_gets_its_error_and_the_next_call_goes_on(library: Library) -> None:
    merger = Merger(library, Counter())
    tasks = await submit(merger, batch(0), batch(1), batch(2))
    library.ends[0].set_result(None)
    await turns()
    late = await submit(merger, batch(3))
    library.ends[1].set_exception(StorageUnavailable("gone"))
    await turns()
    library.ends[2].set_result(None)
    results = await asyncio.gather(*tasks, *late, return_exceptions=True)
    assert [type(result) for result in results] == [dict, StorageUnavailable, StorageUnavailable, dict]
