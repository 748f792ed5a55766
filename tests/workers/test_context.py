"""What a rank's handlers share: work that outlives its task, and the parts that a daemon may lack."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.simulation.carrier import Fabric
from tests.workers.rig import Rig
from transferd.errors import InvariantError
from transferd.runtime.aio import answered
from transferd.storage.peer.transport import PeerTransport
from transferd.workers.context import Background, require


@pytest.fixture
async def unhandled() -> AsyncIterator[list[dict[str, Any]]]:
    """What the loop was told that nobody has taken."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    yield told
    asyncio.get_running_loop().set_exception_handler(None)


async def test_what_is_answered_needs_no_task_and_all_else_is_kept_until_it_ends() -> None:
    background, gate = Background(), asyncio.Event()

    async def waits() -> str:
        await gate.wait()
        return "late"

    there = answered("there")
    assert background.begin(there) is there
    assert len(background) == 0
    begun: asyncio.Future[Any] = background.begin(waits())
    assert len(background) == 1
    gate.set()
    await background.settled()
    assert begun.result() == "late"


@pytest.mark.parametrize("way", ["spawn", "begin"])
async def test_an_error_that_nobody_waits_for_any_more_is_not_reported_as_lost(
    unhandled: list[dict[str, Any]], way: str
) -> None:
    background = Background()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise InvariantError("the task has its answer already")

    work = background.spawn(fails()) if way == "spawn" else background.begin(fails())
    await background.settled()
    assert len(background) == 0
    assert work.done()
    del work
    gc.collect()
    await asyncio.sleep(0)
    assert unhandled == []


async def test_what_is_begun_while_others_settle_is_waited_for_too() -> None:
    """A chunk that ends may begin the quarantine of an object, which reads the same memory's names."""
    background, ended = Background(), list[str]()

    async def second() -> None:
        await asyncio.sleep(0.01)
        ended.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        background.spawn(second())
        ended.append("first")

    background.spawn(first())
    await background.settled()
    assert ended == ["first", "second"]


async def test_a_waiter_that_is_cancelled_cancels_no_work() -> None:
    background, gate = Background(), asyncio.Event()
    work = background.spawn(gate.wait())
    waiting = asyncio.ensure_future(background.settled())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (len(background), work.done()) == (1, False)
    gate.set()
    await background.settled()
    assert work.result() is True


async def test_names_of_objects_count_ranks_of_all_nodes_if_the_daemon_says_so() -> None:
    assert Rig(rank=0).context.object_rank == 0
    context = Rig(rank=1).context
    assert (context.rank, context.object_rank) == (1, 1)
    assert dataclasses.replace(context, object_rank=9).object_rank == 9
    assert dataclasses.replace(context, object_rank=0).object_rank == 0


async def test_few_bytes_are_checked_on_the_loop_and_without_checksums_all_are() -> None:
    checked = Rig().context.format.checked_bytes
    assert Rig().context.cheap_slots == 256 * 1024 // checked
    for inline, slots in ((0, 0), (checked - 1, 0), (checked, 1), (5 * checked + 1, 5)):
        assert Rig(inline_check_bytes=inline).context.cheap_slots == slots

    class Unchecked:
        checked_bytes = 0

    assert dataclasses.replace(Rig().context, format=Unchecked()).cheap_slots == sys.maxsize  # type: ignore[arg-type]


async def test_each_part_of_host_memory_counts_once_and_only_if_it_is_there() -> None:
    transport = PeerTransport(Fabric().carrier("here"), "127.0.0.1:0", ranks=1)
    context = Rig(transport=transport).context
    assert context.peer is not None
    assert context.host is not None
    assert context.regions == {
        "staging": context.staging.memory,
        "host": context.host.memory,
        "peer staging": context.peer.staging.memory,
    }
    assert set(dataclasses.replace(context, host=None, peer=None).regions) == {"staging"}


def test_a_part_that_admission_should_have_asked_for_is_a_bug() -> None:
    assert require("") == "", "only None is no part"
    with pytest.raises(InvariantError, match="a tier this daemon does not have"):
        require(None)
