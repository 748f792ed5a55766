"""Windows: tasks with a byte in common run in the order of submission, also of several engines; all others overlap."""

from __future__ import annotations

import itertools
import os
import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.dispatch import is_idle, touching
from transferd.control.byte_ranges import ByteRanges, WindowGrid
from transferd.control.order import EDGE_BYTES, Claim, HazardTable
from transferd.errors import RequestError

SEED = int(os.environ.get("SEED", "48"))


def table_of(ranges: ByteRanges[Claim], *grids: WindowGrid) -> HazardTable:
    table = HazardTable(ranges)
    table.grids = grids
    return table


def enter(table: HazardTable, name: str, **footprint: Sequence[object]) -> Claim:
    return table.enter(name, touching(**footprint))


def test_two_windows_that_share_one_byte_are_ordered_and_neighbours_are_not() -> None:
    table = table_of(ByteRanges(), WindowGrid("m", 100, 4, 10))  # windows 0 and 2 share two bytes, 0 and 3 none
    write = enter(table, "write", device_writes=[0])
    assert enter(table, "beside", device_reads=[3]).ready
    read = enter(table, "read", device_reads=[2])
    assert not read.ready
    assert table.leave(write) == [read]


def test_the_last_byte_counts_and_the_one_behind_it_does_not() -> None:
    ranges: ByteRanges[Claim] = ByteRanges()
    one = table_of(ranges, WindowGrid("m", 0, 1, 10))
    enter(one, "bytes 5 to 14", device_writes=[5])
    assert enter(one, "bytes 15 to 24", device_reads=[15]).ready
    assert not enter(one, "bytes 14 to 23", device_reads=[14]).ready
    other = table_of(ranges, WindowGrid("m", 4, 1, 1))
    assert enter(other, "byte 4", device_writes=[0]).ready
    assert not enter(other, "byte 5", device_writes=[1]).ready


def test_readers_of_the_same_bytes_overlap() -> None:
    table = table_of(ByteRanges(), WindowGrid("m", 0, 4, 10))
    assert enter(table, "a", device_reads=[0, 1, 2]).ready
    assert enter(table, "b", device_reads=[1]).ready


def test_a_claim_waits_for_another_engines_claim_and_becomes_ready_when_it_leaves() -> None:
    ranges: ByteRanges[Claim] = ByteRanges()
    large, small = table_of(ranges, WindowGrid("m", 0, 8, 64)), table_of(ranges, WindowGrid("m", 0, 8, 8))
    load = enter(large, "load", device_writes=[2])  # bytes 16 to 79
    store = enter(small, "store", device_reads=[9])  # 72 to 79
    assert not store.ready
    assert enter(small, "behind", device_reads=[10]).ready
    assert large.leave(load) == [store]
    assert store.table is small


def test_the_same_bytes_of_other_memory_are_other_bytes() -> None:
    ranges: ByteRanges[Claim] = ByteRanges()
    one, other = table_of(ranges, WindowGrid((1, 2), 0, 4, 10)), table_of(ranges, WindowGrid((1, 3), 0, 4, 10))
    enter(one, "one", device_writes=[0])
    assert enter(other, "other", device_writes=[0]).ready


def test_one_rank_with_a_byte_in_common_is_enough() -> None:
    table = table_of(ByteRanges(), WindowGrid("m", 0, 10, 10), WindowGrid("m", 1000, 5, 10))
    enter(table, "write", device_writes=[0])
    assert not enter(table, "read", device_reads=[1]).ready, "windows 0 and 1 of rank 1 share five bytes"
    assert enter(table, "another", device_reads=[2]).ready


def test_a_cancelled_claim_of_another_engine_holds_its_place_until_what_it_waits_for_has_left() -> None:
    ranges: ByteRanges[Claim] = ByteRanges()
    one, other = table_of(ranges, WindowGrid("m", 0, 8, 16)), table_of(ranges, WindowGrid("m", 0, 4, 4))
    running = enter(one, "running", device_reads=[0])
    cancelled = enter(other, "cancelled", device_writes=[0])
    behind = enter(one, "behind", device_reads=[0])
    assert not behind.ready
    assert other.leave(cancelled) == []
    assert not is_idle(other), "it is still there"
    assert one.leave(running) == [behind]
    assert is_idle(other)
    one.leave(behind)
    assert is_idle(one)
    assert not ranges._claims


def test_targets_of_one_task_that_share_a_byte_are_refused_by_name() -> None:
    table = table_of(ByteRanges(), WindowGrid("m", 0, 100, 100), WindowGrid("n", 0, 4, 10))
    table.check_targets(touching(device_writes=[7, 0, 3]))
    with pytest.raises(RequestError, match="blocks 5 and 7 share bytes: windows of 10, 4 apart") as refusal:
        table.check_targets(touching(device_writes=[7, 0, 5]))
    assert refusal.value.reason == "duplicate_id"


def test_a_window_that_is_in_the_way_of_many_counts_what_it_costs() -> None:
    table = table_of(ByteRanges(), WindowGrid("m", 0, 1, 1000))
    for block in range(0, 900, 100):
        enter(table, f"small {block}", device_reads=[block])
    wide = table.enter("wide", touching(device_writes=[450]), 1000)
    assert wide.blockers == 9
    assert wide.nbytes == 1000 + 9 * EDGE_BYTES
    assert table.nbytes == wide.nbytes


def test_an_arena_of_96_gib_in_25_million_windows_costs_no_memory_a_window() -> None:
    ranges: ByteRanges[Claim] = ByteRanges()
    table = table_of(ranges, WindowGrid("m", 0, 4096, 4 * 2**20))
    tracemalloc.start()
    try:
        first = enter(table, "first", device_reads=[0, 12_000_000, 25_164_799])
        last = enter(table, "last", device_writes=[25_164_799 - 1023])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (first.ready, last.ready) == (True, False)
    assert peak < 100_000


def test_work_grows_with_ranges_not_with_their_product() -> None:
    """1,000 windows of one engine that all overlap, in the way of 20,000 small ones of another: no pairs are made."""
    ranges: ByteRanges[Claim] = ByteRanges()
    huge, small = table_of(ranges, WindowGrid("m", 0, 1, 2**40)), table_of(ranges, WindowGrid("m", 0, 64, 32))
    for number in range(50):
        enter(huge, f"{number}", device_reads=range(number, 20_000, 20))
    assert sum(len(rows) for rows in ranges._tables.values()) == 50, "ranges that overlap are one"
    assert enter(small, "small", device_reads=range(20_000)).ready
    assert enter(small, "write", device_writes=range(20_000)).blockers == 51


# --- against the rule, written a second time -------------------------------------------------------

grids = st.builds(
    WindowGrid, st.sampled_from("mmmn"), st.integers(0, 12), st.integers(1, 8), st.integers(1, 14)
)  # fmt: skip
ids = st.lists(st.integers(0, 9), max_size=3)


def bytes_of(grid: Sequence[WindowGrid], windows: Sequence[int]) -> set[tuple[object, int]]:
    return {
        (one.memory, one.start + window * one.stride + at)
        for one in grid
        for window in windows
        for at in range(one.nbytes)
    }


@given(grids, ids.filter(bool))
def test_ranges_are_the_bytes_of_the_windows_each_once(grid: WindowGrid, windows: list[int]) -> None:
    listed = [at for start, end in grid.ranges(windows) for at in range(start, end)]
    assert len(set(listed)) == len(listed)
    assert {(grid.memory, at) for at in listed} == bytes_of([grid], windows)
    assert sorted(listed) == listed


@given(grids, st.lists(st.integers(0, 9), max_size=4, unique=True))
def test_overlapping_finds_a_pair_exactly_if_there_is_one(grid: WindowGrid, windows: list[int]) -> None:
    found = grid.overlapping(windows)
    apart = len(bytes_of([grid], windows)) == len(windows) * grid.nbytes
    assert (found is None) == apart
    if found is not None:
        assert bytes_of([grid], found[:1]) & bytes_of([grid], found[1:])


@settings(max_examples=400)
@given(
    st.lists(st.lists(grids, min_size=1, max_size=2), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), ids, ids, ids, ids), max_size=12),
    st.data(),
)
def test_a_claim_is_ready_exactly_when_no_earlier_claim_with_its_bytes_holds_its_place(
    engines: list[list[WindowGrid]],
    tasks: list[tuple[int, list[int], list[int], list[int], list[int]]],
    data: st.DataObject,
) -> None:
    """Several engines over two memories. Host blocks are each engine's own, and ordered by number as ever."""
    ranges: ByteRanges[Claim] = ByteRanges()
    tables = [table_of(ranges, *grid) for grid in engines]
    claims: list[Claim] = []
    uses: list[tuple[set[object], set[object]]] = []  # what each claim reads and writes
    for number, (engine, reads, writes, host_reads, host_writes) in enumerate(tasks):
        engine %= len(tables)
        footprint = touching(device_reads=reads, device_writes=writes, host_reads=host_reads, host_writes=host_writes)
        claims.append(tables[engine].enter(number, footprint))
        uses.append(
            (
                bytes_of(engines[engine], reads) | {("host", engine, block) for block in host_reads},
                bytes_of(engines[engine], writes) | {("host", engine, block) for block in host_writes},
            )
        )
    live = set(range(len(claims)))
    started: set[int] = set()
    while live:
        for later in sorted(live - started):
            reads_, writes_ = uses[later]
            conflicts = [
                earlier
                for earlier in live
                if earlier < later and (uses[earlier][1] & (reads_ | writes_) or uses[earlier][0] & writes_)
            ]
            if claims[later].ready:
                assert not conflicts, (later, conflicts)
                started.add(later)
        assert claims[min(live)].ready, "the oldest can always run: no deadlock"
        gone = data.draw(st.sampled_from(sorted(live)))
        before = {number for number in live if claims[number].ready}
        became = claims[gone].table.leave(claims[gone])
        live.remove(gone)
        now = {number for number in live if claims[number].ready}
        assert {claim.owner for claim in became if claim.owner in live} == now - before, (
            "each is named once it is ready"
        )
    assert all(is_idle(table) for table in tables)
    assert not ranges._claims
    assert not ranges._tables


def test_claims_whose_bytes_are_apart_never_wait() -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    ranges: ByteRanges[Claim] = ByteRanges()
    for _ in range(200):
        cuts = sorted(chance.sample(range(1, 10_000), 40))
        for start, end in itertools.pairwise(cuts):
            table = table_of(ranges, WindowGrid("m", start, 1, end - start))
            assert enter(table, "writes all up to the next", device_writes=[0]).ready
        ranges = ByteRanges()
