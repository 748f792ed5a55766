"""Has pytest rewrite the test modules once, on all cores, before the processes of pytest-xdist begin.

Each of these processes imports every test module. In a fresh checkout each of them would rewrite all assertions at the
same time as the others, which costs each of them 16 s of CPU. What was rewritten lies in __pycache__.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FEW = 40  # modules that were changed since: the processes rewrite them by themselves
ROOT = Path(__file__).parents[2]


def rewrite(modules: Path) -> list[Path]:
    """Rewrite the test modules below a directory that are not, or not as they are now. Returns which these were."""
    stale = [module for module in sorted(modules.rglob("test_*.py")) if not _is_rewritten(module)]
    if sys.dont_write_bytecode or len(stale) < FEW:
        return []
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider"]
    cores = min(os.cpu_count() or 1, len(stale))
    running = [
        subprocess.Popen([*command, *map(str, stale[first::cores])], cwd=ROOT, stdout=subprocess.DEVNULL)
        for first in range(cores)
    ]
    for process in running:
        process.wait()  # whatever is wrong with a module, the run itself will say it
    return stale


def _is_rewritten(module: Path) -> bool:
    changed = module.stat().st_mtime
    made = (module.parent / "__pycache__").glob(f"{module.stem}.{sys.implementation.cache_tag}-pytest-*.pyc")
    return any(one.stat().st_mtime >= changed for one in made)
