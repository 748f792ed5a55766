"""Has workers run the rows, says what each found, and writes it down as it goes. See check.py.

A worker is a process. If a row hangs, crashes or takes the device down, its worker ends, and the next worker goes on
with the next row: no row costs another one its result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.machine.gpu.machine import FAKE
from tests.machine.gpu.results import NOT_RUN, Results, driver_release
from tests.machine.gpu.rows import ROWS, Row, chosen
from transferd.errors import TransferError
from transferd.tiers.cuda.bindings import open_driver
from transferd.tiers.cuda.driver import NO_DRIVER, find_device
from transferd.tiers.segment import remove_stale_segments

TOTAL_S = 540.0
START_S = 180.0  # a worker's, where the machine's fabric manager is still starting
GRACE_S = 10.0  # from the end of a row's time to the end of its process
END_S = 10.0  # for a process that is done, or was killed, to end
WHERE = Path(__file__).parents[3] / "benchmarks" / "results"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine.gpu.check", description="Check transferd on an NVIDIA GPU."
    )
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--only", default="", help="rows to run: names or parts of names, with commas")
    parser.add_argument("--skip", default="", help="rows to leave out, named in the same way")
    parser.add_argument("--list", action="store_true", help="print the names of all rows, and end")
    parser.add_argument("--resume", action="store_true", help="run what --results has nothing good of")
    parser.add_argument("--first", action="store_true", help="end with the first row that fails")
    parser.add_argument("--no-bench", action="store_true", help="without the rows that measure every layout")
    parser.add_argument("--results", type=Path, help=f"where the JSON goes; by default {WHERE}")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--limit", type=float, default=TOTAL_S, help="seconds for the whole run, whatever hangs")
    return parser.parse_args()


def main() -> int:
    """The command line of check.py. Returns the exit code."""
    options = _options()
    only, skip = ([word for word in text.split(",") if word] for text in (options.only, options.skip))
    rows = chosen(only, bench=not options.no_bench, skip=skip)
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    if not rows:
        print(f"FAIL  no row is left of --only {options.only!r} --skip {options.skip!r}: see --list")
        return 1
    until = time.monotonic() + options.limit
    try:
        driver = open_driver()
        info = find_device(driver, options.device)
    except TransferError as error:
        for row in rows:
            print(f"skipped {row.words}: {NOT_RUN}: {'no driver' if error.reason == NO_DRIVER else error.reason}")
        print(f"FAIL  there is nothing to check on: {error}")
        return 1
    print(
        f"{info.name}, compute capability {info.capability[0]}.{info.capability[1]}, PCI {info.pci}, UUID {info.uuid}\n"
        f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}, cuda-bindings {_bindings_version()}, "
        f"cudaMemcpyBatchAsync: {'yes' if driver.batches else 'no'}, seed {options.seed}",
        flush=True,
    )
    where = options.results or (None if FAKE else WHERE)
    results = Results(where, info, driver_release(driver.version), options.seed, resume=options.resume)
    with tempfile.TemporaryDirectory(prefix="transferd-gpu-", ignore_cleanup_errors=True) as work, _no_mps_left(work):
        run = Run(results, options, Path(work), until)
        run.rows([row for row in rows if row.name not in results.known])
    if FAKE:
        remove_stale_segments()  # what processes left behind that were killed on purpose
    return results.conclude([row.name for row in rows])


class Run:
    """Workers, one after the other, until every row has been run or the time is over."""

    def __init__(self, results: Results, options: argparse.Namespace, work: Path, until: float) -> None:
        self.results = results
        self.options = options
        self.work = work
        self.until = until

    def rows(self, rows: list[Row]) -> None:
        waiting = list(rows)
        while waiting and not (self.options.first and self.results.failed):
            if self.until - time.monotonic() <= GRACE_S / 2:
                break
            ran = self._worker(waiting)
            if not ran and waiting:
                break
            waiting = [row for row in waiting if row.name not in ran]
        for row in waiting:
            self.results.heard(_told(row, "skipped", NOT_RUN))

    def _command(self, to: int, rows: list[str]) -> list[str]:
        module = ["-m", "tests.support.cuda.abi"] if FAKE else ["-m"]
        command = [sys.executable, *module, "tests.machine.gpu.worker", "--device", str(self.options.device)]
        command += ["--seed", str(self.options.seed), "--work", str(self.work), "--to", str(to)]
        return [*command, "--until", str(self.until), *([] if self.results.facts else ["--facts"]), *rows]

    def _worker(self, rows: list[Row]) -> set[str]:
        """Have one worker run these. Returns the names of those that it has run, or that ended it."""
        reading, writing = os.pipe()
        command = self._command(writing, [row.name for row in rows])
        process = subprocess.Popen(command, stdout=2, pass_fds=[writing], start_new_session=True)
        os.close(writing)
        by_name, ran, running = {row.name: row for row in rows}, set[str](), [""]
        began = [time.monotonic()]

        def heard(message: dict[str, Any]) -> bool:
            """False: the worker goes no further."""
            if "begins" in message:
                running[0], began[0] = message["begins"], time.monotonic()
                self.results.begins(by_name[running[0]].words)
            elif "measured" in message:
                self.results.measured(message["measured"])
            elif "environment" in message:
                self.results.set_facts(message["environment"])
            elif "row" in message:
                ran.add(message["row"]["name"])
                running[0], began[0] = "", time.monotonic()
                self.results.heard(message["row"])
                return not (self.options.first and self.results.failed)
            return True

        def allowed() -> float:
            limit = by_name[running[0]].limit_s if running[0] else START_S
            return min(began[0] + limit, self.until) + GRACE_S - time.monotonic()

        over, code = False, None
        try:
            over = _listen(reading, heard, allowed)
        finally:
            code = _end(process, killed=not over)
        name = running[0]
        if name:
            ran.add(name)
            took = time.monotonic() - began[0]
            cut = self.until - time.monotonic() < 1 and took < by_name[name].limit_s
            note = f"its process ended after {took:.0f} s, {_cause(code)}; what it was doing is above"
            self.results.heard(
                _told(by_name[name], "skipped", f"{NOT_RUN} to its end")
                if cut
                else _told(by_name[name], "wrong", note, took)
            )
        elif over and code:
            self.results.heard(_told(Row("the_worker", ROWS[0].check), "wrong", f"its process ended {_cause(code)}"))
        elif not over and not ran and not self.options.first:
            self.results.heard(_told(Row("the_worker", ROWS[0].check), "wrong", f"it did not start, {_cause(code)}"))
        return ran


def _listen(reading: int, heard: Callable[[dict[str, Any]], bool], allowed: Callable[[], float]) -> bool:
    """Pass messages on until the worker has said that it is done (True), has gone, or is not to go on."""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        kept = b""
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, allowed()))
            part = os.read(pipe.fileno(), 1 << 16) if ready else b""
            if not part:
                return False
            *lines, kept = (kept + part).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "over" in message:
                    return True
                if not heard(message):
                    return False


def _end(process: subprocess.Popen[bytes], *, killed: bool) -> int | None:
    """The exit code of a worker, whose whole family ends with it; None if it cannot even be killed."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(min(2.0, GRACE_S) if killed else END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        return None


def _cause(code: int | None) -> str:
    if code is None:
        return "inside the driver, and cannot be killed"
    return f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with exit code {code}"


def _told(row: Row, verdict: str, note: str, seconds: float = 0.0) -> dict[str, Any]:
    told = {"name": row.name, "check": row.words, "verdict": verdict, "seconds": round(seconds, 2)}
    return told | {"note": note, "figures": {}}


@contextmanager
def _no_mps_left(work: str) -> Iterator[None]:
    """Ends the MPS that a row which did not end has left behind."""
    try:
        yield
    finally:
        for pipe in (control.parent for control in (Path(work) / "mps").glob("*/control")):
            env = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=env, check=False, timeout=30)


def _bindings_version() -> str:
    import cuda.bindings

    return str(getattr(cuda.bindings, "__version__", "?"))


if __name__ == "__main__":
    sys.exit(main())
