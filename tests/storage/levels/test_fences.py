"""What began before a purge is never committed after it, and no copy of what was found damaged is."""

from __future__ import annotations

from transferd.storage.levels import fences as module
from transferd.storage.levels.fences import Fences
from transferd.storage.lru import Use
from transferd.storage.selection import Selection

OLD, NEW = (f"demo/0123456789abcdef/{generation}/00/0" for generation in ("old", "new"))


def test_only_what_began_before_a_purge_that_fits_is_forbidden() -> None:
    fences = Fences()
    before = fences.number
    assert not fences.forbids(OLD, before, 0)
    with fences.purge(Selection(generation="old")):
        assert (fences.purging(OLD), fences.purging(NEW)) == (True, False)
        assert (fences.forbids(OLD, before, 0), fences.forbids(NEW, before, 0)) == ("purged", "")
        assert not fences.forbids(OLD, fences.number, 0), "it began after it"
    assert not fences.purging(OLD)
    assert fences.forbids(OLD, before, 0)


def test_a_purge_by_owner_or_age_forbids_all_copies_and_only_the_owners_stores() -> None:
    fences = Fences()
    with fences.purge(Selection(owner="me")):
        pass
    assert [fences.forbids(NEW, 0, None, Use(owner=one)) for one in ("me", "you")] == ["purged", ""]
    assert fences.forbids(NEW, 0, 0)
    born = fences.number
    with fences.purge(Selection(unused_s=60.0)):
        pass
    assert fences.forbids(NEW, born, 0)
    assert not fences.forbids(NEW, born, None, Use(owner="me")), "what is stored is new"


def test_what_began_before_all_remembered_purges_may_commit_nothing() -> None:
    fences = Fences()
    for _ in range(module.MOST + 1):
        with fences.purge(Selection(generation="old")):
            pass
    assert fences.forbids(NEW, 0, 0)
    assert not fences.forbids(NEW, 1, 0)


def test_only_copies_that_read_it_where_it_was_damaged_are_forbidden() -> None:
    fences = Fences()
    born = fences.number
    fences.damaged(NEW, 1)
    each = [fences.forbids(*one) for one in ((NEW, born, 1), (NEW, born, 0), (OLD, born, 1), (NEW, fences.number, 1))]
    assert each == ["quarantined", "", "", ""]
    assert not fences.forbids(NEW, born, None, Use()), "what is stored is new"


def test_what_began_before_all_remembered_damages_may_commit_nothing() -> None:
    fences = Fences()
    for number in range(module.MOST_DAMAGED + 1):
        fences.damaged(f"{NEW}{number}", 0)
    assert fences.forbids(OLD, 0, 0)
    assert not fences.forbids(OLD, 1, 0)
