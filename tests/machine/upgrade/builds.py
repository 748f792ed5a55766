"""Earlier releases, from this repository's history, as trees beside this one."""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Release:
    """commit: the one that made its wheels. wheel, tree: the version that a daemon of its wheel or its tree names."""

    commit: str
    wheel: str
    tree: str

    def missing(self) -> str:
        """Why its tree cannot be had here; "" if it can."""
        command = ["git", "cat-file", "-e", self.commit]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else f"this clone has no history back to {self.tree}: git fetch --unshallow"


FIRST = Release("d859b93de8e02ed0faca1fcc250b1c06aa0a9de2", "0.3.0", "0.3.0")
LAST = Release("1322e807e22dc98fe544416ef00ede69ebb0da20", "0.4.0+g1322e807e22d", "0.4.0.post0")
RELEASES = (FIRST, LAST)  # whose stores and engines still have to work


def exported(commit: str, target: Path) -> Path:
    """The tree of a commit, in `target`."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
        tree.extractall(target, filter="data")
    return target
