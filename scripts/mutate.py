"""Mutation testing: do a module's own tests notice small bugs in it?

    make mutate MODULE=control/lanes

Changes one operator, number, comparison or flag of `transferd/<MODULE>.py` at a time, in a copy of the tree, and
runs the test file of the same name against each change. Prints the changes that no test noticed, then the share
that was noticed. Some survivors change nothing that can be observed; the rest ask for a test.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 60.0
# `A | B` is nearly always a type here, and a mutated annotation is never evaluated. Removing a decorator of a
# dataclass or a property breaks the import, which says nothing about the tests.
SKIPPED_OPERATORS = ["core/ReplaceBinaryOperator_BitOr_.*", "core/RemoveDecorator"]
CONFIG = """
[cosmic-ray]
module-path = "transferd/{module}.py"
timeout = {timeout}
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider --no-header {tests}"

[cosmic-ray.distributor]
name = "local"

[cosmic-ray.filters.operators-filter]
exclude-operators = {skipped}
"""


def tests_of(module: str) -> list[str]:
    """The test files that carry the module's name."""
    folder, _, name = module.rpartition("/")
    found = sorted((ROOT / "tests" / folder).glob(f"test_{name}.py"))
    found += sorted((ROOT / "tests" / folder).glob(f"test_{name}_stateful.py"))
    if not found:
        sys.exit(f"transferd/{module}.py has no test file of its name: expected tests/{folder}/test_{name}.py")
    return [str(path.relative_to(ROOT)) for path in found]


def run(module: str, tests: list[str]) -> list[dict[str, object]]:
    """One entry a mutation: what was changed, where, and whether a test noticed."""
    tool = Path(sys.executable).parent
    with tempfile.TemporaryDirectory(prefix="transferd-mutate-") as directory:
        copy = Path(directory)
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for name in ("transferd", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        config, session = copy / "mutate.toml", copy / "session.sqlite"
        config.write_text(
            CONFIG.format(
                module=module,
                timeout=TIMEOUT_S,
                python=sys.executable,
                tests=" ".join(tests),
                skipped=json.dumps(SKIPPED_OPERATORS),
            )
        )
        steps = [
            [tool / "cosmic-ray", "baseline", config],  # the tests must pass before anything is changed
            [tool / "cosmic-ray", "init", config, session],
            [tool / "cr-filter-operators", session, config],
            [tool / "cosmic-ray", "exec", config, session],
        ]
        environment = os.environ | {"PYTHONPATH": directory}
        for step in steps:
            subprocess.run([str(word) for word in step], cwd=copy, check=True, env=environment)
        dumped = subprocess.run(
            [str(tool / "cosmic-ray"), "dump", str(session)], cwd=copy, check=True, capture_output=True, text=True
        ).stdout
    return [entry for line in dumped.splitlines() if (entry := as_entry(json.loads(line))) is not None]


def as_entry(pair: list[dict[str, object] | None]) -> dict[str, object] | None:
    """A work item and its result, as cosmic-ray dumps them; None for what was filtered out."""
    item, result = pair
    if item is None or result is None or result["worker_outcome"] == "skipped":
        return None
    return {"noticed": result["test_outcome"] != "survived", "diff": result["diff"]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("module", help="as a path below transferd/, without .py: control/lanes")
    parser.add_argument("--goal", type=float, default=0.0, help="exit 1 below this share noticed (0 … 1)")
    options = parser.parse_args()
    entries = run(options.module, tests_of(options.module))
    for entry in entries:
        if not entry["noticed"]:
            print(entry["diff"], end="\n\n")
    noticed = sum(bool(entry["noticed"]) for entry in entries)
    share = noticed / len(entries) if entries else 1.0
    print(f"{options.module}: {noticed} of {len(entries)} mutations noticed ({share:.0%})")
    return 0 if share >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
