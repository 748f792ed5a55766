"""Where copies lie: what is left of the chains when a node is gone, and what is stored while one does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path

import pytest

from tests.machine.rack.engine import Engine, engine, usual
from tests.machine.rack.lab import laboratory
from tests.machine.rack.test_partition import ANSWER_S, HEALED_S
from transferd import Status
from transferd.cli.pool.master import master_executable
from transferd.runtime.compat import timeout

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
CHAIN = 12
CHAINS = [range(100 * n, 100 * n + CHAIN) for n in range(8)]


@pytest.mark.parametrize(("copies", "least"), [(1, 0.75), (2, 1.0)])
async def test_chains_of_the_other_nodes_still_match_when_one_is_gone(
    tmp_path: Path, copies: int, least: float
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=4))
        processes = [lab.daemon(number, replica_num=copies) for number in range(1, 5)]
        engines = [await stack.enter_async_context(engine(process)) for process in processes]
        async with timeout(60):
            while len(lab.master.segments()) < len(engines):
                await engines[0].storage()
        for number, chain in enumerate(CHAINS):
            await engines[number % 4].until_stored(chain)
        assert processes[3].stop() == 0
        async with timeout(60):
            while len(lab.master.segments()) == len(engines):
                await engines[0].storage()
        whole = [await engines[0].matches(chain) == CHAIN for chain in CHAINS]
        share = sum(whole) / len(whole)
        print(f"{copies} copies: {share:.2f} of the chains match")
        assert share >= least
        for chain, there in zip(CHAINS, whole, strict=True):
            if there:
                assert (await engines[1].read(chain)).status is Status.OK


async def test_while_a_node_does_not_answer_one_copy_is_stored_and_counted(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=2))
        processes = [lab.daemon(number, replica_num=2) for number in (1, 2)]
        one, two = [await stack.enter_async_context(engine(process)) for process in processes]
        await _until_both_have(one, two, CHAINS[0])
        lab.cut_off(2)
        assert (await one.write(CHAINS[1])).status is Status.OK
        print(f"first write after the cut: {one.took:.2f} s")
        assert one.took < ANSWER_S
        known = list[float]()
        for chain in CHAINS[2:5]:
            assert (await one.write(chain)).status is Status.OK
            known.append(one.took)
        assert usual(known) < 1.0, f"the second one knows: {known}"
        assert (await one.read([*CHAINS[1], *CHAINS[2]])).status is Status.OK
        report = await one.client.stats()
        assert report["storage"]["under_replicated"] >= 2 * 2 * CHAIN
        assert "under_replicated" in {concern["name"] for concern in report["concerns"]}
        lab.rejoin(2)
        assert await two.reads_within(CHAINS[1], 20) < HEALED_S


async def test_a_node_that_died_costs_one_put_and_soon_there_are_two_copies_again(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=3))
        processes = [lab.daemon(number, replica_num=2, global_segment_size="256MiB") for number in (1, 2, 3)]
        one, two, _ = [await stack.enter_async_context(engine(process)) for process in processes]
        contents = itertools.count(10_000, 100)

        async def copies() -> int:
            """How many copies one chain gets that is stored now."""
            before = (await one.storage())["under_replicated"]
            at = next(contents)
            assert (await one.write(range(at, at + 2))).status is Status.OK
            return 2 if (await one.storage())["under_replicated"] == before else 1

        async with timeout(60):
            while len(lab.master.segments()) < 3 or await copies() < 2:
                pass
        for _ in range(8):  # so it has met both
            await copies()
        processes[2].kill()
        async with timeout(30):
            while not (await one.storage())["peers_down"]:
                await copies()
        assert len(lab.master.segments()) == 3, "the master has not noticed yet"
        known = list[float]()
        for _ in range(3):
            assert await copies() == 1
            known.append(one.took)
        print(known)
        assert usual(known) < 0.5, f"it is known whom not to ask: {known}"
        async with timeout(60):
            while await copies() < 2:  # noqa: ASYNC110 - the pool tells nobody
                await asyncio.sleep(0.3)
        assert await two.reads_within(range(10_000, 10_002), 20) < HEALED_S


async def _until_both_have(one: Engine, two: Engine, chain: range) -> None:
    """Until a copy is stored on each node: the second one lends its memory a moment after its start."""
    async with timeout(60):
        for offset in range(10):
            before = (await one.storage())["under_replicated"]
            await one.until_stored([content + 10_000 * offset for content in chain])
            if (await one.storage())["under_replicated"] == before:
                break
    assert (await two.read([content + 10_000 * offset for content in chain])).status is Status.OK
