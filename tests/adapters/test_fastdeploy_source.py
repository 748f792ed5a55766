"""A short run under FastDeploy's own source, where `make fastdeploy-check` has made an environment for it."""

from __future__ import annotations

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
