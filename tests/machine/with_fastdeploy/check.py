"""`make fastdeploy-check`: the adapter under FastDeploy's own, unmodified source, and FastDeploy's tests with it.

    python -m tests.machine.with_fastdeploy.check [--short | --gains] [--only WORD …] [--failed]

The source is not ours to carry. It is looked for as *.tar.xz in $TRANSFERD_FASTDEPLOY, else in ../shared/fastdeploy
beside this checkout; each archive holds fastdeploy/ and tests/, and examples/cache_storage/ where its scripts are to be
run. A newer V1 staging_manager.py is taken from v1/ there. An environment with Paddle for the CPU is made under
build/fastdeploy. Where source or Paddle is not to be had, that is said, and nothing fails.

For each version: all tests in this directory; those under gpu/, with FastDeploy's workers and cache messagers, on a
machine whose GPU is a double (gpu/machine.py); then FastDeploy's own tests of its cache manager and its queues, with
the plugin and without; how they end without it is kept beside the source, since transferd has no part in it. A test of
theirs that ends otherwise with the plugin is run three times each way, since some of them are a matter of luck; what
then still differs fails the check.

--short    only this directory, the newest version
--only     only rows of the table that have one of these words, as in `--only 2.5 theirs`
--failed   of our tests only those that failed the last time
--gains    measure what FastDeploy gains, and write the table of docs/fastdeploy_details.md; tests nothing
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

from tests.support.orphans import die_with_parent

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "fastdeploy"
GPU_SITE = Path(__file__).parent / "gpu" / "site"
VENV = BUILD / "venv"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
PYTHON_OF = ROOT / "scripts" / "python-of"
RESULT = ROOT / "benchmarks" / "results" / "fastdeploy_real.json"
SOURCE_VARIABLE = "TRANSFERD_FASTDEPLOY"
THEIR_TESTS = ("tests/cache_manager", "tests/inter_communicator")
WITHOUT_DEPENDENCIES = "paddleformers==1.2.0"  # asks for another transformers than FastDeploy does
INSTALL_TIMEOUT_S = 1800
RUN_TIMEOUT_S = 3600
OUR_TIMEOUT_S = 300  # of one test: FastDeploy's processes take a minute to be imported where others work, too
THEIR_TIMEOUT_S = 60  # of one test: some of theirs never end without a GPU
LUCK = 3
NOTHING_TO_RUN = 5  # how pytest ends then


def archives() -> list[Path]:
    """The versions of FastDeploy's source that are here."""
    directory = os.environ.get(SOURCE_VARIABLE)
    return sorted((Path(directory) if directory else ROOT.parent / "shared" / "fastdeploy").glob("*.tar.xz"))


def unpacked(archive: Path) -> Path:
    """The archive's content; made once for each content."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    tree = BUILD / f"{archive.name.removesuffix('.tar.xz')}-{digest}"
    if not tree.exists():
        partial = tree.with_suffix(".partial")
        with tarfile.open(archive) as file:
            file.extractall(partial, filter="data")
        partial.rename(tree)
    return tree


def stamp() -> Path:
    """A file that says: the environment was made, with today's requirements."""
    made_of = REQUIREMENTS.read_bytes() + _interpreter().encode()
    return VENV / f".ready-{hashlib.sha256(made_of).hexdigest()[:12]}"


def _interpreter() -> str:
    """FastDeploy's Python if this machine has one that works, else ours."""
    found = subprocess.run(["bash", str(PYTHON_OF), "3.10"], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else sys.executable


def environment(timeout: float = INSTALL_TIMEOUT_S) -> str:
    """Make the environment. timeout: seconds for each of its steps. Why it cannot be had, or ""."""
    if not stamp().exists():
        steps = (
            [_interpreter(), "-m", "venv", "--clear", str(VENV)],
            [*_pip(), "-r", str(REQUIREMENTS)],
            [*_pip(), "--no-deps", WITHOUT_DEPENDENCIES],
        )
        for step in steps:
            try:
                done = subprocess.run(step, capture_output=True, text=True, timeout=timeout, check=False)
            except subprocess.TimeoutExpired:
                return f"{' '.join(step[:6])} … was not over within {timeout:g} s"
            if done.returncode:
                return f"{' '.join(step[:6])} … failed: {done.stderr.strip().splitlines()[-1:]}"
        stamp().touch()
    # As a user installs it, so that FastDeploy finds the entry point.
    subprocess.run([*_pip(), "-e", str(ROOT)], check=True, timeout=INSTALL_TIMEOUT_S)
    return ""


def our_tests(tree: Path, *arguments: str, gpu: bool = False, failed: bool = False) -> tuple[bool, str]:
    """Every test of this directory, with this version. gpu: those that want the machine with the double of a GPU.

    failed: only those that failed the last time. Returns whether all is well, and the counts.
    """
    command = [str(PYTHON), "-m", "pytest", "-q", "--show-capture=no", "--durations=10"]
    command += ["-o", "faulthandler_timeout=0"]  # a slow test on a busy machine prints no threads into the report
    command += ["-o", f"cache_dir={BUILD}/failed-{tree.name}{'-gpu' * gpu}"]
    command += ["--last-failed", "--last-failed-no-failures=none"] if failed else []
    here = Path(__file__).parent.relative_to(ROOT)
    paths = (GPU_SITE, tree, ROOT) if gpu else (tree, ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command += [f"--timeout={OUR_TIMEOUT_S}", f"--junitxml={report}"]
        try:
            run = subprocess.run(
                [*command, *(arguments or (str(here / "gpu" if gpu else here),))],
                cwd=ROOT, env=_variables(*paths), timeout=RUN_TIMEOUT_S, check=False, preexec_fn=die_with_parent,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, f"not over within {RUN_TIMEOUT_S / 60:.0f} min"
        good = run.returncode == 0 or (failed and run.returncode == NOTHING_TO_RUN)
        return good, (_counts(_cases(report)) or "none") if report.exists() else "no report"


def their_tests(tree: Path) -> tuple[bool, str]:
    """FastDeploy's own tests end the same with the plugin and without it. Returns whether they do, and the counts."""
    without, with_it = _without_the_plugin(tree), _outcomes(tree, plugin=True, names=THEIR_TESTS)
    differ = sorted(name for name in without if without[name] != with_it.get(name))
    told = f"{_counts(with_it)}; without the plugin {_counts(without)}"
    print(f"FastDeploy's own tests: {told}")
    bad = []
    for name in differ:
        file = _file(tree, name)
        again = [
            [_outcomes(tree, plugin=plugin, names=(file,)).get(name) for _ in range(LUCK)] for plugin in (False, True)
        ]
        print(f"  {name}: without {again[0]}, with {again[1]}")
        if set(again[0]) & set(again[1]) == set():
            bad.append(name)
    return not bad and without.keys() == with_it.keys(), told


def gains(tree: Path, rounds: int) -> None:
    """Measure what FastDeploy gains; the figures go to benchmarks/results and the tables of docs/."""
    command = [str(PYTHON), "-m", "benchmarks.fastdeploy_real", "--tree", str(tree), "--rounds", str(rounds)]
    run = subprocess.run(
        [*command, "--format", "json"], cwd=ROOT, env=_variables(ROOT), timeout=RUN_TIMEOUT_S, check=True,
        stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    RESULT.write_text(run.stdout.splitlines()[-1] + "\n", encoding="utf-8")
    subprocess.run([sys.executable, "-m", "benchmarks.table"], cwd=ROOT, env=_variables(ROOT), check=True)
    print(f"written: {RESULT.relative_to(ROOT)} and docs/fastdeploy_details.md")


def _without_the_plugin(tree: Path) -> dict[str, str]:
    """How FastDeploy's own tests end without the plugin; run once for each source and environment."""
    kept = tree.with_name(f"{tree.name}-without{stamp().name}.json")
    if not kept.exists():
        partial = kept.with_suffix(".partial")
        partial.write_text(json.dumps(_outcomes(tree, plugin=False, names=THEIR_TESTS)), encoding="utf-8")
        partial.rename(kept)
    outcomes: dict[str, str] = json.loads(kept.read_text(encoding="utf-8"))
    return outcomes


def _outcomes(tree: Path, *, plugin: bool, names: tuple[str, ...]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        variables = _variables(tree) | {"FD_LOG_DIR": scratch}
        variables.pop("FD_PLUGINS", None)
        if plugin:
            variables["FD_PLUGINS"] = "transferd"
        as_it_is = ["-c", os.devnull, f"--rootdir={tree}"]  # not with our settings
        as_it_is += [
            f"--timeout={THEIR_TIMEOUT_S}",
            "--continue-on-collection-errors",
        ]  # some need a GPU to be imported
        subprocess.run(
            [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", *as_it_is, f"--junitxml={report}", *names],
            cwd=tree, env=variables, timeout=RUN_TIMEOUT_S, check=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, preexec_fn=die_with_parent,
        )  # fmt: skip
        return _cases(report)


def _cases(report: Path) -> dict[str, str]:
    """How each test of a report ended, by name."""
    return {_name(case): _end(case) for case in ET.parse(report).iter("testcase")}


def _name(case: ET.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _file(tree: Path, name: str) -> str:
    """Where a test is: its name begins with the file's, with dots, and goes on with its class."""
    parts = name.partition("::")[0].split(".")
    files = (Path(*parts[:end]).with_suffix(".py") for end in range(len(parts), 0, -1))
    return str(next(file for file in files if (tree / file).is_file()))


def _end(case: ET.Element) -> str:
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


def _counts(outcomes: dict[str, str]) -> str:
    ends = list(outcomes.values())
    return ", ".join(f"{ends.count(end)} {end}" for end in sorted(set(ends)))


def _pip() -> list[str]:
    return [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def _variables(*paths: Path) -> dict[str, str]:
    """Ours, in which each of hundreds of daemons would compile transferd again if Python were not to keep bytecode."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="only our tests, with one version")
    parser.add_argument("--gains", action="store_true", help="measure what FastDeploy gains; tests nothing")
    parser.add_argument("--rounds", type=int, default=5, help="of --gains")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="rows that have one of these words")
    parser.add_argument("--failed", action="store_true", help="of our tests, those that failed the last time")
    options = parser.parse_args()
    found = archives()
    if not found:
        print(f"fastdeploy-check: skipped, FastDeploy's source is not here (*.tar.xz in ${SOURCE_VARIABLE})")
        return 0
    why_not = environment()
    if why_not:
        print(f"fastdeploy-check: skipped, {why_not}")
        return 0
    if options.gains:
        gains(unpacked(found[-1]), options.rounds)
        return 0
    rows = _check(found[-1:] if options.short else found[::-1], options)
    version = subprocess.run([str(PYTHON), "-V"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"\n{version}, {os.cpu_count()} cores, load {os.getloadavg()[2]:.1f}")
    print("| FastDeploy | tests | | ended | took | of CPU |\n|---|---|---|---|---|---|")
    print("\n".join(row for _, row in rows))
    return 0 if rows and all(good for good, _ in rows) else 1


def _check(found: list[Path], options: argparse.Namespace) -> list[tuple[bool, str]]:
    """Run the rows that the options ask for. Whether each is good, and its line of the table."""
    rows = []
    for archive in found:
        tree, version = unpacked(archive), archive.name.removesuffix(".tar.xz")
        parts: dict[str, Callable[[], tuple[bool, str]]] = {
            "ours": functools.partial(our_tests, tree, failed=options.failed),
            "ours, with workers and messagers": functools.partial(our_tests, tree, gpu=True, failed=options.failed),
            "theirs": functools.partial(their_tests, tree),
        }
        for part, run in list(parts.items())[: 1 if options.short else None]:
            if not any(word in f"{version}: {part}" for word in options.only):
                continue
            print(f"== {version}: {part}", flush=True)
            began, used = time.monotonic(), _cpu_seconds()
            good, told = run()
            took, cpu = (time.monotonic() - began) / 60, (_cpu_seconds() - used) / 60
            verdict = "ok" if good else "FAILED"
            rows.append((good, f"| {version} | {part} | {verdict} | {told} | {took:.0f} min | {cpu:.0f} min |"))
    return rows


def _cpu_seconds() -> float:
    """Of all processes that have ended below this one: how long the check takes where nobody else works."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
