"""A short run under FastDeploy's own source: its PrefixCacheManager, and its workers; skipped where it is not here."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.with_fastdeploy import check
from tests.with_fastdeploy.gpu import machine

SHORT = {
    "engine": "tests/with_fastdeploy/test_tiers.py::test_blocks_come_back_from_storage[2]",
    "workers": "tests/with_fastdeploy/gpu/test_workers.py::test_workers_create_and_the_daemon_swaps_in_their_memory[1]",
}
BUILD_TIMEOUT_S = 240  # of a step; all of them take 90 s with a package index nearby


@pytest.fixture(scope="module")
def source() -> Path:
    """FastDeploy's newest source. Who names it, as CI may, also gets its environment made, which takes 1.6 GB."""
    found = check.archives()
    if not found:
        pytest.skip(f"FastDeploy's source is not here: no *.tar.xz in ${check.SOURCE_VARIABLE} or ../shared/fastdeploy")
    if not check.stamp().exists():
        if not os.environ.get(check.SOURCE_VARIABLE):
            pytest.skip("no environment for FastDeploy: `make fastdeploy-check` makes one")
        why_not = check.environment(BUILD_TIMEOUT_S)
        if why_not:
            pytest.skip(f"no environment for FastDeploy: {why_not}")
    return check.unpacked(found[-1])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", SHORT)
def test_a_short_part_of_fastdeploy_check(source: Path, part: str) -> None:
    assert check.our_tests(source, SHORT[part], gpu=part == "workers")


def test_collecting_the_tests_with_fastdeploy_configures_no_daemon_of_other_tests() -> None:
    """TRANSFERD_CACHE__DEVICE left behind there once took the sabotaged device from every test of a full run."""
    code = "import os, tests.with_fastdeploy.conftest; print([name for name in os.environ if 'TRANSFERD_' in name])"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFERD_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_cache_messager_ends_with_the_tests_that_started_it(tmp_path: Path) -> None:
    """Tests that were killed left FastDeploy's messagers behind; its shell stands between the two."""
    messager = tmp_path / machine.MESSAGER
    messager.write_text("import os, sys; print(os.getpid(), flush=True); sys.stdin.read()")
    tests = f"import subprocess; subprocess.run('X=1 {sys.executable} {messager}; true', shell=True)"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (check.GPU_SITE, check.ROOT)))}
    variables.pop(machine.OWNER_VARIABLE, None)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", tests], env=variables, **pipes) as process:
        assert process.stdout is not None
        messager_ended = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        assert select.select([messager_ended], [], [], 60.0)[0], "it is still there"
        os.close(messager_ended)
