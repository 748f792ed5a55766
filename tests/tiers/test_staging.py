"""Staging: bounded, leased in order, shared by nobody across consumers, and empty at close."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import ConfigError, InvariantError
from transferd.tiers.staging import Lease, Staging

LAYOUT = build_layout(CacheSection(layers=1, kv_heads=1, head_dim=8, block_size=4))
SLOT = 4096  # a small block and its footer fit one page


def make(slots: int) -> Staging:
    return Staging(LAYOUT, slots * SLOT, LAYOUT.block_bytes + 128)


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = make(8)
    yield made
    made.close()


def test_a_slot_holds_a_block_and_its_footer_and_consumers_share_none(staging: Staging) -> None:
    assert staging.object_bytes == LAYOUT.block_bytes + 128
    read = staging.try_acquire("read", 4, "r")
    write = staging.try_acquire("write", 4, "w")
    assert read is not None
    assert write is not None
    assert set(read.slots).isdisjoint(write.slots)
    assert staging.try_acquire("read", 1, "r2") is None, "all of its share is out, whatever the other has"
    assert staging.statistics() == {"capacity": 8 * SLOT, "used": 8 * SLOT, "peak": 8 * SLOT}
    read.release()
    read.release()
    write.release()
    assert staging.statistics()["used"] == 0


def test_two_chunks_fit_a_consumers_share(staging: Staging) -> None:
    assert staging.chunk_slots("read") == 2
    assert make(2).chunk_slots("write") == 1


def test_too_little_memory_is_a_configuration_error_that_says_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match=rf"host\.staging: must be at least {2 * SLOT} bytes"):
        make(1)


def test_closing_with_a_lease_out_names_the_holder_and_frees_nothing() -> None:
    staging = make(2)
    lease = staging.try_acquire("read", 1, "task-7")
    assert lease is not None
    with pytest.raises(InvariantError, match="task-7"):
        staging.close()
    lease.release()
    staging.close()


async def test_waiters_are_served_in_order_and_a_small_one_does_not_overtake(staging: Staging) -> None:
    first = await staging.acquire("read", 3, "first")
    big = asyncio.ensure_future(staging.acquire("read", 4, "big"))
    small = asyncio.ensure_future(staging.acquire("read", 1, "small"))
    await asyncio.sleep(0)
    assert not small.done(), "one slot is free, but it is not its turn"
    first.release()
    (await big).release()
    (await small).release()


async def test_a_cancelled_waiter_gives_back_what_it_was_granted_and_lets_the_next_pass(staging: Staging) -> None:
    held = await staging.acquire("read", 4, "held")
    cancelled = asyncio.ensure_future(staging.acquire("read", 4, "cancelled"))
    behind = asyncio.ensure_future(staging.acquire("read", 2, "behind"))
    await asyncio.sleep(0)
    held.release()  # grants to `cancelled`, which has not run since
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    (await behind).release()
    assert staging.statistics()["used"] == 0


async def test_a_cancelled_waiter_that_was_granted_nothing_lets_the_next_pass(staging: Staging) -> None:
    held = await staging.acquire("read", 3, "held")
    big = asyncio.ensure_future(staging.acquire("read", 4, "big"))
    behind = asyncio.ensure_future(staging.acquire("read", 1, "behind"))
    await asyncio.sleep(0)
    big.cancel()
    (await behind).release()
    held.release()
    assert staging.statistics()["used"] == 0


async def test_more_slots_than_exist_are_refused_instead_of_waited_for(staging: Staging) -> None:
    with pytest.raises(InvariantError, match="'greedy' wants 5 slots of 'read', which has 4"):
        await staging.acquire("read", 5, "greedy")


def test_a_slots_view_is_its_memory(staging: Staging) -> None:
    lease = staging.try_acquire("write", 1, "w")
    assert lease is not None
    (view,) = staging.views(lease.slots)
    assert len(view) == staging.object_bytes
    view[:10] = b"0123456789"
    start = lease.slots[0] * SLOT
    assert bytes(staging.memory.view[start : start + 10]) == b"0123456789"
    view.release()
    lease.release()


class StagingMachine(RuleBasedStateMachine):
    """Leases taken and returned in any order, against a count."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = make(10)
        self.leases: list[tuple[str, Lease]] = []

    @rule(consumer=st.sampled_from(["read", "write"]), count=st.integers(1, 5))
    def take(self, consumer: str, count: int) -> None:
        out = sum(len(lease.slots) for owner, lease in self.leases if owner == consumer)
        lease = self.staging.try_acquire(consumer, count, consumer)
        assert (lease is not None) == (out + count <= 5)
        if lease is not None:
            self.leases.append((consumer, lease))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))[1].release()

    @invariant()
    def no_slot_is_out_twice(self) -> None:
        out = [slot for _, lease in self.leases for slot in lease.slots]
        assert len(out) == len(set(out))
        assert self.staging.statistics()["used"] == len(out) * SLOT

    def teardown(self) -> None:
        for _, lease in self.leases:
            lease.release()
        self.staging.close()


StagingMachine.TestCase.settings = settings(max_examples=50, deadline=None)
TestStaging = StagingMachine.TestCase
