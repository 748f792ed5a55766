"""What a rank's handlers share: names of objects, cheap checks, and the parts of host memory that there are."""

from __future__ import annotations

import dataclasses

from tests.support.simulation.carrier import Fabric
from tests.workers.rig import Rig
from transferd.runtime.threads import Direction
from transferd.workers.context import RankContext


async def test_names_of_objects_count_ranks_of_all_nodes() -> None:
    context = Rig(rank=1).context
    assert (context.rank, context.object_rank) == (1, 1)
    context = Rig(rank=1, group_ranks=4, first_rank=2).context
    assert (context.rank, context.object_rank) == (1, 3)


class Away(Exception):
    """Work was given to a thread."""


class NoThreads:
    def run(self, *_: object) -> None:
        raise Away


async def on_the_loop(context: RankContext, slots: int) -> bool:
    """Whether work on so many slots is done on the loop."""
    context = dataclasses.replace(context, threads=NoThreads())  # type: ignore[arg-type]
    try:
        return await context.on_slots(slots, Direction.IN, lambda: True, "checks")
    except Away:
        return False


async def test_few_bytes_are_checked_on_the_loop_and_without_checksums_all_are() -> None:
    context = Rig().context
    checked = context.format.checked_bytes
    most = 256 * 1024 // checked
    assert (await on_the_loop(context, most), await on_the_loop(context, most + 1)) == (True, False)
    for inline, slots in ((0, 0), (checked - 1, 0), (checked, 1), (5 * checked + 1, 5)):
        context = Rig(inline_check_bytes=inline).context
        assert (await on_the_loop(context, slots), await on_the_loop(context, slots + 1)) == (True, False)

    class Unchecked:
        checked_bytes = 0

    assert await on_the_loop(dataclasses.replace(context, format=Unchecked()), 1_000_000)  # type: ignore[arg-type]


async def test_each_part_of_host_memory_counts_once_and_only_if_it_is_there() -> None:
    context = Rig(carrier=Fabric().carrier("here")).context
    assert context.peer is not None
    assert context.host is not None
    assert context.regions == {
        "staging": context.staging.memory,
        "host": context.host.memory,
        "peer staging": context.peer.staging.memory,
    }
    assert set(dataclasses.replace(context, host=None, peer=None).regions) == {"staging"}
