"""Runs the checks in order, says what each found, then measures. See check.py."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.gpu import beside, copies, daemon, environment, memory, ordering, processes, sharing
from tests.gpu.machine import Failed, Found, Machine
from transferd.errors import DeviceLost, TransferError
from transferd.tiers.cuda.bindings import open_driver
from transferd.tiers.cuda.device import find_device
from transferd.tiers.segment import remove_stale_segments

Check = Callable[[Machine], Awaitable[str | Found]]
# Last is what may lose this process's context, and with it every check after it.
CHECKS: tuple[Check, ...] = (
    environment.the_environment,
    *copies.CHECKS,
    *memory.CHECKS,
    *processes.CHECKS,
    *ordering.CHECKS,
    *sharing.CHECKS,
    *daemon.CHECKS,
    *beside.CHECKS,
    environment.a_lost_device_is_noticed,
    processes.an_engine_is_killed,
)
GOALS = {"swap_out": 0.95, "swap_in": 0.95, "swap both ways": 0.9}
LIMIT_S = 540.0
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def main() -> int:
    """The command line of check.py. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description="Check transferd on an NVIDIA GPU.")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--only", default="", help="run the checks whose name has this in it")
    parser.add_argument("--first", action="store_true", help="end with the first check that fails, and do not measure")
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--results", type=Path, help=f"where the benchmark's JSON goes; by default {RESULTS}")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which it ends, whatever hangs")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)  # says where; a driver that hangs holds every thread
    try:
        driver = open_driver()
        info = find_device(driver, options.device)
    except TransferError as error:
        print(f"FAIL  there is nothing to check on: {error}")
        return 1
    driver.retain(options.device)  # for the whole run: making one takes longer than most checks
    print(
        f"{info.name}, compute capability {info.capability[0]}.{info.capability[1]}, PCI {info.pci}, UUID {info.uuid}"
    )
    print(
        f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}, cuda-bindings {_bindings_version()}, "
        f"cudaMemcpyBatchAsync: {'yes' if driver.batches else 'no'}, seed {options.seed}"
    )
    with tempfile.TemporaryDirectory(prefix="transferd-gpu-") as directory:
        machine = Machine(driver, options.device, Path(directory), options.seed)
        rows = _run([check for check in CHECKS if options.only in check.__name__], machine, first=options.first)
        failed = sum(row["verdict"] == "wrong" for row in rows)
        results = options.results or (None if machine.fake else RESULTS)
        if results is not None and not options.only:
            _write(results, environment.environment(machine), rows, options.seed)
    if not (failed and options.first) and not options.no_bench and not options.only:
        failed += bench(machine, results)
    _tell(rows)
    with contextlib.suppress(DeviceLost):
        driver.release(options.device)
    if machine.fake:
        remove_stale_segments()  # what processes left behind that were killed on purpose
    faulthandler.cancel_dump_traceback_later()
    print("FAILED" if failed else "all good")
    return 1 if failed else 0


def _run(checks: list[Check], machine: Machine, *, first: bool) -> list[dict[str, Any]]:
    """Every check in its order; a row for each. first: end with the first that fails."""
    rows: list[dict[str, Any]] = []
    for check in checks:
        before = time.monotonic()
        name = check.__name__.replace("_", " ")
        if sys.stdout.isatty():
            print(f"      {name} …", end="\r", flush=True)
        found = _checked(check, machine)
        seconds = time.monotonic() - before
        print(f"{found.verdict:<7} {name}: {found.note} ({seconds:.1f} s)", flush=True)
        rows.append({"check": name, "verdict": found.verdict, "seconds": round(seconds, 2), "note": found.note})
        rows[-1]["figures"] = found.figures
        if found.verdict == "wrong" and first:
            break
    return rows


def _checked(check: Check, machine: Machine) -> Found:
    try:
        found = asyncio.run(check(machine))
    except Exception as error:  # noqa: BLE001 - a check that breaks is a check that failed
        if not isinstance(error, Failed):
            traceback.print_exc()
        again = f"again, alone: python -m tests.gpu.check --only {check.__name__} --seed {machine.seed}"
        what = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        return Found(f"{what}\n        {again}", "wrong")
    return Found(found) if isinstance(found, str) else found


def _tell(rows: list[dict[str, Any]]) -> None:
    """The table: what is right, fast, slow, wrong, or was not tried here."""
    width = max((len(row["check"]) for row in rows), default=0)
    print()
    for row in rows:
        print(f"{row['check']:<{width}}  {row['verdict']}")


def _write(results: Path, facts: dict[str, Any], rows: list[dict[str, Any]], seed: int) -> None:
    results.mkdir(parents=True, exist_ok=True)
    path = results / "gpu-check.json"
    path.write_text(json.dumps({"environment": facts, "seed": seed, "checks": rows}, indent=1, default=str) + "\n")
    print(f"written to {path}")


def bench(machine: Machine, results: Path | None) -> int:
    """Measure, write the JSON, and say which goals are reached. Returns 1 if what was moved is wrong."""
    from transferd.cli.bench import copy_cuda, harness
    from transferd.cli.bench.harness import Row

    before = harness.machine() | copy_cuda.machine(machine.index)
    print("measuring: every layout, 1 to 1024 random blocks, every way", flush=True)
    rows: list[Row] = []

    def told(found: list[Row]) -> None:
        rows.extend(found)
        for row in found:
            goal = GOALS.get(row.name.partition(",")[0])
            mark = "" if goal is None else "  reached" if row.ratio >= goal else f"  below {goal}"
            print(f"      {row.name:<60} {row.value:8.2f} of {row.limit:8.2f} GB/s  {row.ratio:5.2f}{mark}", flush=True)
        if results is not None:  # after each, so that what was measured is kept whatever comes
            results.mkdir(parents=True, exist_ok=True)
            text = json.dumps(harness.report("copy-cuda", before, rows), indent=1)
            (results / "copy-cuda.json").write_text(text + "\n")

    small = {"counts": (1, 2), "runs": 1, "layouts": {n: c | {"layers": 3} for n, c in copy_cuda.LAYOUTS.items()}}
    try:
        copy_cuda.run(machine.index, told=told, **(small if machine.fake else {}))
    except TransferError as error:
        print(f"FAIL  the benchmark: {error}")
        return 1
    if results is not None:
        print(f"written to {results / 'copy-cuda.json'}")
    return 0


def _bindings_version() -> str:
    import cuda.bindings

    return str(getattr(cuda.bindings, "__version__", "?"))


if __name__ == "__main__":
    sys.exit(main())
