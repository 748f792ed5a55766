"""How much a store may hold: the reserve, the bounds that follow from it, and what does not fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transferd.config.size import Reserve
from transferd.storage.room import GIB, DiskState, bounds, disk_for, misfit, reserved

TIB = 1024 * GIB
MIB = 1024**2


@pytest.mark.parametrize(
    ("reserve", "total", "capacity", "keeps"),
    [
        ("5%", TIB, 64 * GIB, TIB // 20),
        ("5%", 20 * GIB, GIB, GIB),
        ("5%", 19 * GIB, 18 * GIB, GIB),
        ("5%", 10 * GIB, 5 * GIB, GIB // 2),
        ("5%", 64 * MIB, 48 * MIB, 48 * MIB // 10),
        ("5%", 64 * MIB, 64 * GIB, 64 * MIB // 10),
        ("0%", TIB, GIB, 0),
        ("0", TIB, GIB, 0),
        ("3GiB", 64 * MIB, GIB, 3 * GIB),
    ],
)
def test_the_reserve(reserve: str, total: int, capacity: int, keeps: int) -> None:
    assert reserved(Reserve.parse(reserve), total, capacity) == keeps


def test_the_bounds_leave_the_reserve_free_in_bytes_and_inodes() -> None:
    reserve = Reserve.parse("10GiB")
    disk = DiskState(total=100 * GIB, free=12 * GIB, files=1000, files_free=150)
    assert bounds(80 * GIB, reserve, disk, 40 * GIB, 500) == (42 * GIB, 550)
    assert bounds(41 * GIB, reserve, disk, 40 * GIB, 500)[0] == 41 * GIB
    full = disk._replace(free=GIB, files_free=0)
    assert bounds(80 * GIB, reserve, full, 40 * GIB, 500) == (31 * GIB, 400)
    assert bounds(80 * GIB, reserve, full, 0, 0) == (0, 0)
    assert bounds(80 * GIB, reserve, DiskState(), 5, 5) == (80 * GIB, math.inf), "a disk that nobody has looked at"


sizes = st.integers(1, 2**50)
reserves = st.sampled_from(["0", "0%", "1%", "5%", "20%", "90%", "1GiB", "7TiB"]).map(Reserve.parse)


@given(capacity=sizes, reserve=reserves)
def test_a_disk_of_the_predicted_size_fits(capacity: int, reserve: Reserve) -> None:
    total = disk_for(capacity, reserve)
    assert misfit(capacity, reserve, DiskState(total=total + 2), None) == ""


def test_a_capacity_that_does_not_fit_is_reported_with_its_numbers() -> None:
    reserve, disk = Reserve.parse("1GiB"), DiskState(total=10 * GIB, free=3 * GIB)
    assert misfit(9 * GIB, reserve, disk) == ""
    assert "10.0 GiB do not fit" in misfit(10 * GIB, reserve, disk)
    assert "can hold 9.0 GiB" in misfit(10 * GIB, reserve, disk)
    assert "free" in misfit(9 * GIB, reserve, disk, used=0)
    assert misfit(9 * GIB, reserve, disk, used=7 * GIB) == ""
