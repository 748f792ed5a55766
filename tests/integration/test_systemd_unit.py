"""The unit file as systemd itself judges it, and the example configuration as transferd does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from transferd import config

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNIT = SYSTEMD / "transferd.service"

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a command that exists here: verify looks for the executable. Beside it, the other one."""
    for one in SYSTEMD.glob("*.service"):
        (tmp_path / one.name).write_text(one.read_text().replace("/usr/bin/transferd", "/bin/true"))
    return tmp_path / UNIT.name


@needs_systemd
def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path) -> None:
    units = list(map(str, unit.parent.glob("*.service")))
    result = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


@needs_systemd
def test_the_exposure_without_gpu_access_is_at_most_2_5(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    score = re.search(r"Overall exposure level for transferd.service: ([\d.]+)", result.stdout)
    assert score is not None, result.stdout + result.stderr
    assert float(score[1]) <= 2.5


def test_the_stop_timeout_leaves_room_for_the_daemons_own_budget() -> None:
    stop = re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert stop is not None
    server = config.load(SYSTEMD / "transferd.toml", env={}).server
    assert int(stop[1]) > server.shutdown_timeout + server.deadline_slack


def test_the_example_configuration_is_the_default_written_out() -> None:
    example = config.to_tree(config.load(SYSTEMD / "transferd.toml", env={}))
    default = config.to_tree(config.Config())
    default["server"]["socket_mode"] = "0666"  # the unit's daemon has a user of its own
    assert example == default


def test_the_packaged_cache_is_the_default_once_it_is_no_comment(tmp_path: Path) -> None:
    changed = tmp_path / "transferd.toml"
    changed.write_text(re.sub(r"(?m)^#(\[cache\]|\w+ = )", r"\1", (SYSTEMD / "transferd.toml").read_text()))
    example = config.to_tree(config.load(changed, env={}))
    assert example["cache"] | {"devices": None} == config.to_tree(config.Config(cache=config.CacheSection()))["cache"]
