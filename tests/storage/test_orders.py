"""Orders as decisions: what fits on a disk that was away, which disk has missed some, what pins hold in the end."""

from __future__ import annotations

import dataclasses

from transferd.storage.orders import By, Epoch, Fits, Listed, OrderBook, OrderRecord, Overdue, digest, families
from transferd.storage.pins import KeptPin
from transferd.storage.queues import EngineOwner
from transferd.storage.selection import Selection

A, B = EngineOwner("a", 1), EngineOwner("b")
NAME = "m/f/g/aa/0"
EPOCH = Epoch(4, "now", "family", (3, "before"), 7)


def book(*lists: Listed, now: float = 1000.0) -> OrderBook:
    one = OrderBook(lambda: now)
    one.begin(lists, [True] * len(lists))
    return one


def listed(*orders: OrderRecord, epoch: Epoch = EPOCH) -> Listed:
    one = Listed(epoch.head("store", 0.0))
    for order in orders:
        one.add(order)
    return one


def goes(fits: Fits, name: str = NAME, written: float = 50.0) -> bool:
    return Overdue([OrderRecord("b-1", "purge", 100.0, fits=fits)], everything=False).fits(name, written)


def test_a_disk_that_was_away_removes_all_that_may_fit_and_nothing_else() -> None:
    assert goes(Fits())
    assert goes(Fits(model="m", generation="g", space="m/f"))
    assert not goes(Fits(model="n"))
    assert not goes(Fits(generation="h"))
    assert not goes(Fits(space="m/other"))
    assert goes(Fits(names=[digest(NAME)]))
    assert not goes(Fits(names=[digest("m/f/g/bb/0")]))
    assert goes(Fits(unused_s=50.0))
    assert not goes(Fits(unused_s=51.0)), "it was written, so used, less than that before the order"
    assert not Overdue([], everything=False)
    assert Overdue([], everything=True).fits(NAME, 1e12)


def test_a_purge_of_many_names_is_several_orders() -> None:
    names = frozenset(f"m/f/g/{number}/0" for number in range(70_000))
    one = book()
    orders = one.purge(Selection(names), By(7, 8, "e"), None)
    assert [len(order.fits.names or ()) for order in orders if order.fits] == [65_536, 4_464]
    assert list(one.purges.values()) == orders == one.left_for(listed())
    assert not one.left_for(listed(*[OrderRecord(order.id, "applied") for order in orders]))


def test_a_disk_follows_an_epoch_if_it_has_missed_nothing() -> None:
    before = Epoch(3, "before", "family")
    last = OrderRecord("b-7", "purge", fits=Fits())
    assert listed().follows(EPOCH) == ""
    assert listed(last, OrderRecord("b-7", "applied"), epoch=before).follows(EPOCH) == "", "killed between two disks"
    assert listed(last, epoch=before).follows(EPOCH), "it has not applied it"
    assert listed(epoch=before).follows(EPOCH), "an image of it from before that order"
    assert listed(epoch=Epoch(4, "alone", "family")).follows(EPOCH), "each was alone for a while"
    assert "another" in listed(epoch=Epoch(4, "now", "other", (3, "x"))).follows(dataclasses.replace(EPOCH, mark="y"))
    assert Listed().follows(EPOCH)
    assert Listed(problem="damaged").follows(EPOCH)


def test_the_newest_epoch_of_the_disks_with_objects_counts() -> None:
    older, other = listed(epoch=Epoch(1, "old", "family")), listed(epoch=Epoch(9, "x", "other"))
    one = OrderBook(lambda: 0.0)
    one.begin([older, listed(), other], [True, False, False])
    assert one.epoch == EPOCH
    assert families([older, other], [True, True]).keys() == {"family", "other"}
    assert families([older, Listed()], [True, True]).keys() == {"family"}


def test_orders_of_all_disks_hold_also_where_they_were_not_given() -> None:
    first = book()
    orders = first.purge(Selection(model="m"), By(), None)
    pins = first.pin(A, [NAME], 60.0) + first.unpin(A, [NAME]) + first.pin(B, [NAME], 60.0)
    assert first.epoch is not None
    has_all = listed(*orders, *pins, epoch=first.epoch)
    missed_the_end = listed(*pins[:1], epoch=first.epoch)
    for lists in ([has_all, missed_the_end], [missed_the_end, has_all]):
        again = book(*lists)
        assert again.left_for(missed_the_end) == orders
        assert [owner for owner, _ in again.pinned(NAME)] == [B]
        given = again.purge(Selection(), By(), None)
        assert given[0].number > max(order.number for order in pins), "later than those of earlier lives"


def test_pins_are_written_as_they_are_now_and_end() -> None:
    now = [1000.0]
    one = OrderBook(lambda: now[0])
    one.begin([], [])
    for _ in range(50):
        one.pin(A, [NAME, "m/f/g/bb/0"], 60.0)
    one.restore([KeptPin(NAME, B, 10.0), KeptPin(NAME, "no engine", 10.0)])
    assert len(one.everything(())) == 2
    assert sorted(one.pinned(NAME)) == [(A, 60.0), (B, 10.0)]
    now[0] += 30.0
    assert list(one.pinned(NAME)) == [(A, 30.0)]
    one.unpin(A, None)
    assert list(one.pinned(NAME)) == []
    assert one.purged([NAME]) == one.purged(["m/f/g/cc/0"]) == [], "only what lasts is ended"
    one.forget()
    assert not one.has_pins
    assert not one.everything(())


def test_what_a_purge_removes_is_pinned_no_more() -> None:
    one = book()
    one.pin(A, [NAME], 60.0)
    one.pin(B, [NAME], 60.0)
    ended = one.purged([NAME])
    assert {(order.engine, order.kind) for order in ended} == {("a", "unpin"), ("b", "unpin")}
    assert list(one.pinned(NAME)) == []


def test_only_a_disk_that_is_alone_may_be_anothers_when_it_returns_and_only_before_any_purge() -> None:
    stranger = listed(epoch=Epoch(1, "x", "other"))
    first = listed(epoch=Epoch(1, "mine", "family"))
    one = book(first)  # the start found one of two disks
    one.learn(stranger)
    assert one.epoch is not None
    assert stranger.follows(one.epoch), "it is emptied, and the disk that serves is not"
    assert not first.follows(one.epoch)
    one.purge(Selection(), By(), None)
    one.follow(stranger)
    assert stranger.follows(one.epoch), "it may have missed that purge"
    other = book(first)
    other.follow(stranger)
    other.learn(stranger)
    assert other.epoch is not None
    assert not stranger.follows(other.epoch)
