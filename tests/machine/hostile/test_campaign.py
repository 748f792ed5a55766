"""A short run of the standing adversary (`make hostile`): every action once, some groups together on a daemon each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine.hostile.actions import GROUPS
from tests.machine.hostile.campaign import obstacle, shared_memory_obstacle
from tests.machine.hostile.neighbours import transfers_obstacle

ROOT = Path(__file__).parents[3]
SEED = 1


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    if why := obstacle() or shared_memory_obstacle():
        pytest.skip(why)


# Groups that share a daemon and its honest engines, which cost most of a run. Daemons that hand over cost as much, and
# longer with more groups.
TOGETHER = (tuple(group for group in GROUPS if group != "transfers"), ("transfers",))


def test_every_group_is_played() -> None:
    assert sorted(group for groups in TOGETHER for group in groups) == sorted(GROUPS)


@pytest.mark.timeout(600)  # 40 s on a quiet machine
@pytest.mark.parametrize(
    ("groups", "keys"), [*((groups, "--no-keys") for groups in TOGETHER), (("network",), "--keys")], ids=str
)
def test_an_adversary_breaks_no_promise(groups: tuple[str, ...], keys: str) -> None:
    if "transfers" in groups and (why := transfers_obstacle()):
        pytest.skip(why)
    given = ["--rounds", "1", "--seed", str(SEED), keys]
    for group in groups:
        given += ["--group", group]
    command = [sys.executable, "-m", "tests.machine.hostile.campaign", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    assert done.stdout.endswith(f"seed {SEED}: 0 problems\n"), done.stdout[-4000:]
    assert done.returncode == 0
