"""A snapshot in batches: every block once, of its engine and medium, whatever their number."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.integration.subscriber import AllBlocksCleared, Batch, BlockStored
from tests.support.announced import announced_hashes
from transferd.daemon.kv_events.announcements import Block
from transferd.daemon.kv_events.snapshot import A_STEP, BLOCKS_PER_BATCH, Announced, Snapshot, _in_order


def read_back(snapshot: Snapshot) -> list[tuple[float, int | None, str | None, list[int | bytes]]]:
    found = []
    for payload in snapshot.hashes():
        batch = msgspec.msgpack.decode(payload, type=Batch)
        (event,) = batch.events
        assert isinstance(event, BlockStored)
        assert (event.parent_block_hash, event.token_ids, event.block_size) == (None, [], 0), "hashes only"
        found.append((batch.ts, batch.data_parallel_rank, event.medium, list(event.block_hashes)))
    return found


@pytest.mark.parametrize("count", [0, 1, BLOCKS_PER_BATCH - 1, BLOCKS_PER_BATCH, BLOCKS_PER_BATCH + 1, 3000])
def test_every_block_is_in_exactly_one_batch_of_bounded_size(count: int) -> None:
    hashes = [(1 << 64) - 1 - number for number in range(count)]
    batches = read_back(Snapshot(7, [announced_hashes(0, "GPU", hashes)], 12.5))
    assert [one for *_, some in batches for one in some] == hashes
    assert all(0 < len(some) <= BLOCKS_PER_BATCH for *_, some in batches)
    assert len(batches) == -(-count // BLOCKS_PER_BATCH)


def test_a_snapshot_separates_engines_and_media() -> None:
    announced = [
        announced_hashes(0, "GPU", [1, 2]),
        announced_hashes(0, "STORAGE", [2]),
        announced_hashes(3, "GPU", {9}),
    ]
    assert read_back(Snapshot(0, announced, 1.0)) == [
        (1.0, 0, "GPU", [1, 2]), (1.0, 0, "STORAGE", [2]), (1.0, 3, "GPU", [9])
    ]  # fmt: skip


def test_a_snapshot_lacks_blocks_announced_after_it_was_taken() -> None:
    live = {1: None, 2: None}
    snapshot = Snapshot(5, [announced_hashes(0, "CPU", live)], 1.0)
    live[3] = None
    del live[1]
    assert read_back(snapshot) == [(1.0, 0, "CPU", [1, 2])]
    assert snapshot.sequence == 5


def test_as_ordinary_batches_it_clears_first_and_has_parents_before_their_children_with_their_tokens() -> None:
    count = BLOCKS_PER_BATCH + 100
    chain = [Block(i, i - 1 if i else None, True, bytes([i % 256, 0, 0, 0] * 2)) for i in range(count)]
    other = Block(5000, 7, True, bytes(8))
    lone = Block(6000, None, False, None)
    announced = [Announced(0, "STORAGE", [other, *reversed(chain), lone, other], 2), Announced(3, "GPU", [], 2)]
    snapshot = Snapshot(7, announced, 12.5)
    batches = [msgspec.msgpack.decode(payload, type=Batch) for payload in snapshot.batches() if payload is not None]
    assert len(batches) == snapshot.count
    assert [(one.events, one.data_parallel_rank) for one in batches[:2]] == [
        ([AllBlocksCleared()], rank) for rank in (0, 3)
    ]
    known: dict[int | bytes | None, list[int]] = {None: []}
    for batch in batches[2:]:
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            assert isinstance(event, BlockStored)
            assert event.parent_block_hash in known
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            for i, hash_ in enumerate(event.block_hashes):
                assert hash_ not in known
                known[hash_] = event.token_ids[i * 2 : i * 2 + 2]
    assert known == {None: [], 5000: [0, 0], 6000: []} | {i: [i % 256] * 2 for i in range(count)}


@pytest.mark.parametrize("leaf_first", [True, False])
def test_a_chain_of_all_blocks_is_put_in_order_in_short_steps(leaf_first: bool) -> None:
    """One chain whose leaf comes first: all are in the first block's line, and the others have nothing to do."""
    count = 8 * A_STEP
    chain = [Block(number, number - 1 if number else None, False, None) for number in range(count)]
    looked = 0

    class Watched(list[Block]):
        def __iter__(self) -> Iterator[Block]:
            nonlocal looked
            for block in super().__iter__():
                looked += 1
                yield block

    steps, made, before, pauses = [0], list[Block](), 0, 0
    for batch in _in_order(Watched(reversed(chain) if leaf_first else chain)):
        steps.append(looked - before)
        before = looked
        made += batch
        pauses += not batch
    assert made == chain
    assert max(steps) <= A_STEP, "blocks without a pause"
    assert pauses == (3 if leaf_first else 2) * count // A_STEP, "in gathering, in a long line, and between the lines"
