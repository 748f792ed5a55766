"""The last release, from this repository's history, as a tree beside this one."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
RELEASED = "d859b93de8e02ed0faca1fcc250b1c06aa0a9de2"  # 0.3.0, which has no tag
VERSION = "0.3.0"


def missing() -> str:
    """Why the last release's tree cannot be had here; "" if it can."""
    done = subprocess.run(["git", "cat-file", "-e", RELEASED], cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"this clone has no history back to {VERSION}: git fetch --unshallow"


def exported(commit: str, target: Path) -> Path:
    """The tree of a commit, in `target`."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
        tree.extractall(target, filter="data")
    return target
