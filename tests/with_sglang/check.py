"""`make sglang-check`: the adapter on SGLang's own host pools, on the CPU.

    python -m tests.with_sglang.check [--python PYTHON]

Sets up an environment under build/sglang (about 3 GB) and runs every test of this directory there. Where SGLang or its
torch cannot be installed, that is said, and nothing fails.

--python   or TRANSFERD_SGLANG_PYTHON: an interpreter that has SGLang, instead of an environment of its own
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.with_vllm.check import attempt

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "sglang"
PYTHON = VENV / "bin" / "python"
PYTHON_VARIABLE = "TRANSFERD_SGLANG_PYTHON"
HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
WITHOUT_DEPENDENCIES = ("sglang==0.5.23", "torchvision==0.28.0", "apache-tvm-ffi==0.1.11", "timm==1.0.25", "easydict")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
ROOM = 6 * 2**30  # bytes; with what pip unpacks on the way
TIMEOUT_S = 3600


def stamp() -> Path:
    """A file that says: the environment was made, with today's requirements."""
    wanted = REQUIREMENTS.read_bytes() + repr(WITHOUT_DEPENDENCIES).encode()
    return VENV / f".ready-{hashlib.sha256(wanted).hexdigest()[:12]}"


def environment() -> str:
    """Make the environment. Why it cannot be had, or ""."""
    if stamp().exists():
        return ""
    VENV.parent.mkdir(exist_ok=True)
    free = shutil.disk_usage(VENV.parent).free
    if free < ROOM:
        return f"it needs {ROOM >> 30} GiB of disk, and {free >> 30} GiB are free"
    install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    required = [*install, "-r", str(REQUIREMENTS)]
    why_not = attempt([sys.executable, "-m", "venv", str(VENV)])
    if not why_not and attempt(required):  # pip's own settings do not lead to torch for the CPU
        why_not = attempt([*required, "--retries", "0", "--extra-index-url", TORCH_INDEX])
    for step in ([*install, "--no-deps", *WITHOUT_DEPENDENCIES], [*install, "-e", str(ROOT)]):
        why_not = why_not or attempt(step)
    if not why_not:
        stamp().touch()
    return why_not


def tests(python: str) -> bool:
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", "--durations=10", str(HERE)]
    command += ["-o", "faulthandler_timeout=0"]  # the import of SGLang takes a minute on a busy machine
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=ROOT, env=variables, timeout=TIMEOUT_S, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default=os.environ.get(PYTHON_VARIABLE), help="an interpreter that has SGLang")
    asked = parser.parse_args()
    why_not = "" if asked.python else environment()
    if why_not:
        print(f"sglang-check: skipped, {why_not}")
        return 0
    return 0 if tests(asked.python or str(PYTHON)) else 1


if __name__ == "__main__":
    sys.exit(main())
