"""Orders as decisions: what fits on a disk that was away, which disk has missed some, what pins hold in the end."""

from __future__ import annotations

import msgspec

from transferd.storage.orders import (
    EVERYTHING,
    FEW_PINS,
    MANY_ORDERS,
    MOST_NAMES,
    By,
    Epoch,
    Fits,
    Listed,
    OrderBook,
    Overdue,
    PurgeRecord,
    digest,
    families,
)
from transferd.storage.queues import EngineOwner
from transferd.storage.selection import Selection

A, B = EngineOwner("a", 1), EngineOwner("b")
NAME = "m/f/g/aa/0"
EPOCH = Epoch(4, "now", "family", (3, "before"), 7)


def book(*lists: Listed, now: float = 1000.0) -> OrderBook:
    one = OrderBook(lambda: now)
    one.begin(lists, [True] * len(lists))
    return one


def listed(*purges: PurgeRecord, applied: bool = False, epoch: Epoch = EPOCH) -> Listed:
    return Listed(epoch, list(purges), {order.id for order in purges if applied})


def goes(fits: Fits, name: str = NAME, written: float = 50.0) -> bool:
    return Overdue([PurgeRecord("b-1", 100.0, fits)]).fits(name, written)


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
    assert not Overdue([])
    assert Overdue([EVERYTHING]).fits(NAME, 1e12)


def test_an_epoch_ends_when_no_disk_needs_its_purges_or_they_are_too_many() -> None:
    one = book()
    assert one.epoch is not None
    for number in range(MANY_ORDERS):
        assert not one.tidy(applied=True), number
        order = one.purge(Selection(model="m"), By(7, 8, "e"), None)
    assert one.left_for(one.listed([order.id])) == list(one.purges.values())[:-1]
    assert not one.tidy(applied=False)
    before = one.epoch
    assert one.tidy(applied=True)
    assert (one.epoch.before, one.epoch.last, one.purges) == ((before.number, before.mark), order.number, {})
    names = frozenset(f"m/f/g/{number}/0" for number in range(MOST_NAMES + 1))
    one.purge(Selection(names), By(), None)
    assert one.tidy(applied=False), "a disk that is away is emptied when it returns"


def test_a_disk_follows_an_epoch_if_it_has_missed_nothing() -> None:
    before = Epoch(3, "before", "family")
    last = PurgeRecord("b-7", 0.0, Fits())
    assert listed().follows(EPOCH) == ""
    assert listed(last, applied=True, epoch=before).follows(EPOCH) == "", "killed between two disks"
    assert listed(last, epoch=before).follows(EPOCH), "it has not applied it"
    assert listed(epoch=before).follows(EPOCH), "an image of it from before that order"
    assert listed(epoch=Epoch(4, "alone", "family")).follows(EPOCH), "each was alone for a while"
    other = listed(epoch=Epoch(4, "now", "other", (3, "x")))
    assert "another" in other.follows(msgspec.structs.replace(EPOCH, mark="y"))
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
    order = first.purge(Selection(model="m"), By(), None)
    first.pin(A, [NAME], 60.0)
    missed_the_end = msgspec.structs.replace(first.listed(()), purges=[])
    first.unpin([NAME], A)
    first.pin(B, [NAME], 60.0)
    has_all = first.listed(())
    for lists in ([has_all, missed_the_end], [missed_the_end, has_all]):
        again = book(*lists)
        assert again.left_for(missed_the_end) == [order]
        assert [owner for owner, _ in again.pinned(NAME)] == [B]
        given = again.purge(Selection(), By(), None)
        assert given.number > max(pin.number for pin in has_all.pins), "later than those of earlier lives"


def test_pins_are_listed_as_they_are_now_and_end() -> None:
    now = [1000.0]
    one = OrderBook(lambda: now[0])
    one.begin([], [])
    for _ in range(50):
        one.pin(A, [NAME, "m/f/g/bb/0"], 60.0)
    one.pin(B, [NAME], 10.0)
    assert len(one.listed(()).pins) == 2
    assert sorted(one.pinned(NAME)) == [(A, 60.0), (B, 10.0)]
    now[0] += 30.0
    assert list(one.pinned(NAME)) == [(A, 30.0)]
    assert one.unpin(None, A)
    assert list(one.pinned(NAME)) == []
    assert not one.unpin(None, A)
    now[0] += 30.0
    for number in range(FEW_PINS):
        one.pin(A, [f"m/f/g/{number}/0"], 60.0)
    assert sum(len(pin.names) for pin in one.listed(()).pins) == FEW_PINS, "what is over is forgotten"


def test_what_a_purge_removes_is_pinned_no_more() -> None:
    one = book()
    assert not one.unpin([NAME])
    one.pin(A, [NAME], 60.0)
    one.pin(B, [NAME], 60.0)
    assert not one.unpin(["m/f/g/cc/0"])
    assert one.unpin([NAME])
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


def test_an_epoch_that_a_start_began_gives_way_to_that_of_the_first_disk_that_returns_with_another() -> None:
    one = book(Listed(), Listed())
    assert (one.fresh, book(listed()).fresh) == (True, False)
    one.follow(one.listed([]))
    assert one.fresh, "a disk that was there at the start has failed and returned"
    one.follow(Listed())
    assert one.fresh, "a new disk has come"
    one.follow(listed())
    assert (one.fresh, one.epoch) == (False, EPOCH)
