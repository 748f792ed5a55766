"""A short soak; `make soak MINUTES=30` is a long one (docs/faults.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machine.soak.soak import run
from tests.machine.soak.watch import Sample, Watch

pytestmark = pytest.mark.one_loop


async def test_a_flood_and_a_mixed_load_with_faults_are_answered_to_the_last_task(tmp_path: Path) -> None:
    report = await run(tmp_path, ranks=4, flood=3200, queued=256, seconds=7.0, interval=0.25)
    assert report.problems == []
    assert len(report.lines) == 4


def test_what_grows_is_told_and_what_is_flat_is_not() -> None:
    flat = [Sample(at, 200_000_000 + at % 3 * 1_000_000, 80 + at % 4, 12, 4096) for at in range(100)]
    leaking = [Sample(one.at, one.rss + 500_000 * int(one.at), one.fds + int(one.at), 12, 4096) for one in flat]
    assert Watch(1, flat).growth() == []
    assert [what.split()[0] for what in Watch(1, leaking).growth()] == ["rss", "fds"]
