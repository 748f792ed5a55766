"""Sizes as people write them, exactly, and nothing that only looks like one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.config import Size
from transferd.config.size import MOST_PERCENT, Capacities, Reserve


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64MiB", 64 * 2**20),
        ("1 KB", 1000),
        ("1.5GiB", 3 * 2**29),
        (7, 7),
        ("0", 0),
        ("12B", 12),
        (2**60, 2**60),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert Size.parse(text) == nbytes


@given(st.integers(0, 2**60))
def test_a_size_reads_back_as_it_is_printed(nbytes: int) -> None:
    assert Size.parse(str(Size(nbytes))) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "-1MiB", "1 Mi", "1mib", "1e3", "0x10", "1_000", "1.5.2", "1 MiB 2", "inf"]
)
def test_text_that_is_no_size_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size") as refused:
        Size.parse(text)
    assert text not in str(refused.value) or text in ("", "MiB")


@pytest.mark.parametrize("value", [True, False, 1.5, None, [], -1, 2**60 + 1, "9" * 400])
def test_only_whole_numbers_of_some_bytes_are_sizes(value: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        Size.parse(value)  # type: ignore[arg-type] # what a configuration file may hold


def test_a_size_is_printed_in_the_largest_unit_that_holds_it_exactly() -> None:
    assert [str(Size(n)) for n in (0, 1023, 1024, 1025, 3 * 2**20, 2**30 + 1, 2**40, 2**50)] == [
        "0", "1023", "1KiB", "1025", "3MiB", "1073741825", "1TiB", "1024TiB"
    ]  # fmt: skip


@given(st.fractions(0, 2**30, max_denominator=1000).map(lambda value: round(float(value), 3)))
def test_a_fraction_of_a_unit_is_rounded_down_to_whole_bytes(number: float) -> None:
    text = f"{number:.3f}"
    whole, part = text.split(".")
    assert Size.parse(f"{text}GiB") == (int(whole) * 1000 + int(part)) * 2**30 // 1000


@pytest.mark.parametrize(
    ("value", "percent", "nbytes"),
    [
        ("5%", 5.0, None),
        (" 0.5 % ", 0.5, None),
        ("1.234567%", 1.234567, None),
        ("0%", 0.0, None),
        (f"{MOST_PERCENT}%", 90.0, None),
        ("10GiB", None, 10 * 2**30),
        (0, None, 0),
    ],
)
def test_a_reserve_is_a_part_or_a_size_and_reads_back_as_it_is_printed(
    value: int | str, percent: float | None, nbytes: int | None
) -> None:
    for reserve in (Reserve.parse(value), Reserve.parse(str(Reserve.parse(value)))):
        assert (reserve.percent, reserve.nbytes) == (percent, nbytes)


@pytest.mark.parametrize("value", ["91%", "90.1%", "100%", "-1%", "5 percent", "%", "1e1%", -1, True])
def test_what_is_neither_is_refused(value: int | str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        Reserve.parse(value)


def test_one_capacity_stands_for_all_and_a_list_is_its_sum() -> None:
    one, several = Capacities.parse("1GiB"), Capacities.parse(["1GiB", 2**20])
    assert (one, one.each, one.as_plain()) == (2**30, (2**30,), "1GiB")
    assert (several, several.each, several.as_plain()) == (2**30 + 2**20, (2**30, 2**20), ["1GiB", "1MiB"])
    for wrong in ([], ["1GiB", "x"], "x"):
        with pytest.raises(ValueError, match="expected a size"):
            Capacities.parse(wrong)  # type: ignore[arg-type] # mypy takes a list of text for another type
