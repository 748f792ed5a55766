"""Something runs out under a real daemon: typed answers or one clear line, and everything works again after it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.faults.resources import SCENARIOS, Scenario, run

pytestmark = pytest.mark.one_loop


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
async def test_what_runs_out_is_told_and_survived(scenario: Scenario, tmp_path: Path) -> None:
    if scenario.root and (os.geteuid() != 0 or shutil.which("unshare") is None):
        pytest.skip("mounting and dropping privileges need root and util-linux")
    finding = await run(scenario, tmp_path)
    assert finding.problems == []
    assert finding.told
