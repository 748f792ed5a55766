"""One node's fault stays one node's: three daemons on one pool, one of them cut off, dead or stopped."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.rack.engine import Engine, engine, usual
from tests.machine.rack.lab import WHOLE, Lab, laboratory
from tests.support.freezing import freeze, thaw
from transferd import Status
from transferd.cli.pool.master import master_executable

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
THEIRS = {1: range(100, 112), 2: range(200, 212), 3: range(300, 312)}
# On a machine that may stand still for some seconds. The library alone waits for a minute.
ANSWER_S = 10.0  # for a call to a node that has just stopped answering
HEALED_S = 5.0


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with laboratory(tmp_path, nodes=3) as running:
        yield running


@contextlib.asynccontextmanager
async def rack(lab: Lab, **mooncake: Any) -> AsyncIterator[dict[int, Engine]]:
    """An engine on each node. Each node has stored contents of its own, and the first has read all of them."""
    async with contextlib.AsyncExitStack() as stack:
        processes = [lab.daemon(number, **mooncake) for number in THEIRS]
        engines = {
            number: await stack.enter_async_context(engine(process))
            for number, process in zip(THEIRS, processes, strict=True)
        }
        for number, contents in THEIRS.items():
            await engines[number].until_stored(contents)
        for contents in THEIRS.values():
            assert (await engines[1].read(contents)).status is Status.OK
        yield engines


def cut_both_ways(lab: Lab, _: Engine) -> Callable[[], None]:
    lab.cut_off(2)
    return lambda: lab.rejoin(2)


def cut_one_way(lab: Lab, _: Engine) -> Callable[[], None]:
    lab.cut(2, 1)
    return lambda: lab.mend(2, 1)


def stopped(_: Lab, victim: Engine) -> Callable[[], None]:
    freeze(victim.process.pid)
    return lambda: thaw(victim.process.pid)


@pytest.mark.parametrize("fault", [cut_one_way, stopped, *([cut_both_ways] if WHOLE else [])])
async def test_a_node_that_does_not_answer_costs_its_own_objects(
    lab: Lab, fault: Callable[[Lab, Engine], Callable[[], None]]
) -> None:
    async with rack(lab) as engines:
        reader = engines[1]
        mend = fault(lab, engines[2])
        mixed = [*THEIRS[1][:4], *THEIRS[3][:4], *THEIRS[2][:4]]
        result = await reader.read(mixed)
        print("mixed", result.status, len(result.block_ids), f"{reader.took:.2f} s", result.error)
        assert reader.took < ANSWER_S
        assert result.block_ids == list(range(8)), "what is reachable is delivered"
        assert result.error is not None
        assert lab.address(2) in result.error.message
        others, known = list[float](), list[float]()
        for _ in range(5):
            assert (await reader.read([*THEIRS[3], *THEIRS[1]])).status is Status.OK
            others.append(reader.took)
            assert (await reader.read(THEIRS[2])).status is not Status.OK
            known.append(reader.took)
        assert usual(others) < 1.0, others
        assert usual(known) < 1.0, f"the second one knows: {known}"
        storage = await reader.storage()
        assert storage["breaker"] == "closed", "the master answers"
        assert [endpoint.split(":")[0] for endpoint in storage["peers_down"]] == [lab.address(2)]
        concerns = {one["name"]: one["text"] for one in (await reader.client.stats())["concerns"]}
        assert lab.address(2) in concerns["node_down"]
        mend()
        took = await reader.reads_within(THEIRS[2], 20)
        print("healed after", took)
        assert took < HEALED_S
        assert (await reader.storage())["peers_down"] == {}
        assert storage["held"] == 0
