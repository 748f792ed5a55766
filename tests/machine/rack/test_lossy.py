"""One node behind a long or bad cable: it costs its own objects at most, and nobody else's time; bytes are compared.

The impaired cable is between the switch and the node: what others read from it goes `back`, their requests go `there`.
`make rack` runs all shares of lost packets, `make test` one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest

from tests.machine.rack.engine import usual
from tests.machine.rack.lab import WHOLE, laboratory
from tests.machine.rack.test_partition import THEIRS, rack
from tests.support.impairment import Impairment
from transferd import Status
from transferd.cli.pool.master import master_executable

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
OTHERS_S = 1.0
HEALED_S = 8.0  # a transfer that waits for the kernel's next try comes first
ENDED = (Status.OK, Status.PARTIAL, Status.MISS, Status.FAILED, Status.EXPIRED)
BAD = {
    "1 %": {"both": Impairment(delay=0.002, loss=0.01)},
    "5 %": {"both": Impairment(delay=0.002, loss=0.05)},
    "20 %": {"both": Impairment(delay=0.002, loss=0.2)},
    "30 % there": {"there": Impairment(loss=0.3)},
    "30 % back": {"back": Impairment(loss=0.3)},
}


async def test_a_node_far_away_is_waited_for_and_slows_no_other(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, 3, "--default_kv_lease_ttl=60s", lossy=(2,)))
        engines = await stack.enter_async_context(rack(lab))
        lab.impair(2, Impairment(delay=0.04, jitter=0.004))
        far = asyncio.ensure_future(engines[1].read(THEIRS[2], first=24))
        others = list[float]()
        for _ in range(5):
            assert (await engines[3].read(THEIRS[1])).status is Status.OK
            others.append(engines[3].took)
        assert usual(others) < OTHERS_S, others
        assert (await far).status is Status.OK
        print(f"read in {engines[1].took:.2f} s")
        assert (await engines[2].read(THEIRS[1])).status is Status.OK
        print(f"it reads in {engines[2].took:.2f} s")
        storage = await engines[1].storage()
        assert (storage["breaker"], storage["peers_down"], storage["connections_cut"]) == ("closed", {}, 0)


@pytest.mark.parametrize("impaired", BAD if WHOLE else ["20 %"])
async def test_a_node_that_loses_packets_costs_its_own_objects_at_most(tmp_path: Path, impaired: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, 3, "--default_kv_lease_ttl=60s", lossy=(2,)))
        engines = await stack.enter_async_context(rack(lab))
        reader, victim, third = engines.values()
        lab.impair(2, **BAD[impaired])
        mixed = [*THEIRS[1][:4], *THEIRS[3][:4], *THEIRS[2][:4]]
        theirs: Counter[Status] = Counter()
        kept: list[list[int]] = []  # what it was answered that it had stored
        beside = list[float]()
        for turn in range(3):
            others = list[float]()
            lossy = asyncio.ensure_future(reader.read(mixed, first=24))
            for _ in range(5):
                assert (await third.read(THEIRS[1])).status is Status.OK
                others.append(third.took)
            assert usual(others) < OTHERS_S, f"not its cable: {others}"
            result = await lossy
            print(f"mixed: {result.status} {len(result.block_ids)} in {reader.took:.2f} s {result.error}")
            assert result.block_ids[:8] == list(range(24, 32)), "what is reachable is delivered"
            theirs[result.status] += 1
            assert (await reader.read([*THEIRS[3], *THEIRS[1]])).status is Status.OK
            beside.append(reader.took)
            own = await victim.read(THEIRS[3])
            print(f"it reads: {own.status} {len(own.block_ids)} in {victim.took:.2f} s {own.error}")
            contents = range(1000 * turn + 1000, 1000 * turn + 1012)
            written = await victim.write(contents)
            kept.append([contents[block] for block in written.block_ids])
            print(f"it writes: {written.status} {len(written.block_ids)} in {victim.took:.2f} s {written.error}")
            assert {own.status, written.status} <= set(ENDED)
        print(theirs, await reader.storage())
        assert usual(beside) < OTHERS_S, beside
        lab.impair(2)
        took = [await each.reads_within(THEIRS[2], 60) for each in (reader, third)]
        print("healed after", took)
        assert max(took) < HEALED_S
        print("it reads again after", await victim.reads_within(THEIRS[3], 20))
        for stored in filter(None, kept):
            await reader.reads_within(stored, 20)
        storage = await reader.storage()
        assert (storage["breaker"], storage["peers_down"], storage["held"], storage["corrupt"]) == ("closed", {}, 0, 0)
