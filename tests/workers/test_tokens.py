"""Flush-only on the ranks: told once for the node, by rank 0, and in nobody's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.storage.token_harness import BLOCK, KINDS, Kind, TokenWorld, token_world
from tests.support.attention_store_sdk import AttentionStoreSDKError, Held
from tests.support.waits import until
from transferd.tasks import Stop, WriteStorageTask

PATH = list(range(100, 100 + 10 * BLOCK))
SDK = next(kind for kind in KINDS if kind.name == "sdk-cuda")


@pytest.fixture(params=[*KINDS, Kind("open-index-alone", {"driver": "open", "data": "none"})], ids=lambda k: k.name)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TokenWorld]:
    async with token_world(request.param, tmp_path, only_flush=True) as opened:
        yield opened


def flush(world: TokenWorld, start: int, count: int, exists: bool | None, path: list[int] = PATH) -> Any:
    job = world.write_job(path, start, list(range(count)), flush_cache_exists=exists)
    return job, asyncio.gather(*(rank.handler.write(job) for rank in world.ranks))


async def test_true_is_resident_false_is_gone_and_none_is_a_finished_request(world: TokenWorld) -> None:
    untouched = [rank.content([0, 1, 2]) for rank in world.ranks]
    with structlog.testing.capture_logs() as logs:
        for exists, resident in ((True, True), (False, False), (None, True)):
            _, outcomes = flush(world, 2, 3, exists)
            for outcome in await outcomes:
                assert (list(outcome.moved), outcome.bytes, outcome.error) == ([0, 1, 2], 0, None)
            assert world.on_device(PATH) == [False] * 2 + [resident] * 3 + [False] * 5
    assert not [line for line in logs if line["log_level"] == "warning"]  # FastDeploy never says it on a finish
    assert [rank.content([0, 1, 2]) for rank in world.ranks] == untouched


async def test_an_eviction_without_blocks_withdraws_the_rest_of_the_path(world: TokenWorld) -> None:
    """FastDeploy's: one key, that of the whole request; all its tokens; the first block that is gone."""
    await flush(world, 0, 10, None)[1]
    assert world.on_device(PATH) == [True] * 10
    job = world.write_job([*PATH, 1, 2], 3, [], keys=["of the whole request"], flush_cache_exists=False)
    for outcome in await asyncio.gather(*(rank.handler.write(job) for rank in world.ranks)):
        assert outcome.error is None
    assert world.on_device(PATH) == [True] * 3 + [False] * 7


async def test_rank_0_alone_updates_the_index_once(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path, only_flush=True) as world:
        assert world.double is not None
        before = len(world.double.calls)
        _, outcomes = flush(world, 0, 4, True)
        await outcomes
        assert world.double.calls[before:] == [("flush_token_index", 0, None)]
        assert world.double.stored == {}


async def test_a_failed_update_of_the_index_fails_the_task_and_names_the_rank(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path, only_flush=True) as world:
        assert world.double is not None

        def fail(name: str) -> None:
            raise AttentionStoreSDKError("no index today")

        world.double.before = fail
        job, outcomes = flush(world, 0, 2, False)
        assert isinstance(job.task, WriteStorageTask)
        merged = job.task.merge(await outcomes)
        assert (str(merged.status), merged.block_ids) == ("failed", [])
        assert merged.error is not None
        assert merged.error.message == "rank 0: AttentionStore, flush_token_index: no index today"


async def test_a_flush_that_hangs_ends_with_its_deadline_and_holds_nothing(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path, only_flush=True) as world:
        assert world.double is not None
        held = Held(world.double, "flush_token_index")
        try:
            job, outcomes = flush(world, 0, 2, True)
            await until(held.begun.is_set)
            job.stop.set(Stop.EXPIRED)
            first, second = await outcomes
            assert (list(first.moved), first.stop) == ([], Stop.EXPIRED)
            assert list(second.moved) == [0, 1]
            assert len(world.ranks[0].context.background) == 0
        finally:
            held.go.set()


async def test_reads_still_move_bytes(tmp_path: Path) -> None:
    async with token_world(SDK, tmp_path, only_flush=True) as world:
        world.ranks[0].fill([0, 1], seed=1)
        await world.write(PATH[: 2 * BLOCK], 0, [0, 1])  # somebody else's: a task would not
        job = world.read_job(PATH[: 2 * BLOCK], 0, [5, 6])
        outcome = await world.ranks[0].handler.read(job)
        assert list(outcome.moved) == [0, 1]
        assert world.ranks[0].content([5, 6]) == world.ranks[0].content([0, 1])
