"""A snapshot in batches: every block once, of its engine and medium, whatever their number."""

from __future__ import annotations

import msgspec
import pytest

from tests.integration.subscriber import Batch, BlockStored
from transferd.daemon.kv_events.snapshot import HASHES_PER_BATCH, Announced, Snapshot


def read_back(snapshot: Snapshot) -> list[tuple[float, int | None, str | None, list[int | bytes]]]:
    found = []
    for payload in snapshot.batches():
        batch = msgspec.msgpack.decode(payload, type=Batch)
        (event,) = batch.events
        assert isinstance(event, BlockStored)
        assert (event.parent_block_hash, event.token_ids, event.block_size) == (None, [], 0), "hashes only"
        found.append((batch.ts, batch.data_parallel_rank, event.medium, list(event.block_hashes)))
    return found


@pytest.mark.parametrize("count", [0, 1, HASHES_PER_BATCH - 1, HASHES_PER_BATCH, HASHES_PER_BATCH + 1, 3000])
def test_every_block_is_in_exactly_one_batch_of_bounded_size(count: int) -> None:
    hashes = [(1 << 64) - 1 - number for number in range(count)]
    batches = read_back(Snapshot(7, [Announced(0, "GPU", hashes)], 12.5))
    assert [one for *_, some in batches for one in some] == hashes
    assert all(0 < len(some) <= HASHES_PER_BATCH for *_, some in batches)
    assert len(batches) == -(-count // HASHES_PER_BATCH)


def test_a_snapshot_separates_engines_and_media() -> None:
    announced = [Announced(0, "GPU", [1, 2]), Announced(0, "STORAGE", [2]), Announced(3, "GPU", {9})]
    assert read_back(Snapshot(0, announced, 1.0)) == [
        (1.0, 0, "GPU", [1, 2]), (1.0, 0, "STORAGE", [2]), (1.0, 3, "GPU", [9])
    ]  # fmt: skip


def test_a_snapshot_lacks_blocks_announced_after_it_was_taken() -> None:
    live = {1: None, 2: None}
    snapshot = Snapshot(5, [Announced(0, "CPU", live)], 1.0)
    live[3] = None
    del live[1]
    assert read_back(snapshot) == [(1.0, 0, "CPU", [1, 2])]
    assert snapshot.sequence == 5
