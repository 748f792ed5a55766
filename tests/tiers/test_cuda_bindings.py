"""NVIDIA's own bindings over the fake GPU: the checks that a real one gets, through CUDA's C interface.

A process loads one libcuda, so these run in processes of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

from tests.machine.gpu import mps
from tests.machine.gpu.check import NEEDED
from tests.machine.gpu.copy_speeds import LAYOUTS
from tests.machine.gpu.rows import ROWS
from tests.support.cuda.shim import compiler
from tests.support.waits import wait_until

ROOT = Path(__file__).parents[2]


def has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(not has("cuda.bindings"), reason="the cuda extra is not installed"),
    pytest.mark.skipif(compiler() is None, reason="there is no C compiler to make a libcuda with"),
]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=880, check=False
    )


@pytest.mark.timeout(900)  # 90 s on a quiet machine
def test_gpu_check_passes_over_the_real_bindings(tmp_path: Path) -> None:
    options = ["--seed", "1", "--results", str(tmp_path), "--limit", "850"]
    done = python("-m", "tests.support.cuda.abi", "tests.machine.gpu.check", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == "all good"
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    (facts,) = found["environments"].values()
    assert facts["gpu"] == "Fake GPU"
    verdicts = [row["verdict"] for row in found["checks"]]
    assert [row["name"] for row in found["checks"]] == [row.name for row in ROWS]
    assert set(verdicts) == {"right", "skipped"}
    left = 8
    assert verdicts.count("skipped") == left, "users, torch, cuMemCreate, MPS, half a terabyte, … are for a GPU machine"
    table = lines.index("", lines.index(next(line for line in lines if line.startswith("right   a full launch queue"))))
    assert [line.split()[-1] for line in lines[table + 1 : table + 1 + len(verdicts)]] == verdicts
    assert any(line.startswith("    ((9, 0), False): Tuning(grid=") for line in lines), "an entry of MEASURED"
    report = json.loads((tmp_path / "copy-cuda.json").read_text())
    assert [machine["gpu"] for machine in report["machines"].values()] == ["Fake GPU"]
    names = [row["name"] for row in report["rows"]]
    for layout in LAYOUTS:
        for way in ("swap_out", "swap_in", "swap both ways", "gather out", "call a piece in", "batch out"):
            assert f"{way}, {layout}, 2 blocks" in names
        assert f"swap both ways, {layout}, beside a busy neighbour, 2 blocks" in names


@pytest.mark.parametrize("cuda", ["12080", "0"], ids=["a driver of CUDA 12.8", "a driver without batched copies"])
def test_older_drivers_are_served_too(cuda: str) -> None:
    done = python("-m", "tests.support.cuda.abi", "--cuda", cuda, "tests.machine.gpu.check", "--only", "many_copies")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"cudaMemcpyBatchAsync: {'yes' if cuda != '0' else 'no'}" in done.stdout


def test_without_a_driver_one_line_says_so() -> None:
    if find_library("cuda") is not None:
        pytest.skip("this machine has a driver")
    done = python("-m", "tests.machine.gpu.check")
    assert done.returncode == 1
    *rows, last = done.stdout.splitlines()
    assert rows == [f"skipped {row.words}: not run: no driver" for row in ROWS]
    assert last.startswith("FAIL  there is nothing to check on: there is no NVIDIA driver")
    assert done.stderr == ""


WITHOUT = """
import importlib.util, runpy, sys
lacking, found = sys.argv[1].split(","), importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in lacking else found(name, *rest)
sys.argv = ["tests.machine.gpu.check"]
runpy.run_module("tests.machine.gpu.check", run_name="__main__")
"""


def test_packages_that_are_missing_are_named_in_one_line() -> None:
    done = python("-c", WITHOUT, "tomli_w,zmq,cuda.bindings")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"FAIL  this Python ({sys.executable}) lacks cuda.bindings, tomli_w, zmq: "
        "pip install cuda-bindings tomli-w pyzmq"
    ]


IMPORTED = """
import sys
for name in sys.argv[1].split(","):
    __import__(name)
print(*sorted({name.partition(".")[0] for name, module in sys.modules.items()
               if "site-packages" in (getattr(module, "__file__", None) or "")}))
"""


def imported(*modules: str) -> set[str]:
    """The packages, not of the standard library, that importing these modules imports."""
    done = python("-c", IMPORTED, ",".join(modules))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_package_that_the_checks_import_is_among_those_that_are_asked_for() -> None:
    """A bare Python has none of them: a traceback in the middle of a run would cost the minutes with a GPU."""
    gpu = ["runner", "worker", "peer", "vllm_rank"]
    found = imported(*(f"tests.machine.gpu.{name}" for name in gpu), "transferd.daemon.daemon", "transferd.cli.main")
    assert {"tomli_w", "zmq"} <= found
    assert found <= imported(*NEEDED)


ENGINE = """
import os, signal
before = dict(os.environ), [signal.getsignal(n) for n in range(1, 32)]
from transferd.errors import TransferError
from transferd.tiers.cuda import engine
from transferd.tiers.cuda.bindings import open_driver
driver = open_driver()
context = driver.retain(0)
with driver.current(context):
    address = driver.allocate(4 << 20)
data = engine.export({"key": [engine.DeviceArray(address, (4, 256), "uint8", 0, None)]}, device=0)
try:
    engine.attach(data)
except TransferError as error:
    print("refused, as a process cannot open its own:", error)
assert driver.current_device() is None
assert before[1] == [signal.getsignal(n) for n in range(1, 32)]
assert before[0] == dict(os.environ), set(os.environ) ^ set(before[0])
print("as it was")
"""


def test_an_engines_process_keeps_its_environment_device_and_signal_handlers(tmp_path: Path) -> None:
    (tmp_path / "an_engine.py").write_text(ENGINE)
    command = [sys.executable, "-m", "tests.support.cuda.abi", "an_engine"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1:] == ["as it was"], done.stdout + done.stderr


DAEMON = """
import os
from transferd.tiers.cuda.tier import CudaDeviceTier
CudaDeviceTier.pinning(0)
print(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"], os.environ["CUDA_MODULE_LOADING"])
"""


def test_a_daemons_process_sets_what_its_operator_has_not_set(tmp_path: Path) -> None:
    (tmp_path / "a_daemon.py").write_text(DAEMON)
    command = [sys.executable, "-m", "tests.support.cuda.abi", "a_daemon"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "CUDA_MODULE_LOADING": "LAZY"}
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["32 LAZY"], done.stdout + done.stderr


# A control daemon as NVIDIA's: it leaves a file that clients look for, and "quit" removes it.
MPS = """#!/bin/sh
control="$CUDA_MPS_PIPE_DIRECTORY/control"
if [ "$1" = -d ]; then touch "$control"; else cat > /dev/null; rm "$control"; fi
"""


@pytest.fixture
def with_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "bin" / "nvidia-cuda-mps-control"
    tool.parent.mkdir()
    tool.write_text(MPS)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    return tool


@pytest.mark.timeout(200)
def test_sharing_and_timelines_are_checked_once_more_under_mps(tmp_path: Path, with_mps: Path) -> None:
    options = ["--only", "events_and_timelines_under_mps", "--results", str(tmp_path / "found")]
    done = python("-m", "tests.support.cuda.abi", "tests.machine.gpu.check", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "found" / "gpu-check.json").read_text())["checks"]
    assert row["verdict"] == "right"
    assert set(row["figures"]) == set(mps.SHARED)
    assert row["figures"]["a_pending_wait_costs_the_engine_nothing"]["share"] > 0


HANGS = """
import asyncio, os, sys
from pathlib import Path
from tests.machine.gpu import mps
from tests.machine.gpu.machine import Failed, Machine
mps.RUN_S = 1.0
family, real = Path(sys.argv[2]) / "pids", mps.within
async def within(*run):
    while not family.exists() or not family.read_text():
        await asyncio.sleep(0.01)
    return await real(*run)
mps.within = within  # its time begins when all of it is there
sys.executable = sys.argv[1]  # what runs the checks under MPS
machine = Machine(None, 0, Path(sys.argv[2]), 1)
try:
    asyncio.run(mps.a_busy_neighbour_under_mps(machine))
except Failed as error:
    print(error)
"""


def test_a_run_under_mps_that_hangs_is_ended_with_its_family_and_its_mps(tmp_path: Path, with_mps: Path) -> None:
    hangs = tmp_path / "hangs"
    family = f"sleep 600 & echo $! $$ > {tmp_path}/pids; trap '' TERM; while :; do wait; done"
    hangs.write_text(f"#!/bin/sh\n{family}\n")
    hangs.chmod(0o755)
    done = python("-c", HANGS, str(hangs), str(tmp_path))
    assert done.stdout.startswith("the run under MPS did not end within 1 s"), done.stdout + done.stderr
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(map(alive, pids)), "the whole family is gone")
    assert not list((tmp_path / "mps").glob("*/control")), "its MPS was ended"


def alive(pid: int) -> bool:
    """Whether it runs: one that nobody has waited for has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_daemon_without_a_driver_ends_with_one_line(tmp_path: Path) -> None:
    if find_library("cuda") is not None:
        pytest.skip("this machine has a driver")
    settings = ["--set", f"server.endpoint=ipc://{tmp_path}/t.sock", "--set", "cache.device=cuda"]
    done = python("-m", "transferd", "serve", *settings, "--set", "storage.backend=none", "--set", "metrics.listen=")
    assert done.returncode == 1
    assert done.stderr.startswith("there is no NVIDIA driver")
    assert len(done.stderr.splitlines()) == 1


def test_importing_the_tier_loads_no_cuda() -> None:
    imports = "import sys, transferd.tiers.cuda.tier, transferd.tiers.cuda.engine"
    code = f"{imports}; print([name for name in sys.modules if name.split('.')[0] == 'cuda'])"
    assert python("-c", code).stdout.strip() == "[]"
