"""Blocks of a tier: none is lost, none is in two places, what is used stays, leaves go first."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transferd.cli.replay.pool import Admission, BlockPool, PooledBlock
from transferd.runtime.compat import timeout


def test_free_blocks_are_given_out_before_anything_is_evicted() -> None:
    pool = BlockPool(3)
    pool.release(pool.put(7, pool.take(1)[0][0]))
    blocks, evicted = pool.take(2)
    assert (len(set(blocks)), evicted) == (2, [])
    (block,), (entry,) = pool.take(1)
    assert (entry.content, entry.block) == (7, block)
    assert pool.find(7) is None


def test_leaves_are_evicted_before_their_roots() -> None:
    pool = BlockPool(6)
    blocks, _ = pool.take(6)
    chain = [pool.put(content, block) for content, block in enumerate(blocks)]
    for entry in reversed(chain):
        pool.release(entry)
    pool.hold(chain[0])  # another request uses a shorter chain again
    pool.hold(chain[1])
    pool.release(chain[1])
    pool.release(chain[0])
    assert [entry.content for entry in pool.take(6)[1]] == [5, 4, 3, 2, 1, 0]


def test_a_block_with_users_is_not_evicted() -> None:
    pool = BlockPool(2)
    blocks, _ = pool.take(2)
    used, idle = pool.put(1, blocks[0]), pool.put(2, blocks[1])
    pool.hold(used)
    pool.release(used)
    pool.release(idle)
    assert pool.obtainable == 1
    assert pool.take(1)[1] == [idle]
    with pytest.raises(AssertionError):
        pool.take(1)


class PoolAgainstModel(RuleBasedStateMachine):
    """Every block is in exactly one place, and eviction follows a naive list of who fell idle when."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(5)
        self.given: list[int] = []
        self.users: dict[int, int] = {}
        self.entries: dict[int, PooledBlock] = {}
        self.idle: list[int] = []
        self.contents = iter(range(10**6))

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        count = min(count, self.pool.obtainable)
        free = 5 - len(self.given) - len(self.entries)
        expected = self.idle[: max(0, count - free)]
        blocks, evicted = self.pool.take(count)
        assert len(blocks) == count
        assert [entry.content for entry in evicted] == expected
        assert {entry.block for entry in evicted} <= set(blocks)
        for entry in evicted:
            self.idle.remove(entry.content)
            del self.entries[entry.content], self.users[entry.content]
        self.given += blocks

    @precondition(lambda self: self.given)
    @rule(fill=st.booleans())
    def settle(self, fill: bool) -> None:
        block = self.given.pop()
        if not fill:
            self.pool.give_back([block])
            return
        content = next(self.contents)
        self.entries[content] = self.pool.put(content, block)
        self.users[content] = 1

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        content = data.draw(st.sampled_from(sorted(self.entries)))
        self.pool.hold(self.entries[content])
        self.users[content] += 1
        if content in self.idle:
            self.idle.remove(content)

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        content = data.draw(st.sampled_from(sorted(c for c, users in self.users.items() if users)))
        self.pool.release(self.entries[content])
        self.users[content] -= 1
        if not self.users[content]:
            self.idle.append(content)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        assert sorted(e.content for e in self.pool.entries) == sorted(self.entries)
        blocks = [*self.given, *(entry.block for entry in self.entries.values())]
        assert len(set(blocks)) == len(blocks) == 5 - self.pool.obtainable + len(self.idle)
        for content, entry in self.entries.items():
            assert self.pool.find(content) is entry
            assert entry.users == self.users[content]


TestPoolAgainstModel = PoolAgainstModel.TestCase


async def test_requests_are_let_in_while_they_fit_and_in_order() -> None:
    admission = Admission(10)
    story: list[str] = []

    async def request(name: str, blocks: int) -> None:
        await admission.enter(blocks)
        story.append(name)

    await request("a", 6)
    waiting = [asyncio.ensure_future(request(name, blocks)) for name, blocks in (("b", 8), ("c", 1))]
    await asyncio.sleep(0)
    assert story == ["a"], "c would fit, but b was there first"
    admission.leave(6)
    await asyncio.gather(*waiting)
    assert story == ["a", "b", "c"]


@pytest.mark.parametrize("seed", range(20))
async def test_everybody_gets_in_and_never_more_than_fit(seed: int) -> None:
    chance = random.Random(seed)
    admission, inside, most = Admission(16), 0, 0

    async def request() -> None:
        nonlocal inside, most
        blocks = chance.randint(0, 16)
        await admission.enter(blocks)
        inside += blocks
        most = max(most, inside)
        for _ in range(chance.randint(0, 3)):
            await asyncio.sleep(0)
        inside -= blocks
        admission.leave(blocks)

    async with timeout(60):
        await asyncio.gather(*(request() for _ in range(100)))
    assert most <= 16
    assert inside == 0
