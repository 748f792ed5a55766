"""When an object that came damaged is read again, and when it is left alone."""

from __future__ import annotations

from transferd.storage import suspects
from transferd.storage.suspects import Suspects


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_object_that_is_whole_the_second_time_was_spoilt_on_its_way() -> None:
    them = Suspects(clock := Clock())
    assert not them.doubted("a")
    them.damaged("a")
    assert (them.doubted("a"), them.avoided("a"), "a" in them) == (True, False, True)
    them.came(["a"])
    assert not them.doubted("a")
    assert them.link_faults == 0, "it may be found damaged again"
    clock.now += 2
    assert them.link_faults == 1, "nobody has complained"
    assert len(them) == 0


def test_an_object_that_is_damaged_twice_is_left_alone_for_longer_and_longer() -> None:
    them = Suspects(clock := Clock())
    pauses = []
    them.damaged("a")
    for _ in range(10):
        assert them.doubted("a")
        them.came(["a"])
        them.damaged("a")
        began = clock.now
        while them.avoided("a"):
            clock.now += 1.0
        pauses.append(clock.now - began)
    assert pauses == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert them.link_faults == 0, "it was not the link"


def test_a_suspect_ends_when_it_is_stored() -> None:
    them = Suspects(Clock())
    them.avoid("a")
    assert them.avoided("a")
    them.stored(["a", "b"])
    assert not them.avoided("a")
    assert len(them) == 0


def test_a_suspect_that_another_node_has_mended_is_no_fault_of_the_link() -> None:
    them = Suspects(clock := Clock())
    them.avoid("a")
    clock.now += 31
    assert them.doubted("a")
    them.came(["a"])
    clock.now += 2
    assert them.link_faults == 0
    assert len(them) == 0


def test_five_faults_of_the_link_within_a_minute_are_too_many() -> None:
    them = Suspects(clock := Clock())
    for i in range(5):
        assert not them.bad_link
        them.damaged(f"{i}")
        them.came([f"{i}"])
        clock.now += 10
    assert them.link_faults == 5
    assert "5 objects came here damaged within 60 s" in them.bad_link
    clock.now += 11
    assert not them.bad_link, "it may be better now"


def test_the_names_are_bounded() -> None:
    them = Suspects(Clock())
    for i in range(suspects.MOST + 10):
        (them.damaged, them.avoid)[i % 2](f"{i}")
    assert len(them) == suspects.MOST
    assert "0" not in them
