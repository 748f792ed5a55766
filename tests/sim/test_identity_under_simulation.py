"""Who is who, under simulation: some seeds. Many: `python -m tests.support.simulation.identity --seeds 2000`."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.support.simulation.identity import live

SEEDS = min(int(os.environ.get("SEEDS", "24")), 2000)
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_no_engine_is_mistaken_for_another(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        seen += live(seed)
    assert {"ok", "restart", "suspend", "impostor not_this_engine"} <= set(seen), f"too little has happened: {seen}"
