"""What began before a purge is never committed after it, and no copy of what was found damaged is."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from transferd.storage.levels import fences as module
from transferd.storage.levels.fences import Fences
from transferd.storage.lru import Use
from transferd.storage.selection import Selection


@dataclass
class Level:
    """Where a copy has read its object."""

    number: int
    owner: Hashable | None = None

    def owner_of(self, _name: str) -> Hashable | None:
        return self.owner


HERE, BELOW = Level(0, "me"), Level(1)
OLD, NEW = (f"demo/0123456789abcdef/{generation}/00/0" for generation in ("old", "new"))


def test_only_what_began_before_a_purge_that_fits_is_forbidden() -> None:
    fences = Fences()
    before = fences.number
    assert not fences.forbids(OLD, before, HERE)
    with fences.purge(Selection(generation="old")):
        assert (fences.purging(OLD), fences.purging(NEW)) == (True, False)
        assert (fences.forbids(OLD, before, HERE), fences.forbids(NEW, before, HERE)) == ("purged", "")
        beside = fences.number
        assert fences.forbids(OLD, beside, HERE), "it may have read what has yet to go"
        assert not fences.forbids(OLD, beside, None, Use()), "what is stored is new"
    assert not fences.purging(OLD)
    assert fences.forbids(OLD, before, HERE)
    assert fences.forbids(OLD, beside, HERE)
    assert not fences.forbids(OLD, beside, None, Use())
    assert not fences.forbids(OLD, fences.number, HERE), "it began after it"


def test_a_purge_by_owner_or_age_forbids_what_it_takes_and_what_nobody_can_tell() -> None:
    fences = Fences()
    with fences.purge(Selection(owner="me")):
        pass
    assert [fences.forbids(NEW, 0, None, Use(owner=one)) for one in ("me", "you")] == ["purged", ""]
    each = [fences.forbids(NEW, 0, one) for one in (HERE, BELOW, Level(0, "you"))]
    assert each == ["purged", "purged", ""]
    born = fences.number
    with fences.purge(Selection(unused_s=60.0)):
        pass
    assert [fences.forbids(NEW, born, one) for one in (HERE, BELOW)] == ["", "purged"], "it has left its level"
    assert not fences.forbids(NEW, born, None, Use(owner="me")), "what is stored is new"


def test_what_began_before_all_remembered_purges_may_commit_nothing() -> None:
    fences = Fences()
    for _ in range(module.MOST // 2 + 1):
        with fences.purge(Selection(generation="old")):
            pass
    assert fences.forbids(NEW, 1, HERE)
    assert not fences.forbids(NEW, 2, HERE)


def test_only_copies_that_read_it_where_it_was_damaged_are_forbidden() -> None:
    fences = Fences()
    born = fences.number
    fences.damaged(NEW, 1)
    each = [
        fences.forbids(*one)
        for one in ((NEW, born, BELOW), (NEW, born, HERE), (OLD, born, BELOW), (NEW, fences.number, BELOW))
    ]
    assert each == ["quarantined", "", "", ""]
    assert not fences.forbids(NEW, born, None, Use()), "what is stored is new"


def test_what_began_before_all_remembered_damages_may_commit_nothing() -> None:
    fences = Fences()
    for number in range(module.MOST_DAMAGED + 1):
        fences.damaged(f"{NEW}{number}", 0)
    assert fences.forbids(OLD, 0, HERE)
    assert not fences.forbids(OLD, 1, HERE)
