"""An environment of its own for the tests of one engine, as `make sglang-check` and `make lmcache-check` set it up."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.machine.with_vllm.check import TORCH_INDEX, attempt

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class OwnEnvironment:
    """name: of the engine, and of the folders build/NAME and tests/machine/with_NAME. room: bytes, while pip unpacks.

    steps: the arguments of one `pip install` after the other; transferd itself follows. gains: the commands of
    `--gains` by the name of the file in benchmarks/results that gets their JSON.
    """

    name: str
    room: int
    steps: tuple[tuple[str, ...], ...]
    gains: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def tests(self) -> Path:
        return ROOT / "tests" / "machine" / f"with_{self.name}"

    @property
    def variable(self) -> str:
        """Names an interpreter that has the engine, instead of an environment of its own."""
        return f"TRANSFERD_{self.name.upper()}_PYTHON"

    @property
    def python(self) -> Path:
        return ROOT / "build" / self.name / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """A file that says: the environment was made, with today's requirements."""
        files = [Path(step[1]).read_text(encoding="utf-8") for step in self.steps if step[0] == "-r"]
        wanted = repr((self.steps, files)).encode()
        return ROOT / "build" / self.name / f".ready-{hashlib.sha256(wanted).hexdigest()[:12]}"

    def interpreter(self) -> tuple[str, str]:
        """An interpreter that has the engine, installed if there is none; or "" and why it cannot be had."""
        if given := os.environ.get(self.variable):
            return given, ""
        why_not = "" if self.stamp.exists() else self._make()
        return ("", why_not) if why_not else (str(self.python), "")

    def _make(self) -> str:
        place = ROOT / "build" / self.name
        place.parent.mkdir(exist_ok=True)
        if (free := shutil.disk_usage(place.parent).free) < self.room:
            return f"it needs {self.room // GIB} GiB of disk, and {free // GIB} GiB are free"
        install = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        why_not = attempt([sys.executable, "-m", "venv", "--clear", str(place)])
        for step in self.steps:
            if not why_not and attempt([*install, *step]):  # pip's own settings may not lead to torch for the CPU
                why_not = attempt([*install, *step, "--retries", "0", "--extra-index-url", TORCH_INDEX])
        why_not = why_not or attempt([*install, "-e", str(ROOT)])
        if not why_not:
            self.stamp.touch()
        return why_not

    def check(self, about: str | None) -> int:
        """The command line: run the tests, and return the exit code. What cannot be installed is said, and no failure.

        about: what the command does.
        """
        parser = argparse.ArgumentParser(description=about)
        parser.add_argument("--python", help=f"or {self.variable}: an interpreter that has {self.name}")
        parser.add_argument("--gains", action="store_true", help="measure, and write tables of docs/; tests nothing")
        asked = parser.parse_args()
        python, why_not = (asked.python, "") if asked.python else self.interpreter()
        if why_not:
            print(f"{self.name}-check: skipped, {why_not}")
            return 0
        if asked.gains:
            self._measure(python)
            return 0
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", "--durations=10"]
        command += [str(self.tests), "-o", "faulthandler_timeout=0"]  # torch's import takes a minute on a busy machine
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        variables = kept | {"PYTHONPATH": str(ROOT)}  # else each daemon that starts compiles all of transferd
        return min(1, subprocess.run(command, cwd=ROOT, env=variables, timeout=TIMEOUT_S, check=False).returncode)

    def _measure(self, python: str) -> None:
        variables = os.environ | {"PYTHONPATH": str(ROOT), self.variable: python}
        for name, command in self.gains:
            file = ROOT / "benchmarks" / "results" / f"{name}.json"
            run = subprocess.run(
                [python, "-m", *command, "--format", "json"],
                cwd=ROOT,
                env=variables,
                timeout=TIMEOUT_S,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            file.write_text(json.dumps(json.loads(run.stdout), indent=1) + "\n", encoding="utf-8")
            print(f"written: {file.relative_to(ROOT)}", flush=True)
        subprocess.run([python, "-m", "benchmarks.table"], cwd=ROOT, env=variables, timeout=60, check=True)
