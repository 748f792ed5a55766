"""A short run under FastDeploy's own source: its PrefixCacheManager, and its workers; skipped where it is not here."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine.with_fastdeploy import check
from tests.machine.with_fastdeploy.gpu import machine

SHORT = {
    "engine": "tests/machine/with_fastdeploy/test_tiers.py::test_blocks_come_back_from_storage[2]",
    "workers": "tests/machine/with_fastdeploy/gpu/test_workers.py"
    "::test_workers_create_and_the_daemon_swaps_in_their_memory[1]",
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
    good, told = check.our_tests(source, SHORT[part], gpu=part == "workers")
    assert good, told


def test_collecting_the_tests_with_fastdeploy_configures_no_daemon_of_other_tests() -> None:
    """TRANSFERD_CACHE__DEVICE left behind there once took the sabotaged device from every test of a full run."""
    module = "tests.machine.with_fastdeploy.conftest"
    code = f"import os, {module}; print([name for name in os.environ if 'TRANSFERD_' in name])"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFERD_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


STARTED = {
    "messager": "import subprocess; subprocess.run('X=1 {python} {messager}; true', shell=True)",  # as FastDeploy does
    "server": "import multiprocessing as m; m.get_context('fork').Process(target=lambda: exec({code!r})).start()",
}


@pytest.mark.parametrize("what", STARTED)
def test_what_tests_with_fastdeploy_start_ends_with_them(tmp_path: Path, what: str) -> None:
    """Tests that were killed left FastDeploy's messagers and the servers of its queues behind."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    messager = tmp_path / machine.MESSAGER
    messager.write_text(code)
    tests = STARTED[what].format(python=sys.executable, messager=messager, code=code)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (check.GPU_SITE, check.ROOT)))}
    variables.pop(machine.OWNER_VARIABLE, None)
    with subprocess.Popen([sys.executable, "-c", tests], env=variables, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        started = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        try:
            assert select.select([started], [], [], 30.0)[0], "it is still there"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(started, signal.SIGKILL)
            os.close(started)
