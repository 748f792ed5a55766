"""Numbers as people read them."""

from __future__ import annotations

import pytest

from transferd.observability import units


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (213 * 1024**3, "213 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_a_size(nbytes: int, text: str) -> None:
    assert units.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.00025, "250 µs"), (0.0123, "12.3 ms"), (59.94, "59.9 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"),
     (90000, "1 d 1 h")],
)  # fmt: skip
def test_a_span(seconds: float | None, text: str) -> None:
    assert units.span(seconds) == text


def test_a_count_and_a_share() -> None:
    assert [units.count(n) for n in (9999, 12345, 4_000_000)] == ["9999", "12.3k", "4.0M"]
    assert (units.share(1, 3), units.share(0, 0)) == ("33 %", "-")


def test_a_bar_shows_the_first_byte_and_never_overflows() -> None:
    assert units.bar(0, 100, 4) == "░░░░"
    assert units.bar(1, 100, 4) == "█░░░"
    assert units.bar(300, 100, 4) == "████"
    assert units.bar(1, 0, 4) == "····"


def test_a_sparkline_is_scaled_to_its_largest_value() -> None:
    assert units.sparkline([0, 4, 8], 4) == "  ▄█"
    assert units.sparkline([0, 0], 2) == "  "
    assert units.sparkline([9, 8, 8], 2) == "██"
