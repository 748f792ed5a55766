"""Something runs out under a real daemon: typed answers or one clear line, and everything works again after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machine.faults.host import ALL_SCENARIOS
from tests.machine.faults.resources import Scenario, run

pytestmark = pytest.mark.one_loop


OFTEN = [scenario for scenario in ALL_SCENARIOS if scenario.often]  # `make faults` runs the others, too


@pytest.mark.parametrize("scenario", OFTEN, ids=lambda scenario: scenario.name)
async def test_what_runs_out_is_told_and_survived(scenario: Scenario, tmp_path: Path) -> None:
    if scenario.missing:
        pytest.skip(scenario.missing)
    finding = await run(scenario, tmp_path)
    assert finding.problems == []
    assert finding.told
