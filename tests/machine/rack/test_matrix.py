"""Further faults of a rack: a slow node, a master that dies, a full pool, layouts and generations, clocks apart.

What is read is compared on every rank, as everywhere here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.machine.rack.engine import Engine, engine, key, usual
from tests.machine.rack.lab import Lab, laboratory
from tests.machine.rack.test_leaving import has_segments
from tests.machine.rack.test_partition import HEALED_S, THEIRS, lab, rack
from transferd import Status
from transferd.cli.pool.master import master_executable
from transferd.runtime.compat import timeout

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
__all__ = ["lab"]  # a fixture
DAY_S = 24 * 3600

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


async def test_a_slow_node_is_waited_for_and_slows_no_other(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        # A load that takes longer than the lease of its objects has failed, whatever has come.
        lab = stack.enter_context(laboratory(tmp_path, 3, "--default_kv_lease_ttl=60s"))
        engines = await stack.enter_async_context(rack(lab))
        reader = engines[1]
        lab.slow_down(2, "15mbit")  # 6 MiB in 3.4 s; at 6mbit, pieces wait so long that the library gives up
        slow = asyncio.ensure_future(reader.read(THEIRS[2], first=24))
        others = list[float]()
        for _ in range(3):
            assert (await engines[3].read(THEIRS[1])).status is Status.OK
            others.append(engines[3].took)
        assert usual(others) < 1.0, others
        assert (await reader.read(THEIRS[3])).status is Status.OK
        assert not slow.done()
        result = await slow
        assert result.status is Status.OK, result.error
        storage = await reader.storage()
        assert (storage["breaker"], storage["peers_down"], storage["connections_cut"]) == ("closed", {}, 0)
        lab.speed_up(2)
        assert (await reader.read(THEIRS[2])).status is Status.OK
        assert reader.took < HEALED_S


async def test_a_master_that_dies_costs_what_was_stored_and_nothing_after_its_return(lab: Lab) -> None:
    async with rack(lab) as engines:
        lab.master.stop()
        for each in engines.values():
            took = list[float]()
            for _ in range(4):
                result = await each.read(THEIRS[2])
                assert result.status is Status.FAILED
                assert result.error is not None
                assert result.error.code == "storage_unavailable"
                took.append(each.took)
            assert usual(took[1:]) < 1.0, f"the second one knows: {took}"
        lab.master.start()
        for number, each in engines.items():
            await each.until_stored(range(1000 * number, 1000 * number + 12))
        for each in engines.values():
            assert (await each.read(THEIRS[2])).status is Status.MISS, "it has forgotten"
            for number in engines:
                assert (await each.read(range(1000 * number, 1000 * number + 12))).status is Status.OK
            assert (await each.storage())["breaker"] == "closed"


async def test_a_pool_that_is_far_too_small_says_so_and_never_gives_other_bytes(lab: Lab) -> None:
    async with rack(lab, global_segment_size="32MiB", replica_num=2) as engines:
        stored = dict.fromkeys(engines, 0)
        for turn in range(6):
            chains = {number: range(at := 10_000 * number + 100 * turn, at + 12) for number in engines}
            written = await asyncio.gather(*(engines[number].write(chain) for number, chain in chains.items()))
            for number, result in zip(engines, written, strict=True):
                assert result.status in (Status.OK, Status.PARTIAL, Status.FAILED), result
                stored[number] += len(result.block_ids)
                if result.status is not Status.OK:
                    assert result.error is not None
                    assert result.error.code == "storage_full", result.error
            for number, each in engines.items():
                result = await each.read(chains[number % 3 + 1])
                assert result.status in (Status.OK, Status.PARTIAL, Status.MISS), result
        print("blocks stored", stored)
        assert all(stored.values()), "each has stored something"
        for each in engines.values():
            assert (await each.storage())["corrupt"] == 0


async def test_other_layouts_and_generations_are_misses_and_each_reads_its_own(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=3))
        processes = [lab.daemon(1), lab.daemon(2, cache={"head_dim": 32}), lab.daemon(3)]
        await has_segments(lab, 3)
        one, two, three = [await stack.enter_async_context(engine(process)) for process in processes]
        chain = THEIRS[1]
        await one.until_stored(chain)
        assert (await two.read(chain)).status is Status.MISS
        async with timeout(60):
            while (await two.storage())["other_layout"] == 0:
                await two.read(chain)  # each looks at the records of layouts, once a second at most
                await asyncio.sleep(0.1)
        await two.until_stored(chain)
        await three.client.set_generation("next")
        assert (await three.read(chain)).status is Status.MISS
        await three.until_stored(chain)
        for each in (one, two, three):
            assert (await each.read(chain)).status is Status.OK, "its own bytes, compared"
        await one.client.set_generation("next")
        assert await one.client.exists([key(content) for content in chain]) == [True] * 12, "of the third node"
        assert (await one.read(chain)).status is Status.OK


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime (Debian: faketime) is not there")
async def test_clocks_that_are_days_apart_change_nothing(tmp_path: Path) -> None:
    def clock(seconds: int) -> tuple[str, ...]:
        # Not by the command of that name: it stays between us and the daemon, and a signal would reach only itself.
        return ("env", "FAKETIME_DONT_FAKE_MONOTONIC=1", f"LD_PRELOAD={FAKETIME}", f"FAKETIME={seconds:+d}s")

    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=3))
        processes = [lab.daemon(1), lab.daemon(2, under=clock(3 * DAY_S)), lab.daemon(3, under=clock(-2 * DAY_S))]
        await has_segments(lab, 3)
        engines: dict[int, Engine] = {
            number: await stack.enter_async_context(engine(process)) for number, process in enumerate(processes, 1)
        }
        for number, each in engines.items():
            await each.until_stored(THEIRS[number])
        dates = [datetime.fromisoformat(json.loads(each.log.splitlines()[0])["ts"][:19]) for each in processes]
        assert timedelta(days=2) < dates[1] - dates[0] < timedelta(days=4)
        assert timedelta(days=1) < dates[0] - dates[2] < timedelta(days=3)
        async with timeout(60):
            for each in engines.values():
                for chain in THEIRS.values():
                    assert (await each.read(chain)).status is Status.OK
        lab.cut_off(2)
        for number in (1, 3):
            assert (await engines[number].read(THEIRS[2])).status is Status.FAILED
            assert (await engines[number].read(THEIRS[4 - number])).status is Status.OK
        lab.rejoin(2)
        for number in (1, 3):
            assert await engines[number].reads_within(THEIRS[2], 20) < HEALED_S
            assert (await engines[number].storage())["held"] == 0
