"""Load and soak: a flood of tasks at once, then a mixed load with faults, both counted on both sides.

    python -m tests.machine.soak.soak [--minutes 30] [--flood 100000] [--write]

8 ranks, 32 clients in 4 processes, a daemon with the file backend on a bad day (storage.py). Every few
seconds one of the processes is killed and another takes its place; clients cancel tasks and set deadlines
that cannot be kept. --write: the figures go to docs/faults.md. Exit code 1 when something is not as promised.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.machine.faults.table import machine, replace_section
from tests.machine.faults.world import ROOT
from tests.machine.soak.engine import BLOCKS
from tests.machine.soak.watch import Watch
from transferd import Client
from transferd.client import launch
from transferd.client.launch import DaemonProcess
from transferd.runtime.compat import Self, timeout

DOCS = ROOT / "docs" / "faults.md"
PROCESSES, CLIENTS = 4, 8  # clients of each process
HOMES = 2 * PROCESSES  # block ranges: a successor does not use the blocks of the one that was killed
CLIENT_TIMEOUT_S = 2.5
KILL_EVERY_S = (
    4.0  # so a range of blocks is used again after 16 s at the earliest: long after its tasks were taken back
)
ANSWER_S = 900.0
FLAT_AFTER_S = 120.0  # a shorter run only warms up
EXPECTED_CODES = {"-", "storage_error", "storage_unavailable", "cancelled", "expired", "queue_full"}


def config(ranks: int, queued: int) -> dict[str, dict[str, Any]]:
    """Small blocks: what is under test is how many there are."""
    blocks = HOMES * CLIENTS * BLOCKS
    shape = {"layers": 2, "kv_heads": 1, "head_dim": 32, "block_size": 16}
    return {
        "server": {"client_timeout": CLIENT_TIMEOUT_S, "max_queued_tasks": queued, "result_ttl": 5.0},
        "cache": {"ranks": ranks, "device_blocks": blocks, "host_blocks": blocks} | shape,
        "host": {"staging": "1MiB"},
        "storage": {"backend": "tests.machine.soak.storage:BadDayFile", "model": "soak", "file": {"capacity": "64MiB"}},
        "log": {"level": "error"},
    }


@dataclass
class Tally:
    """What journals say. in_flight: pushed by processes that were killed before they were told."""

    pushed: int = 0
    told: Counter[str] = field(default_factory=Counter)  # by status
    codes: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    microseconds: dict[str, list[int]] = field(default_factory=dict)  # by kind, of those that were admitted

    @property
    def in_flight(self) -> int:
        return self.pushed - sum(self.told.values())

    def add(self, journal: Path) -> None:
        for line in journal.read_text().splitlines():
            if line == "P":
                self.pushed += 1
                continue
            _, kind, status, code, microseconds, right = line.split()
            self.told[status] += 1
            self.codes[code] += 1
            self.wrong += right != "1"
            if status != "busy":
                self.microseconds.setdefault(kind, []).append(int(microseconds))

    def p99_ms(self, kind: str) -> float:
        found = self.microseconds[kind]
        return (statistics.quantiles(found, n=100)[98] if len(found) > 1 else found[0]) / 1000


@dataclass
class Report:
    """What a run found. lines: for the page. problems: empty when everything was as promised."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.problems.append(otherwise)


class Soak:
    """One daemon and its engines. Owns all processes while it is entered."""

    def __init__(self, directory: Path, ranks: int, queued: int) -> None:
        self._directory = directory
        self._ranks = ranks
        self._queued = queued
        self._journals: list[Path] = []
        self._engines: dict[int, Process] = {}  # by home
        self.daemon: DaemonProcess
        self.operator: Client

    async def __aenter__(self) -> Self:
        tree = config(self._ranks, self._queued)
        prefix = ["env", f"PYTHONPATH={ROOT}"]
        self.daemon = await asyncio.to_thread(launch.start, tree, self._directory, prefix=prefix)
        self.operator = Client(self.daemon.endpoint, connect_timeout=30)
        await self.operator.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine in self._engines.values():
            with contextlib.suppress(ProcessLookupError):
                engine.kill()
            await engine.communicate()
        await self.operator.close()
        code = await asyncio.to_thread(self.daemon.stop)
        if code != 0:
            raise RuntimeError(f"the daemon stopped with exit code {code}: {self.daemon.log[-2000:]}")

    # --- engines ------------------------------------------------------------------------------------

    async def _start(self, home: int, flood: int = 0) -> Process:
        number = len(self._journals)
        journal = self._directory / f"journal-{number}"
        journal.touch()
        self._journals.append(journal)
        spec = {
            "endpoint": self.daemon.endpoint,
            "journal": str(journal),
            "name": f"engine-{number}",
            "clients": CLIENTS,
            "ranks": self._ranks,
            "first_block": home * CLIENTS * BLOCKS,
            "flood": flood,
        }
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        arguments = [sys.executable, "-m", "tests.machine.soak.engine", json.dumps(spec)]
        engine = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, env=environment)
        self._engines[home] = engine
        return engine

    async def _finish(self, home: int) -> None:
        """Wait until an engine has been told everything and ends."""
        engine = self._engines.pop(home)
        async with timeout(ANSWER_S):
            output, _ = await engine.communicate()
        if engine.returncode != 0 or b"done" not in output:
            raise RuntimeError(f"an engine ended with exit code {engine.returncode}")

    def _tally(self, first: int) -> Tally:
        tally = Tally()
        for journal in self._journals[first:]:
            tally.add(journal)
        return tally

    async def _counted(self) -> tuple[Counter[str], int]:
        """The daemon's side: tasks that have ended, by status, and how many it refused for want of room."""
        await self.operator.drain()
        await self.operator.resume()
        stats = await self.operator.stats()
        ended = Counter(stats["tasks"])
        return ended, ended.pop("busy", 0)

    # --- the flood ----------------------------------------------------------------------------------

    async def flood(self, tasks: int, report: Report) -> None:
        """Everything at once against a paused daemon, then everything done."""
        first, before = len(self._journals), await self._counted()
        idle = Watch(self.daemon.pid)
        watching = asyncio.ensure_future(idle.run(0.2))
        await self.operator.pause()
        each = tasks // (PROCESSES * CLIENTS)
        began = time.monotonic()
        engines = [await self._start(home, flood=each) for home in range(PROCESSES)]
        refused = 0
        async with timeout(ANSWER_S):
            for engine in engines:
                assert engine.stdout is not None
                refused += int((await engine.stdout.readline()).split()[1])
        stats = await self.operator.stats()
        pushed_s = time.monotonic() - began
        queued = stats["queued"]
        report.expect(queued == self._queued, f"{queued} queued of at most {self._queued}")
        await self.operator.resume()
        for home in range(PROCESSES):
            await self._finish(home)
        seconds = time.monotonic() - began
        watching.cancel()
        self._judge_flood(each * PROCESSES * CLIENTS, self._tally(first), before, await self._counted(), report)
        start, peak = idle.samples[0].rss, idle.peak("rss")
        report.lines.append(
            f"* **At once:** {each * PROCESSES * CLIENTS:,} tasks pushed by {PROCESSES * CLIENTS} clients within "
            f"{pushed_s:.0f} s; {queued:,} queued, {refused:,} answered busy; all done, each exactly once, after "
            f"{seconds:.0f} s. The daemon's memory: {start / 1e6:.0f} MB before, {peak / 1e6:.0f} MB at most."
        )
        report.expect(peak - start < 256e6, f"memory rose by {(peak - start) / 1e6:.0f} MB")

    def _judge_flood(
        self,
        tasks: int,
        tally: Tally,
        before: tuple[Counter[str], int],
        after: tuple[Counter[str], int],
        report: Report,
    ) -> None:
        ended, refused = after[0] - before[0], after[1] - before[1]
        report.expect(tally.in_flight == 0, f"{tally.in_flight} tasks were never answered")
        report.expect(tally.told["ok"] == tasks, f"engines were told {dict(tally.told)}, not {tasks} times ok")
        report.expect(dict(ended) == {"ok": tasks}, f"the daemon counts {dict(ended)}, not {tasks} times ok")
        report.expect(tally.told["busy"] == refused, f"{tally.told['busy']} told busy, {refused} counted")

    # --- the mixed load -----------------------------------------------------------------------------

    async def mixed(self, seconds: float, report: Report, interval: float) -> None:
        """Engines at work, killed and replaced, for so long; then everything ends and is counted."""
        first, before = len(self._journals), await self._counted()
        for home in range(PROCESSES):
            await self._start(home)
        await self._all_have_done_something(first)
        watch = Watch(self.daemon.pid)
        watching = asyncio.ensure_future(watch.run(interval))
        end, kills = time.monotonic() + seconds, 0
        while time.monotonic() + KILL_EVERY_S < end:
            await asyncio.sleep(KILL_EVERY_S)
            await self._replace(kills % PROCESSES)
            kills += 1
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        watching.cancel()
        for engine in self._engines.values():
            assert engine.stdin is not None
            engine.stdin.close()
        for home in list(self._engines):
            await self._finish(home)
        await asyncio.sleep(2 * CLIENT_TIMEOUT_S)  # until the last one killed has been given up
        self._judge_mixed(kills, seconds, self._tally(first), before, await self._counted(), watch, report)
        await self._judge_rest(report)

    async def _all_have_done_something(self, first: int) -> None:
        """Wait until each engine was told its first `ok`; on a busy machine starting takes longer than a short run."""
        async with timeout(ANSWER_S):
            for journal in self._journals[first:]:
                while " ok " not in journal.read_text():  # noqa: ASYNC110 - a file of another process
                    await asyncio.sleep(0.1)

    async def _replace(self, place: int) -> None:
        """Kill the engine at a place; another one starts, on other blocks."""
        (home,) = [home for home in self._engines if home % PROCESSES == place]
        engine = self._engines.pop(home)
        engine.kill()
        await engine.communicate()
        await self._start((home + PROCESSES) % HOMES)

    def _judge_mixed(
        self,
        kills: int,
        seconds: float,
        tally: Tally,
        before: tuple[Counter[str], int],
        after: tuple[Counter[str], int],
        watch: Watch,
        report: Report,
    ) -> None:
        ended, told = sum((after[0] - before[0]).values()), sum(tally.told.values()) - tally.told["busy"]
        # Each client of a killed process has one task at most that it was not told of; the daemon may have it or not.
        report.expect(tally.in_flight <= kills * CLIENTS, f"{tally.in_flight} tasks were never answered")
        report.expect(told <= ended <= told + tally.in_flight, f"told {told}, the daemon counts {ended}")
        report.expect(tally.wrong == 0, f"{tally.wrong} results claimed what was not so")
        unexpected = {code: count for code, count in tally.codes.items() if code not in EXPECTED_CODES}
        report.expect(not unexpected, f"unexpected codes: {unexpected}")
        report.expect(tally.told["ok"] > 0, "nothing went well")
        if seconds >= FLAT_AFTER_S:
            report.problems += watch.growth()
        p99 = ", ".join(f"{kind} {tally.p99_ms(kind):.0f} ms" for kind in sorted(tally.microseconds))
        told_text = ", ".join(f"{count:,} {status}" for status, count in tally.told.most_common())
        report.lines += [
            f"* **Mixed load, {seconds / 60:.1f} minutes:** {tally.pushed:,} tasks pushed; results: {told_text}; "
            f"{tally.in_flight} were running in the {kills} engine processes that were killed. The daemon counts "
            f"{ended:,} ended tasks, the engines {told:,} results. {tally.wrong} wrong.",
            f"* **p99** from push to result: {p99}.",
            f"* **Held by the daemon**, median of the second and of the last quarter: {_held(watch)}.",
        ]

    async def _judge_rest(self, report: Report) -> None:
        stats = await self.operator.stats()
        rest = {name: stats[name] for name in ("queued", "running", "straggling")} | {
            "staging": stats["staging"]["used"],
            "corrupt": stats["storage"]["corrupt"],
        }
        report.expect(not any(rest.values()), f"left over: {rest}")


def _held(watch: Watch) -> str:
    units = {"rss": ("MB", 1e6), "fds": ("descriptors", 1), "threads": ("threads", 1), "shared": ("MB shared", 1e6)}
    return ", ".join(
        f"{watch.middle(name, 1) / scale:.1f} → {watch.middle(name, 3) / scale:.1f} {unit}".replace(".0 ", " ")
        for name, (unit, scale) in units.items()
    )


async def run(directory: Path, *, ranks: int, flood: int, queued: int, seconds: float, interval: float) -> Report:
    report = Report()
    async with Soak(directory, ranks, queued) as soak:
        await soak.flood(flood, report)
        await soak.mixed(seconds, report, interval)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--flood", type=int, default=100_000)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="transferd-soak-") as directory:
        report = asyncio.run(
            run(Path(directory), ranks=8, flood=options.flood, queued=4096, seconds=60 * options.minutes, interval=1.0)
        )
    where = machine()
    title = f"{where['date']}, {where['cpu']}, {where['cores']} cores shared with other work, Linux {where['kernel']}:"
    print("\n".join([title, *report.lines, *(f"RED: {problem}" for problem in report.problems)]))
    if options.write:
        replace_section(DOCS, "soak", "\n".join(["", title, "", *report.lines, *report.problems, ""]))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
