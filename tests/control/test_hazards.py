"""HazardTable: tasks on the same block run in the order of submission, all others overlap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transferd.control.hazards import Claim, HazardTable
from transferd.tasks import Footprint


def enter(table: HazardTable, name: str, **footprint: object) -> Claim:
    return table.enter(name, Footprint(**footprint))  # type: ignore[arg-type]


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
    assert table.idle


def test_the_same_id_in_two_tiers_is_two_blocks() -> None:
    table = HazardTable()
    enter(table, "device", device_writes=[1])
    assert enter(table, "host", host_writes=[1]).ready


def test_a_task_does_not_wait_for_itself_even_when_it_names_a_block_twice() -> None:
    table = HazardTable()
    claim = enter(table, "a", device_reads=[1, 1], device_writes=[1, 1], storage_writes=["k", "k"])
    assert claim.ready
    table.leave(claim)
    assert table.idle


def test_a_stored_key_orders_writers_and_later_readers_but_a_writer_need_not_wait_for_readers() -> None:
    table = HazardTable()
    reader = enter(table, "reader", storage_reads=["k"])
    writer = enter(table, "writer", storage_writes=["k"])
    late_reader = enter(table, "late reader", storage_reads=["k"])
    second = enter(table, "second writer", storage_writes=["k"])
    assert [c.ready for c in (reader, writer, late_reader, second)] == [True, True, False, False]
    assert table.leave(writer) == [late_reader, second]


def test_a_claim_taken_back_while_queued_still_holds_its_place_for_those_behind_it() -> None:
    table = HazardTable()
    running_reader = enter(table, "reader", device_reads=[1])
    cancelled = enter(table, "cancelled writer", device_writes=[1])
    behind = enter(table, "writer behind", device_writes=[1])
    assert table.leave(cancelled) == []
    assert not behind.ready, "the reader before the cancelled writer still reads the block"
    assert table.leave(running_reader) == [behind]
    table.leave(behind)
    assert table.idle


ids = st.lists(st.integers(0, 4), max_size=3)
footprints = st.builds(
    Footprint,
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
        a_reads, a_writes = set(getattr(earlier, f"{tier}_reads")), set(getattr(earlier, f"{tier}_writes"))
        b_reads, b_writes = set(getattr(later, f"{tier}_reads")), set(getattr(later, f"{tier}_writes"))
        if a_writes & (b_reads | b_writes) or a_reads & b_writes:
            return True
    return bool(set(earlier.storage_writes) & (set(later.storage_reads) | set(later.storage_writes)))


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
    assert table.idle
