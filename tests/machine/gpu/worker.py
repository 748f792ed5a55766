"""Runs rows one after the other in this process, and tells each one's beginning and end on a descriptor.

    python -m tests.machine.gpu.worker --device N --seed N --work DIRECTORY --to FD --until SECONDS ROW …

until: on the monotonic clock; no row begins after it. A row that takes longer than it may ends this process, with the
traceback of every thread: a driver that hangs holds whatever thread called it. runner.py starts the next worker.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.machine.gpu.environment import environment
from tests.machine.gpu.machine import Failed, Found, Machine
from tests.machine.gpu.rows import ROWS, Row
from transferd.errors import DeviceLost
from transferd.tiers.cuda.bindings import open_daemons_driver

SPARE_S = 2.0  # a row that has less than this left does not begin

Tell = Callable[[dict[str, Any]], None]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--to", type=int, required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--facts", action="store_true", help="tell the environment first")
    parser.add_argument("rows", nargs="+")
    options = parser.parse_args()
    driver = open_daemons_driver()
    context = driver.retain(options.device)  # for the whole run: making one takes longer than most checks
    with os.fdopen(options.to, "w", encoding="utf-8") as pipe:

        def tell(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message, default=str) + "\n")
            pipe.flush()

        machine = Machine(driver, options.device, options.work, options.seed)
        machine.measured = lambda rows: tell({"measured": rows})
        if options.facts:
            tell({"environment": environment(machine)})
        run([row for row in ROWS if row.name in options.rows], machine, options.until, tell)
        tell({"over": True})
    del context
    with contextlib.suppress(DeviceLost):
        driver.release(options.device)
    return 0


def run(rows: list[Row], machine: Machine, until: float, tell: Tell) -> None:
    """Run those that there is time for."""
    for row in rows:
        left = until - time.monotonic()
        if left < SPARE_S:
            return
        tell({"begins": row.name})
        faulthandler.dump_traceback_later(min(row.limit_s, left), exit=True)
        before = time.monotonic()
        found = checked(row, machine)
        faulthandler.cancel_dump_traceback_later()
        seconds = round(time.monotonic() - before, 2)
        told = {"name": row.name, "check": row.words, "verdict": found.verdict, "seconds": seconds, "note": found.note}
        tell({"row": told | {"figures": found.figures}})


def checked(row: Row, machine: Machine) -> Found:
    machine.begin(row.name)
    try:
        found = asyncio.run(row.check(machine))
    except Exception as error:  # noqa: BLE001 - a check that breaks is a check that failed
        if not isinstance(error, Failed):
            traceback.print_exc()
        again = f"again, alone: python -m tests.machine.gpu.check --only {row.name} --seed {machine.seed}"
        what = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        return Found(f"{what}\n        {again}", "wrong")
    return Found(found) if isinstance(found, str) else found


if __name__ == "__main__":
    sys.exit(main())
