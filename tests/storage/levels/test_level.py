"""How long a level is waited for, and what is remembered of it."""

from __future__ import annotations

import pytest

from tests.storage.harness import memory_config
from tests.support.gated_storage import gated
from transferd.config import LevelSection
from transferd.storage.disks import Disks
from transferd.storage.file import FileStorage
from transferd.storage.levels import level
from transferd.storage.levels.base import Hint
from transferd.storage.levels.level import Names, Patience, StoreLevel
from transferd.storage.memory import MemoryStorage
from transferd.storage.mooncake import MooncakeStorage


@pytest.fixture(autouse=True)
def patient_levels() -> None:
    """Here the time is the test's, and the bounds are the product's."""


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_patience_grows_with_what_calls_take_and_with_their_bytes() -> None:
    patience = Patience(Time())
    assert patience.limit() is None, "nobody knows yet"
    for _ in range(level.FEWEST_SAMPLES):
        patience.ended(0.02)
    assert patience.limit() == level.FLOOR_S, "a level of 20 ms is not slow after 10 ms"
    patience.late()
    patience.returned(1.0)
    assert patience.limit() == level.TIMES * 1.0
    assert patience.limit(64 * 1024**2) == level.TIMES * 64.0


def test_a_level_is_left_out_after_slow_calls_in_a_row_and_tried_again() -> None:
    time = Time()
    patience = Patience(time)
    for _ in range(level.SLOW_CALLS - 1):
        patience.late()
    for _ in range(level.SLOW_CALLS - 1):
        patience.returned(None)
    patience.ended(0.1)
    for _ in range(level.SLOW_CALLS - 1):
        patience.late()
    assert not patience.out
    patience.late()
    assert patience.out
    time.now += level.OUT_S + 0.1
    assert patience.out, "its calls have not ended"
    assert patience.hanging == level.SLOW_CALLS
    for _ in range(level.SLOW_CALLS):
        patience.returned(None)
    assert not patience.out, "the next call tries it"
    patience.late()
    assert patience.out
    patience.returned(None)
    patience.ended(0.1)
    assert not patience.out
    assert patience.slow_calls == 2 * level.SLOW_CALLS


def test_names_are_bounded_and_the_oldest_go() -> None:
    names = Names(3)
    for text in "abca":
        names.add(text)
    names.add("d")
    assert [text in names for text in "abcd"] == [True, False, True, True]
    assert [names.count("x") for _ in range(3)] == [1, 2, 3]
    names.set_most(1)
    assert ("x" in names, "d" in names) == (True, False)


def test_a_remote_level_remembers_for_a_moment_what_is_not_there() -> None:
    time = Time()
    one = StoreLevel(1, "far", gated(MemoryStorage(memory_config(10)), "far", asks=True), LevelSection(), time)
    one.opened()
    assert one.has(["a"]) == [None]
    one.missed("a")
    assert one.has(["a"]) == [None], "a load asks all the same: another node may have stored it since"
    assert (one.absent("a"), one.absent("b")) == (True, False)
    one.stored("a")
    assert not one.absent("a")
    assert one.hint("a") == Hint(time.now)
    assert one.seems_to_have("a")
    one.missed("a")
    assert one.hint("a") is None
    time.now += level.ABSENT_S + 0.1
    assert not one.absent("a")
    one.stored("a", 7.0)
    one.missed("b")
    assert one.hint("a") == Hint(7.0), "when it said so"
    one.forget_hints()
    assert (one.hint("a"), one.absent("b")) == (None, False)


def test_the_first_use_counts_above_a_remote_level_and_the_second_above_files() -> None:
    def promote(default: int, chosen: int | None = None) -> int:
        storage = gated(MemoryStorage(memory_config(10)))
        storage.promotes_at = default
        return StoreLevel(1, "level", storage, LevelSection(promote=chosen), Time()).promote

    assert (FileStorage.promotes_at, Disks.promotes_at, MooncakeStorage.promotes_at) == (2, 2, 1)
    assert (promote(2), promote(1)) == (2, 1)
    assert (promote(2, 0), promote(1, 3)) == (0, 3)


async def test_a_level_that_is_closed_has_nothing() -> None:
    """A disk that fails while levels close loses its objects, and whoever is told asks what the others have."""
    one = StoreLevel(0, "memory", MemoryStorage(memory_config(10)), LevelSection(), Time())
    await one.storage.open()
    one.opened()
    await one.storage.close()
    assert one.has(["a"]) == [False]
