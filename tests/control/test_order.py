"""HazardTable: tasks on the same block run in the order of submission, all others overlap."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.dispatch import claims_in, is_idle, touching
from transferd.control.order import Claim, HazardTable
from transferd.tasks import Footprint

PLACES = ("device", "host", "storage", "paths")


def enter(table: HazardTable, name: str, **footprint: Sequence[object]) -> Claim:
    return table.enter(name, touching(**footprint))


def test_readers_of_one_block_overlap() -> None:
    table = HazardTable()
    assert enter(table, "a", device_reads=[1]).ready
    assert enter(table, "b", device_reads=[1]).ready


def test_a_read_waits_for_the_write_before_it_and_a_write_for_the_reads_before_it() -> None:
    table = HazardTable()
    write = enter(table, "write", device_writes=[1])
    reads = [enter(table, f"read{i}", device_reads=[1]) for i in range(2)]
    rewrite = enter(table, "rewrite", device_writes=[1])
    assert [claim.ready for claim in (write, *reads, rewrite)] == [True, False, False, False]
    assert table.leave(write) == reads
    assert table.leave(reads[0]) == []
    assert table.leave(reads[1]) == [rewrite]
    table.leave(rewrite)
    assert is_idle(table)


def test_the_same_id_in_two_tiers_is_two_blocks() -> None:
    table = HazardTable()
    enter(table, "device", device_writes=[1])
    assert enter(table, "host", host_writes=[1]).ready


def test_a_task_does_not_wait_for_itself_even_when_it_names_a_block_twice() -> None:
    table = HazardTable()
    claim = enter(table, "a", device_reads=[1, 1], device_writes=[1, 1], storage_writes=["k", "k"])
    assert claim.ready
    table.leave(claim)
    assert is_idle(table)


def test_a_stored_key_orders_writers_and_later_readers_but_a_writer_need_not_wait_for_readers() -> None:
    table = HazardTable()
    reader = enter(table, "reader", storage_reads=["k"])
    writer = enter(table, "writer", storage_writes=["k"])
    late_reader = enter(table, "late reader", storage_reads=["k"])
    second = enter(table, "second writer", storage_writes=["k"])
    assert [c.ready for c in (reader, writer, late_reader, second)] == [True, True, False, False]
    assert table.leave(writer) == [late_reader, second]


def test_a_long_task_is_ordered_in_all_its_blocks_of_every_kind() -> None:
    table = HazardTable()
    before = enter(table, "before", host_writes=[33])
    long = enter(table, "long", device_reads=list(range(20)), host_writes=list(range(30, 50)))
    behind = enter(table, "behind", host_reads=[44])
    assert (long.ready, behind.ready) == (False, False)
    assert table.leave(before) == [long]
    write = enter(table, "write", device_writes=[19])
    assert enter(table, "beside", device_writes=[20], host_reads=[29]).ready
    assert not write.ready
    assert table.leave(long) == [behind, write]


def test_a_claim_taken_back_while_queued_still_holds_its_place_for_those_behind_it() -> None:
    table = HazardTable()
    running_reader = enter(table, "reader", device_reads=[1])
    cancelled = enter(table, "cancelled writer", device_writes=[1])
    behind = enter(table, "writer behind", device_writes=[1])
    assert table.leave(cancelled) == []
    assert not behind.ready, "the reader before the cancelled writer still reads the block"
    assert table.leave(running_reader) == [behind]
    table.leave(behind)
    assert is_idle(table)


def test_readers_of_one_host_block_overlap() -> None:
    table = HazardTable()
    assert enter(table, "a", host_reads=[1]).ready
    assert enter(table, "b", host_reads=[1]).ready


def test_a_write_still_waits_for_the_readers_that_remain_when_others_have_left() -> None:
    table = HazardTable()
    first = enter(table, "first reader", device_reads=[1])
    second = enter(table, "second reader", device_reads=[1])
    table.leave(first)
    writer = enter(table, "writer", device_writes=[1])
    assert not writer.ready
    assert table.leave(second) == [writer]


def test_a_claim_behind_a_writer_does_not_count_the_readers_before_that_writer() -> None:
    table = HazardTable()
    enter(table, "reader", device_reads=[1])
    assert enter(table, "writer", device_writes=[1]).blockers == 1
    assert enter(table, "next writer", device_writes=[1]).blockers == 1


def test_a_claim_that_has_left_keeps_no_later_claim_alive() -> None:
    table = HazardTable()
    writer = enter(table, "writer", device_writes=[1])
    enter(table, "reader", device_reads=[1])
    table.leave(writer)
    assert writer.dependents == []


def test_a_claim_has_its_owner() -> None:
    assert enter(HazardTable(), "mine", device_reads=[1]).owner == "mine"


def test_bytes_count_from_entry_until_the_claim_has_really_left() -> None:
    table = HazardTable()
    running = table.enter("running", touching(device_writes=[1]), 300)
    queued = table.enter("queued", touching(device_writes=[1]), 20)
    table.enter("weightless", touching(device_writes=[2]))
    assert table.nbytes == 320
    table.leave(queued)
    assert table.nbytes == 320, "an abandoned claim still has its place"
    table.leave(running)
    assert table.nbytes == 0


def test_the_last_writer_of_a_host_block_is_known_until_it_has_left() -> None:
    table = HazardTable()
    enter(table, "reader", host_reads=[2])
    writer = enter(table, "writer", host_writes=[1])
    assert table.host_writer(1) is writer
    assert table.host_writer(2) is None, "it is only read"
    table.leave(writer)
    assert table.host_writer(1) is None


@pytest.mark.parametrize("uses", [f"{place}_{use}" for place in PLACES for use in ("reads", "writes")])
def test_a_table_is_idle_only_while_nothing_is_claimed_in_any_tier(uses: str) -> None:
    table = HazardTable()
    assert is_idle(table)
    claim = enter(table, "a", **{uses: ["x"]})
    assert not is_idle(table)
    assert claims_in(table) == 1
    table.leave(claim)
    assert is_idle(table)
    assert claims_in(table) == 0


@pytest.mark.parametrize("left", PLACES)
def test_a_table_in_which_a_block_was_forgotten_is_not_idle(left: str) -> None:
    table = HazardTable()
    table._uses[left]["x"] = object()  # type: ignore[assignment]
    assert not is_idle(table)


def test_a_table_whose_bytes_do_not_add_up_is_not_idle() -> None:
    table = HazardTable()
    table.nbytes = 1
    assert not is_idle(table)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_write_waits_for_a_write_of_the_same_block(tier: str) -> None:
    table = HazardTable()
    enter(table, "first", **{f"{tier}_writes": [1]})
    assert not enter(table, "second", **{f"{tier}_writes": [1]}).ready


def test_a_flush_of_some_blocks_of_a_path_waits_for_one_of_all_of_them_and_the_other_way_round() -> None:
    table = HazardTable()
    some = enter(table, "some", paths_reads=["p"])
    assert enter(table, "some more", paths_reads=["p"]).ready
    whole = enter(table, "all", paths_writes=["p"])
    assert not whole.ready
    assert not enter(table, "later", paths_reads=["p"]).ready
    assert enter(table, "another path", paths_writes=["q"]).ready
    assert some.ready


ids = st.lists(st.integers(0, 4), max_size=3)
footprints = st.builds(
    touching,
    device_reads=ids,
    device_writes=ids,
    host_reads=ids,
    host_writes=ids,
    storage_reads=ids.map(lambda xs: [str(x) for x in xs]),
    storage_writes=ids.map(lambda xs: [str(x) for x in xs]),
)


def conflict(earlier: Footprint, later: Footprint) -> bool:
    """The rule itself, written a second time and as naively as possible."""
    for tier in ("device", "host"):
        a_reads, a_writes = set(earlier.reads.get(tier, ())), set(earlier.writes.get(tier, ()))
        b_reads, b_writes = set(later.reads.get(tier, ())), set(later.writes.get(tier, ()))
        if a_writes & (b_reads | b_writes) or a_reads & b_writes:
            return True
    return bool(
        set(earlier.writes.get("storage", ())) & {*later.reads.get("storage", ()), *later.writes.get("storage", ())}
    )


@given(st.lists(footprints, max_size=12), st.randoms(use_true_random=False), st.data())
def test_a_claim_is_ready_exactly_when_no_earlier_conflicting_claim_holds_its_place(
    prints: list[Footprint], random: object, data: st.DataObject
) -> None:
    table = HazardTable()
    claims = [table.enter(i, footprint) for i, footprint in enumerate(prints)]
    live = set(range(len(claims)))  # not left, neither really nor by being taken back
    running = set()
    while live:
        for i in sorted(live):
            # Blocked by what is before it on its blocks, through places held by those taken back.
            if claims[i].ready:
                assert not any(conflict(prints[j], prints[i]) for j in live if j < i), (i, live)
                running.add(i)
        oldest = min(live)
        assert claims[oldest].ready, "the oldest claim can always run: no deadlock"
        gone = data.draw(st.sampled_from(sorted(live)))
        table.leave(claims[gone])
        live.remove(gone)
    assert is_idle(table)
