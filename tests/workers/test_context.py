"""What a rank's handlers share: names of objects, cheap checks, and the parts of host memory that there are."""

from __future__ import annotations

import dataclasses
import sys

from tests.support.simulation.carrier import Fabric
from tests.workers.rig import Rig


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
    context = Rig(carrier=Fabric().carrier("here")).context
    assert context.peer is not None
    assert context.host is not None
    assert context.regions == {
        "staging": context.staging.memory,
        "host": context.host.memory,
        "peer staging": context.peer.staging.memory,
    }
    assert set(dataclasses.replace(context, host=None, peer=None).regions) == {"staging"}
