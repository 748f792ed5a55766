"""The contract of token-indexed storage, over every implementation: what storage/tokens.py says, as tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.storage.token_harness import BLOCK, KINDS, Kind, TokenWorld, token_world
from transferd.tasks import Stop, TokenIds

PATH = list(range(100, 100 + 10 * BLOCK))


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TokenWorld]:
    kind: Kind = request.param
    async with token_world(kind, tmp_path) as opened:
        yield opened


async def test_written_blocks_are_read_back_on_every_rank_into_other_blocks(world: TokenWorld) -> None:
    source, target = [7, 3, 11, 0], [30, 2, 41, 5]
    for rank in world.ranks:
        rank.fill(source, seed=1)
    before = [rank.content(source) for rank in world.ranks]
    assert before[0] != before[1]
    for outcome in await world.write(PATH[: 4 * BLOCK], 0, source):
        assert (list(outcome.moved), outcome.error) == ([0, 1, 2, 3], None)
        assert outcome.bytes == 4 * world.ranks[0].context.layout.block_bytes
    assert await world.match(PATH[: 4 * BLOCK]) == 4
    for outcome in await world.read(PATH[: 4 * BLOCK], 0, target):
        assert (list(outcome.moved), outcome.error) == ([0, 1, 2, 3], None)
    assert [rank.content(target) for rank in world.ranks] == before


async def test_an_unknown_path_is_a_miss_and_touches_nothing(world: TokenWorld) -> None:
    untouched = [rank.content([1, 2]) for rank in world.ranks]
    assert await world.match(PATH) == 0
    for outcome in await world.read(PATH[: 2 * BLOCK], 0, [1, 2]):
        assert (list(outcome.moved), outcome.error, outcome.bytes) == ([], None, 0)
    assert [rank.content([1, 2]) for rank in world.ranks] == untouched


async def test_paths_share_blocks_as_far_as_their_tokens_agree(world: TokenWorld) -> None:
    await world.write(PATH[: 6 * BLOCK], 0, list(range(6)))
    other = PATH[: 3 * BLOCK + 1] + [9] * BLOCK * 2
    assert await world.match(other) == 3
    assert await world.match([8, *PATH[1:]]) == 0
    assert await world.match(PATH) == 6
    assert await world.match(PATH[: 2 * BLOCK + 3]) == 2


async def test_a_read_takes_the_prefix_that_is_there_and_leaves_the_rest(world: TokenWorld) -> None:
    for rank in world.ranks:
        rank.fill(list(range(3)), seed=2)
    await world.write(PATH[: 3 * BLOCK], 0, [0, 1, 2])
    untouched = [rank.content([13, 14]) for rank in world.ranks]
    for outcome in await world.read(PATH[: 5 * BLOCK], 0, [10, 11, 12, 13, 14]):
        assert (list(outcome.moved), outcome.error) == ([0, 1, 2], None)
    assert [rank.content([10, 11, 12]) for rank in world.ranks] == [rank.content([0, 1, 2]) for rank in world.ranks]
    assert [rank.content([13, 14]) for rank in world.ranks] == untouched


async def test_reading_and_writing_may_begin_inside_the_path(world: TokenWorld) -> None:
    for rank in world.ranks:
        rank.fill(list(range(8)), seed=3)
    await world.write(PATH[: 4 * BLOCK], 0, [0, 1, 2, 3])
    await world.write(PATH[: 8 * BLOCK], 4, [4, 5, 6, 7])
    assert await world.match(PATH) == 8
    assert await world.match(PATH, 5) == 3
    assert await world.match(PATH, 8) == 0
    for outcome in await world.read(PATH[: 8 * BLOCK], 3, [20, 21, 22]):
        assert list(outcome.moved) == [0, 1, 2]
    assert [rank.content([20, 21, 22]) for rank in world.ranks] == [rank.content([3, 4, 5]) for rank in world.ranks]


async def test_a_path_may_go_on_behind_the_blocks_that_are_meant(world: TokenWorld) -> None:
    await world.write(PATH, 1, [5, 6])
    assert await world.match(PATH, 1) == 2
    assert await world.match(PATH) == 0


async def test_writing_again_is_no_error(world: TokenWorld) -> None:
    for rank in world.ranks:
        rank.fill([0, 1], seed=4)
    await world.write(PATH[: 2 * BLOCK], 0, [0, 1])
    for outcome in await world.write(PATH[: 2 * BLOCK], 0, [0, 1]):
        assert (list(outcome.moved), outcome.error) == ([0, 1], None)


async def test_a_stopped_transfer_begins_no_call(world: TokenWorld) -> None:
    write = world.write_job(PATH[: 2 * BLOCK], 0, [0, 1])
    write.stop.set(Stop.CANCELLED)
    outcome = await world.run(world.ranks[0], write)
    assert (list(outcome.moved), outcome.stop) == ([], Stop.CANCELLED)
    assert await world.match(PATH) == 0
    await world.write(PATH[: 2 * BLOCK], 0, [0, 1])
    read = world.read_job(PATH[: 2 * BLOCK], 0, [2, 3])
    read.stop.set(Stop.EXPIRED)
    untouched = world.ranks[0].content([2, 3])
    outcome = await world.run(world.ranks[0], read)
    assert (list(outcome.moved), outcome.stop) == ([], Stop.EXPIRED)
    assert world.ranks[0].content([2, 3]) == untouched


async def test_many_transfers_at_once_keep_out_of_each_others_way(world: TokenWorld) -> None:
    paths = [[i, *PATH[: 4 * BLOCK - 1]] for i in range(8)]
    for i in range(8):
        for rank in world.ranks:
            rank.fill(list(range(4 * i, 4 * i + 4)), seed=i)
    before = [rank.content(list(range(32))) for rank in world.ranks]
    await asyncio.gather(*(world.write(path, 0, list(range(4 * i, 4 * i + 4))) for i, path in enumerate(paths)))
    await asyncio.gather(*(world.read(path, 0, list(range(32 + 4 * i, 36 + 4 * i))) for i, path in enumerate(paths)))
    assert [rank.content(list(range(32, 64))) for rank in world.ranks] == before


async def test_a_flush_updates_the_index_and_moves_no_bytes(world: TokenWorld) -> None:
    flush = world.storage.flush_token_index
    await flush(TokenIds(PATH[: 5 * BLOCK]), 2, resident=True)
    assert world.on_device(PATH) == [False, False, True, True, True] + [False] * 5
    await flush(TokenIds(PATH[: 4 * BLOCK]), 3, resident=False)
    assert world.on_device(PATH) == [False, False, True, False, True] + [False] * 5
    await flush(TokenIds(PATH[: 4 * BLOCK]), 3, resident=False)  # already gone
    assert world.on_device(PATH) == [False, False, True, False, True] + [False] * 5
    for outcome in await world.read(PATH[: 5 * BLOCK], 2, [0, 1, 2]):
        assert list(outcome.moved) == []


async def test_statistics_have_what_reports_need(world: TokenWorld) -> None:
    assert {"objects", "bytes", "hits", "misses", "errors"} <= set(world.storage.statistics())
