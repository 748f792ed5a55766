"""A short run under FastDeploy's own source, where `make fastdeploy-check` has made an environment for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.with_fastdeploy import check

NEEDED = "tests/with_fastdeploy/test_tiers.py::test_blocks_come_back_from_storage[2]"


@pytest.mark.timeout(300)
def test_the_real_prefix_cache_manager_writes_and_reads_through_the_plugin() -> None:
    found = check.archives()
    if not found:
        pytest.skip("FastDeploy's source is not here (make fastdeploy-check)")
    if not check.PYTHON.exists() or not list(check.VENV.glob(".ready-*")):
        pytest.skip("no environment for FastDeploy (make fastdeploy-check makes one)")
    assert check.our_tests(check.unpacked(found[-1]), NEEDED)


def test_collecting_the_tests_with_fastdeploy_configures_no_daemon_of_other_tests() -> None:
    """TRANSFERD_CACHE__DEVICE left behind there once took the sabotaged device from every test of a full run."""
    code = "import os, tests.with_fastdeploy.conftest; print([name for name in os.environ if 'TRANSFERD_' in name])"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFERD_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
