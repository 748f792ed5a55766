"""One engine as the daemon hosts it: what it says of itself from its build to its end, and what it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.daemon.test_engines import configured, serving
from tests.integration.own_memory import write
from tests.support.waits import until
from transferd import Client, Status
from transferd.daemon.belonging import digest
from transferd.daemon.daemon import Daemon
from transferd.tasks import ErrorInfo

CACHE = {
    "ranks": 2, "layers": 2, "kv_heads": 1, "head_dim": 8, "block_size": 4, "device_blocks": 8, "host_blocks": 4
}  # fmt: skip


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/t.sock"


@pytest.fixture
async def daemon(endpoint: str) -> AsyncIterator[Daemon]:
    made = Daemon(configured(endpoint, cache=CACHE))
    yield made
    assert await made.stop(lambda: 5.0) == []


async def test_the_engine_of_the_configuration_says_why_it_does_not_serve_until_it_does(daemon: Daemon) -> None:
    own = daemon.engines.own
    assert own is not None
    assert (own.token, own.digest, own.uid, own.registration) == ("", "", None, None)
    assert own.why_not_ready != ""
    await daemon.open()
    assert (own.why_not_ready, own.why_not_served) == ("", "")
    assert (own.called(1), own.block_size) == ("rank 1", 4)
    own.coordinator.hear(own.dispatcher.shut_down)
    assert (own.why_not_ready, own.why_not_served) == ("", "draining")


async def test_every_rank_has_its_own_memory_of_the_configured_size(daemon: Daemon) -> None:
    await daemon.open()
    own = daemon.default
    regions = [region for worker in own.workers for region in worker.context.regions.values()]
    assert len({region.address for region in regions}) == len(regions) == 4
    for worker in own.workers:
        assert worker.context.host is not None
        assert worker.context.host.memory.nbytes >= 4 * own.layout.block_bytes
        assert worker.context.staging.statistics()["capacity"] >= 64 * 1024
    assert own.nbytes >= sum(region.nbytes for region in regions)


async def test_a_registered_engine_has_the_name_the_user_and_the_token_of_who_registered_it(
    daemon: Daemon, endpoint: str
) -> None:
    await daemon.open()
    token = "t" * 32
    async with serving(endpoint, "llama", token=token, ranks=2, first_rank=2, group_ranks=4) as _:
        engine = daemon.engines.get("llama")
        assert engine is not None
        assert (engine.token, engine.digest, engine.called(1)) == (token, digest(token), "rank 1 of engine llama")
        assert [worker.context.object_rank for worker in engine.workers] == [2, 3]
        assert engine.uid is not None
        assert engine.first_epoch > daemon.default.first_epoch


async def test_unmapped_memory_counts_from_when_a_client_first_needed_it(daemon: Daemon, endpoint: str) -> None:
    await daemon.open()

    def unattached() -> tuple[list[int], float | None]:
        own = daemon.report().engines["default"]
        return own.unattached, own.unattached_s

    assert unattached() == ([0, 1], None), "nobody needs it"
    async with Client(endpoint) as one:
        await one.attach(0)
        ranks, since = unattached()
        assert ranks == [1]
        assert since is not None
        assert since >= 0
        await one.attach(1)
        assert unattached() == ([], None)
    await until(lambda: unattached() == ([0, 1], None), "its client has left")


async def test_an_end_answers_every_task_and_frees_all_memory_once_no_rank_works(daemon: Daemon, endpoint: str) -> None:
    await daemon.open()
    own = daemon.default
    async with Client(endpoint) as one:
        for rank in range(2):
            await one.attach(rank)
        await own.coordinator.pause()
        held = asyncio.ensure_future(one.submit(write("w", ["k"], [0])))
        await until(lambda: own.dispatcher.lanes.queued == 1)
        await own.end(ErrorInfo("engine_gone", "it leaves"))
        result = await held
        assert result.error is not None
        assert (result.status, result.block_ids) == (Status.FAILED, [])
        assert not any(region.allocated for worker in own.workers for region in worker.context.regions.values())
        refused = await one.submit(write("v", ["k"], [0]))
        assert refused.status is not Status.OK
