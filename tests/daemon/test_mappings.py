"""Who has mapped which rank's memory: against a model that keeps the whole history."""

from __future__ import annotations

import random

from transferd.daemon.mappings import Mappings, Report
from transferd.tiers.base import DeviceHandle

CLIENTS = [b"a", b"b", b"c"]
Reported = tuple[tuple[int, ...], dict[bytes, tuple[int, ...]]]


def handle(number: int) -> DeviceHandle:
    return DeviceHandle("shm", {"number": number})


def _noting(reports: list[Reported]) -> Report:
    return lambda unmapped, outdated: reports.append((unmapped, outdated))


def test_each_change_of_mappings_is_reported_once() -> None:
    reports: list[Reported] = []
    mappings = Mappings(2, lambda unmapped, outdated: reports.append((unmapped, outdated)))
    mappings.attach(b"a", 0)
    mappings.attach(b"a", 0)
    mappings.attach(b"b", 0)
    mappings.offer(1, handle(1))
    assert reports == [((1,), {}), ((), {})]
    mappings.clear()
    assert reports[2:] == [((0, 1), {b"a": (0,), b"b": (0,)})]
    mappings.detach(b"a", 0)
    mappings.attach(b"b", 0)
    assert reports[3:] == [((0, 1), {b"b": (0,)}), ((1,), {})]
    assert mappings.statistics() == {"unmapped": [1], "mapped": [1, 0], "outdated": [0, 0]}


def test_an_owner_that_returns_with_the_same_memory_outdates_nobody_and_one_with_other_memory_does() -> None:
    mappings = Mappings(1, lambda *_: None)
    mappings.offer(0, handle(1))
    mappings.attach(b"a", 0)
    mappings.withdraw(0)
    mappings.offer(0, handle(1))
    assert mappings.statistics()["outdated"] == [0]
    mappings.offer(0, handle(2))
    assert mappings.statistics() == {"unmapped": [], "mapped": [0], "outdated": [1]}


def test_the_time_without_a_mapping_begins_with_the_first_rank_that_lost_it() -> None:
    now = [5.0]
    mappings = Mappings(2, lambda *_: None, now=lambda: now[0])
    assert mappings.unmapped_since == 5.0
    mappings.attach(b"a", 0)
    mappings.attach(b"a", 1)
    now[0] = 8.0
    mappings.detach(b"a", 0)
    now[0] = 9.0
    mappings.detach(b"a", 1)
    assert (mappings.unmapped, mappings.unmapped_since) == ([0, 1], 8.0)


def test_any_order_of_attaching_offering_leaving_and_clearing_is_as_the_model_says() -> None:
    for seed in range(30):
        chance = random.Random(seed)
        reports: list[Reported] = [((0, 1), {})]
        mappings = Mappings(2, _noting(reports))
        current: list[set[bytes]] = [set(), set()]
        outdated: list[set[bytes]] = [set(), set()]
        offered: list[int | None] = [None, None]
        known: list[int | None] = [None, None]
        for _ in range(200):
            rank, client, deed = chance.randrange(2), chance.choice(CLIENTS), chance.randrange(7)
            if deed == 0:
                mappings.attach(client, rank)
                current[rank].add(client)
                outdated[rank].discard(client)
            elif deed == 1:
                mappings.detach(client, rank)
                current[rank].discard(client)
                outdated[rank].discard(client)
            elif deed == 2:
                mappings.outdate(client, rank)
                outdated[rank].add(client)
            elif deed == 3:
                mappings.leave(client)
                for one in (*current, *outdated):
                    one.discard(client)
            elif deed == 4:
                number = chance.randrange(2)
                mappings.offer(rank, handle(number))
                if known[rank] not in (None, number):
                    outdated[rank] |= current[rank]
                    current[rank].clear()
                offered[rank] = known[rank] = number
            elif deed == 5:
                mappings.withdraw(rank)
                offered[rank] = None
            else:
                mappings.clear()
                for number in range(2):
                    outdated[number] |= current[number]
                    current[number].clear()
                offered, known = [None, None], [None, None]
            unmapped = [number for number in range(2) if offered[number] is None and not current[number]]
            assert mappings.unmapped == unmapped, seed
            assert [mappings.mapped_by(number) for number in range(2)] == [len(one) for one in current], seed
            by_client = {c: tuple(n for n in range(2) if c in outdated[n]) for c in CLIENTS}
            assert reports[-1] == (tuple(unmapped), {c: ranks for c, ranks in by_client.items() if ranks}), seed
