"""The floor under the branches that a folder's own tests reach: those of its mirror below tests/, and no others.

    make coverage                            # the folders that CI measures
    make coverage FOLDERS="daemon storage"   # the others, in about four minutes

Prints the lines and branches that are not reached, file by file, and fails below the floor. A floor is near what is
reached, so that a new error path without a test shows. Processes that a test starts do not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Folder(NamedTuple):
    """A part of the package. floor: percent of lines and branches. modules, tests: besides those of its name."""

    floor: int
    modules: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


FOLDERS = {
    "control": Folder(
        99,
        ("transferd.barrier", "transferd.tasks"),
        ("tests/test_barrier.py", "tests/test_barrier_stateful.py", "tests/test_tasks.py"),
    ),
    "config": Folder(97),
    "runtime": Folder(77),
    "workers": Folder(91),
    "daemon": Folder(88),
    "storage": Folder(93),
}


def measure(name: str) -> bool:
    """Run the folder's tests, and print what they do not reach. False: below the floor, or a test fails."""
    folder, began = FOLDERS[name], time.monotonic()
    source = ",".join((f"transferd.{name}", *folder.modules))
    coverage = [sys.executable, "-m", "coverage"]
    with tempfile.TemporaryDirectory(prefix="td-") as directory:  # a short path: of unix sockets, too
        env = os.environ | {"COVERAGE_FILE": f"{directory}/data"}
        tests = [
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--basetemp={directory}/t",
            f"tests/{name}",
            *folder.tests,
        ]
        run = subprocess.run([*coverage, "run", f"--source={source}", *tests], cwd=ROOT, env=env, check=False)
        report = subprocess.run([*coverage, "report", f"--fail-under={folder.floor}"], cwd=ROOT, env=env, check=False)
    passed = run.returncode == report.returncode == 0
    print(
        f"{name}: {'ok' if passed else 'FAILED'}, floor {folder.floor} %, {time.monotonic() - began:.0f} s", flush=True
    )
    return passed


def main() -> int:
    names = sys.argv[1:]
    if unknown := [name for name in names if name not in FOLDERS]:
        sys.exit(f"no floor for {', '.join(unknown)}; there are {', '.join(FOLDERS)}")
    failed = [name for name in names if not measure(name)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
