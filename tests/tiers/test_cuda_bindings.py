"""NVIDIA's own bindings over the fake GPU: the checks that a real one gets, through CUDA's C interface.

A process loads one libcuda, so these run in processes of their own.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

from tests.gpu.rows import ROWS
from tests.support.cuda.shim import compiler
from transferd.cli.bench.copy_cuda import LAYOUTS

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
    done = python("-m", "tests.support.cuda.abi", "tests.gpu.check", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == "all good"
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["environment"]["gpu"] == "Fake GPU"
    verdicts = [row["verdict"] for row in found["checks"]]
    assert [row["name"] for row in found["checks"]] == [row.name for row in ROWS]
    assert set(verdicts) == {"right", "skipped"}
    assert verdicts.count("skipped") == 6, "users, torch, cuMemCreate, MPS and half a terabyte are for a GPU machine"
    table = lines.index(
        "", lines.index(next(line for line in lines if line.startswith("right   bench fp8 in batches")))
    )
    assert [line.split()[-1] for line in lines[table + 1 : table + 1 + len(verdicts)]] == verdicts
    assert "[cuda]" in lines, "what to copy into the configuration"
    report = json.loads((tmp_path / "copy-cuda.json").read_text())
    assert report["machine"]["gpu"] == "Fake GPU"
    names = [row["name"] for row in report["rows"]]
    for layout in LAYOUTS:
        for way in ("swap_out", "swap_in", "swap both ways", "gather out", "call a piece in", "batch out"):
            assert f"{way}, {layout}, 2 blocks" in names
        assert f"swap both ways, {layout}, beside a busy neighbour, 2 blocks" in names


@pytest.mark.parametrize("cuda", ["12080", "0"], ids=["a driver of CUDA 12.8", "a driver without batched copies"])
def test_older_drivers_are_served_too(cuda: str) -> None:
    done = python("-m", "tests.support.cuda.abi", "--cuda", cuda, "tests.gpu.check", "--only", "many_copies")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"cudaMemcpyBatchAsync: {'yes' if cuda != '0' else 'no'}" in done.stdout


def test_without_a_driver_one_line_says_so() -> None:
    if find_library("cuda") is not None:
        pytest.skip("this machine has a driver")
    done = python("-m", "tests.gpu.check")
    assert done.returncode == 1
    assert done.stdout.startswith("FAIL  there is nothing to check on: there is no NVIDIA driver")
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


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
