"""Disks that die and return, some seeds of it. Many: `python -m tests.support.simulation.disks --seeds 2000`."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.support.simulation.disks import live

SEEDS = min(int(os.environ.get("SEEDS", "12")), 2000)
PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_objects_on_working_disks_are_kept_and_right(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        seen += live(seed)
    assert {"deaths", "returns", "store STORED", "load FOUND", "load MISSING"} <= set(seen), seen
