"""What began before a purge is never committed after it."""

from __future__ import annotations

from transferd.storage.levels import fences as module
from transferd.storage.levels.fences import Fences
from transferd.storage.lru import Use
from transferd.storage.selection import Selection

OLD, NEW = (f"demo/0123456789abcdef/{generation}/00/0" for generation in ("old", "new"))


def test_only_what_began_before_a_purge_that_fits_is_forbidden() -> None:
    fences = Fences()
    before = fences.number
    assert not fences.forbid(OLD, before)
    with fences.purge(Selection(generation="old")):
        assert (fences.purging(OLD), fences.purging(NEW)) == (True, False)
        assert (fences.forbid(OLD, before), fences.forbid(NEW, before)) == (True, False)
        assert not fences.forbid(OLD, fences.number), "it began after it"
    assert not fences.purging(OLD)
    assert fences.forbid(OLD, before)


def test_a_purge_by_owner_or_age_forbids_all_copies_and_only_the_owners_stores() -> None:
    fences = Fences()
    with fences.purge(Selection(owner="me")):
        pass
    assert [fences.forbid(NEW, 0, Use(owner=one)) for one in ("me", "you")] == [True, False]
    assert fences.forbid(NEW, 0)
    born = fences.number
    with fences.purge(Selection(unused_s=60.0)):
        pass
    assert fences.forbid(NEW, born)
    assert not fences.forbid(NEW, born, Use(owner="me")), "what is stored is new"


def test_what_began_before_all_remembered_purges_may_commit_nothing() -> None:
    fences = Fences()
    for _ in range(module.MOST + 1):
        with fences.purge(Selection(generation="old")):
            pass
    assert fences.forbid(NEW, 0)
    assert not fences.forbid(NEW, 1)
