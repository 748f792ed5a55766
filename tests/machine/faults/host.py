"""What happens when the host goes wrong under a running daemon: its log, threads, memory, clock and disk.

As in resources.py, nothing on this machine but that daemon is short of anything. Limits and full file systems are
real; a thread refused, a call that hangs or takes long and a clock that is stepped come from a library under the
daemon's C library (tests/support/native), armed while it runs. Each scenario checks that its fault has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import re
import resource
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from tests.machine.faults import resources
from tests.machine.faults.cell import BUSY_S, TASK_TIMEOUT_S
from tests.machine.faults.identity import IDENTITY_SCENARIOS
from tests.machine.faults.levels import LEVEL_SCENARIOS
from tests.machine.faults.operator import Operator
from tests.machine.faults.resources import REFUSED, Finding, Scenario, config, in_own_mounts, refuses_to_start, serving
from tests.machine.faults.stores import STORE_SCENARIOS
from tests.machine.faults.world import DEADLINE_SLACK_S
from tests.support import native
from tests.support.fifo import Fifo
from tests.support.looking import new_stats
from tests.support.native.page import HANGS, SLOW, FaultPage
from transferd import Client, Status, TaskResult, WriteStorageTask
from transferd.client import launch
from transferd.client.launch import DaemonProcess
from transferd.daemon.process import STILL_RUNNING
from transferd.errors import OutOfMemory
from transferd.runtime import compat

OBJECTS = "/objects/"  # of a path of the file store
READS_AND_WRITES = "pread,pwrite"
TASK_BLOCKS = 4
HUNG_TIMEOUT_S = 1.0  # of a task whose storage calls hang
SHUTDOWN_TIMEOUT_S = 4.0
SMALL_LOG = 64 * 1024
SLOW_MS = 50
DAY_S = 24 * 3600
LARGE_KEY = 400_000  # characters; a task of 24 such keys is a message of 9.6 MB
ROOM = 14_000_000  # bytes that a daemon may still have when its limit falls: for the message, not for its keys


class Load:
    """Tasks before, during and after a fault. Each must have its result in time, and claim what is so."""

    def __init__(self, operator: Operator, finding: Finding) -> None:
        self._operator = operator
        self._finding = finding
        self.statuses: Counter[str] = Counter()

    async def prepare(self) -> None:
        """Store what is read later."""
        self._expect_all_ok([await self._operator.write(*_before(number)) for number in range(3)])

    async def storm(self, name: str, timeout: float = TASK_TIMEOUT_S) -> list[TaskResult]:
        """Three writes and three reads at once. Raises TimeoutError when one has no result in time."""
        operator, began = self._operator, time.monotonic()
        writes = [([f"{name}-{n}-{i}" for i in range(TASK_BLOCKS)], _blocks(n)) for n in range(3)]
        reads = [(_before(n)[0], _blocks(n + 3)) for n in range(3)]
        async with compat.timeout(timeout + DEADLINE_SLACK_S + BUSY_S):
            results = await asyncio.gather(
                *(operator.write(*task, timeout=timeout) for task in writes),
                *(operator.read(*task, timeout=timeout) for task in reads),
            )
        self._finding.seconds = max(self._finding.seconds or 0.0, time.monotonic() - began)
        for result, task in zip(results[3:], reads, strict=True):
            wrong = operator.wrong_blocks(result, *task)
            self._finding.expect(not wrong, f"{result.task_id} claims blocks that hold something else: {wrong}")
        self.note(results)
        return results

    async def all_ok(self, name: str) -> None:
        """A storm in which nothing may fail."""
        self._expect_all_ok(await self.storm(name))

    def _expect_all_ok(self, results: list[TaskResult]) -> None:
        bad = [result for result in results if result.status is not Status.OK]
        self._finding.expect(not bad, f"not ok: {bad}")

    def note(self, results: list[TaskResult]) -> None:
        """Into the table: how many tasks were told what."""
        for result in results:
            code = result.error.code if result.error else ""
            self.statuses[f"{result.status}, {code}" if code and code != result.status else str(result.status)] += 1
        self._finding.told = [f"{count} {status}" for status, count in sorted(self.statuses.items())]


def _before(number: int) -> tuple[list[str], list[int]]:
    return [f"before-{number}-{i}" for i in range(TASK_BLOCKS)], _blocks(number)


def _blocks(number: int) -> list[int]:
    return list(range(number * TASK_BLOCKS, (number + 1) * TASK_BLOCKS))


@contextlib.asynccontextmanager
async def loaded(
    directory: Path, finding: Finding, prefix: list[str], damaged: int = 0
) -> AsyncIterator[tuple[DaemonProcess, Operator, Load]]:
    """`serving`, with something stored."""
    async with serving(directory, config(), prefix, finding, damaged) as (daemon, operator):
        load = Load(operator, finding)
        await load.prepare()
        yield daemon, operator, load


async def _log_something(operator: Operator) -> None:
    """Tasks that expire at once: each is a line, until their kind is too frequent."""
    for number in range(8):
        await operator.write([f"expired-{number}"], [0], timeout=1e-9)


# --- the log --------------------------------------------------------------------------------------


def _stderr(target: Path) -> list[str]:
    return ["sh", "-c", f'exec "$@" 2>>{target}', "sh"]


async def log_dead(directory: Path, finding: Finding) -> None:
    fifo = Fifo(directory / "stderr")
    async with loaded(directory, finding, _stderr(fifo.path)) as (_, operator, load):
        fifo.die()
        await _log_something(operator)
        await load.all_ok("during")
        async with compat.timeout(TASK_TIMEOUT_S):  # a thread of the daemon writes, and counts what it could not
            while not (lost := (await new_stats(operator.client))["log_dropped"]):
                pass
        finding.told.append(f"{lost} lines lost")


async def log_stalled(directory: Path, finding: Finding) -> None:
    fifo = Fifo(directory / "stderr")
    async with loaded(directory, finding, _stderr(fifo.path)) as (_, operator, load):
        fifo.fill()
        await _log_something(operator)
        await load.all_ok("during")
        finding.expect(fifo.full, "the log was read")
    fifo.die()  # only now: the stop had a reader that sleeps, too


async def log_full(directory: Path, finding: Finding) -> None:
    logs = directory / "logs"
    logs.mkdir()
    mount = f"mount -t tmpfs -o size={SMALL_LOG} tmpfs {logs}"
    async with loaded(directory, finding, [*in_own_mounts(mount), *_stderr(logs / "log")]) as (daemon, operator, load):
        inside = Path(f"/proc/{daemon.pid}/root{logs}")
        resources.fill(inside / "ballast")
        while (await operator.client.stats())["log_dropped"] == 0:  # what was left of the log's last page fills up
            await _log_something(operator)
        await load.all_ok("during")
        (inside / "ballast").unlink()
        before = (inside / "log").stat().st_size
        async with compat.timeout(TASK_TIMEOUT_S):
            while (inside / "log").stat().st_size == before:
                await _log_something(operator)
        lines = (inside / "log").read_text().splitlines()
        finding.expect(json.loads(lines[-1])["event"], "the line after the full disk is spoilt")


# --- threads and memory ---------------------------------------------------------------------------


async def threads_out(directory: Path, finding: Finding) -> None:
    page = FaultPage(directory / "page")
    async with loaded(directory, finding, page.prefix) as (daemon, operator, load):
        with page.armed("pthread_create", errno.EAGAIN):
            for number in range(3):
                await load.all_ok(f"during-{number}")
            daemon.signal(signal.SIGHUP)  # a reload, a dump and new clients want none either
            daemon.signal(signal.SIGUSR1)
            async with Client(daemon.endpoint) as another:
                await another.ping()
            await operator.served(TASK_TIMEOUT_S)
        finding.told.append(f"{page.hits} threads requested")


async def no_threads_at_start(directory: Path, finding: Finding) -> None:
    await refuses_to_start(directory, config(), native.under(f"pthread_create:3:-1:{errno.EAGAIN}"), finding, "thread")


async def memory_limit(directory: Path, finding: Finding) -> None:
    async with loaded(directory, finding, []) as (daemon, operator, load):
        await load.all_ok("warm")
        # The limit counts what may be written to. RLIMIT_AS would count 64 MiB of address space for each thread's heap,
        # which the daemon could go on using.
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_DATA)
        resource.prlimit(daemon.pid, resource.RLIMIT_DATA, (_private_bytes(daemon) + ROOM, hard))
        try:
            for number in range(3):
                large, _ = await asyncio.gather(_large_write(operator, number), load.storm(f"during-{number}"))
                load.note([large])
                code = large.error.code if large.error else ""
                finding.expect((large.status, code) == (Status.FAILED, "out_of_memory"), f"a large task: {large}")
            try:
                await operator.client.match([f"{number:0{LARGE_KEY}d}" for number in range(TASK_BLOCKS * 6)])
                finding.problems.append("there was memory for a large match")
            except OutOfMemory:
                pass
        finally:
            resource.prlimit(daemon.pid, resource.RLIMIT_DATA, (hard, hard))
        after = await _large_write(operator, 3)
        operator.submitted += 1  # this one was admitted
        finding.expect(after.status is Status.OK, f"the same with memory: {after}")
        await load.all_ok("after")


async def _large_write(operator: Operator, number: int) -> TaskResult:
    """A task whose keys are larger than the memory that is left, and whose message is not."""
    blocks = list(range(TASK_BLOCKS * 6))
    keys = [f"large-{number}-{block}".ljust(LARGE_KEY, "k") for block in blocks]
    task = WriteStorageTask(task_id=f"large-{number}", keys=keys, gpu_block_ids=blocks, timeout=TASK_TIMEOUT_S)
    async with compat.timeout(TASK_TIMEOUT_S + DEADLINE_SLACK_S + BUSY_S):
        return await operator.client.submit(task)


def _private_bytes(daemon: DaemonProcess) -> int:
    found = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{daemon.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# --- storage and time -----------------------------------------------------------------------------


async def storage_hung(directory: Path, finding: Finding) -> None:
    page = FaultPage(directory / "page")
    async with loaded(directory, finding, page.prefix) as (_, operator, load):
        with page.armed(READS_AND_WRITES, HANGS, path=OBJECTS):
            hung = await load.storm("during", HUNG_TIMEOUT_S)
            bad = [r for r in hung if r.status not in (Status.EXPIRED, Status.PARTIAL, Status.FAILED)]
            finding.expect(not bad, f"nothing was moved, and yet: {bad}")
            await operator.client.stats()  # the loop is free
            finding.expect(page.hits, "no call hung")


async def storage_never_returns(directory: Path, finding: Finding) -> None:
    page = FaultPage(directory / "page")
    tree = config() | {"server": {"shutdown_timeout": SHUTDOWN_TIMEOUT_S, "deadline_slack": DEADLINE_SLACK_S}}
    daemon = await asyncio.to_thread(launch.start, tree, directory, prefix=page.prefix)
    operator = Operator(daemon.endpoint)
    try:
        await operator.open()
        load = Load(operator, finding)
        await load.prepare()
        with page.armed(READS_AND_WRITES, HANGS, path=OBJECTS):
            await load.storm("during", HUNG_TIMEOUT_S)
            began = time.monotonic()
            code = await asyncio.to_thread(daemon.stop)
            finding.seconds = time.monotonic() - began
        finding.expect(code == STILL_RUNNING, f"the daemon stopped with exit code {code}")
        finding.expect(finding.seconds < SHUTDOWN_TIMEOUT_S + BUSY_S, f"it took {finding.seconds:.1f} s to stop")
        finding.expect('"hanging"' in daemon.log, "nobody says what hung")
    finally:
        await operator.close()
        if daemon.process.poll() is None:
            daemon.kill()
    left = sorted(path.name for path in Path("/dev/shm").glob(f"transferd.{daemon.pid}.*"))
    finding.expect(not left, f"shared memory left behind: {left}")
    async with serving(directory, config(), [], finding) as (_, after):  # on the same store
        after.expect([f"before-{n}-{i}" for n in range(3) for i in range(TASK_BLOCKS)])


async def wall_clock_stepped(directory: Path, finding: Finding) -> None:
    page = FaultPage(directory / "page")
    async with loaded(directory, finding, page.prefix) as (daemon, operator, load):
        for step in (DAY_S, -DAY_S, 400 * DAY_S, 0):
            uptime = (await operator.client.stats())["uptime_s"]
            storm = asyncio.ensure_future(load.all_ok(f"during-{step}"))
            await asyncio.sleep(0)  # it is under way when the clock is stepped
            page.step_wall(step)
            await storm
            await load.all_ok(f"after-{step}")
            await _log_something(operator)
            finding.expect((await operator.client.stats())["uptime_s"] >= uptime, "time went backwards")
        await operator.client.drain()
        await operator.client.resume()
        days = sorted({json.loads(line)["ts"][:10] for line in daemon.log.splitlines()})
        finding.expect(page.wall_reads and len(days) > 2, f"the daemon saw no other time: {days}")


async def disk_slow(directory: Path, finding: Finding) -> None:
    page = FaultPage(directory / "page")
    async with loaded(directory, finding, page.prefix) as (_, operator, load):
        with page.armed(READS_AND_WRITES, SLOW, path=OBJECTS, delay_ms=SLOW_MS):
            await load.all_ok("patient")
            impatient = await load.storm("impatient", SLOW_MS / 1250)
            bad = [r for r in impatient if r.status not in (Status.EXPIRED, Status.PARTIAL)]
            finding.expect(not bad, f"with less time than one call takes: {bad}")
            await operator.client.stats()
            finding.expect(page.hits, "no call was slow")


# A compiled library between the daemon and libc makes the fault: no root is needed.
interposed = functools.partial(Scenario, root=False, compiler=True)

HOST_SCENARIOS = [
    Scenario("log whose reader has died (EPIPE)", "running", log_dead, root=False),
    Scenario("log whose reader is stopped", "running", log_stalled, root=False, often=False),
    Scenario("log on a full disk (ENOSPC)", "running", log_full, often=False),
    interposed("no threads left (pthread_create: EAGAIN)", "running", threads_out),
    interposed(
        "no threads left (pthread_create: EAGAIN)",
        "at start",
        no_threads_at_start,
        often=False,
        fate=REFUSED,
    ),
    Scenario("memory limit (RLIMIT_DATA)", "running", memory_limit, root=False),
    interposed("storage calls hang, then return", "running", storage_hung),
    interposed(
        "storage calls never return",
        "during a stop",
        storage_never_returns,
        often=False,
        fate="exits in time with code 3; its successor serves",
    ),
    interposed("wall clock steps, both ways", "running", wall_clock_stepped),
    interposed("slow disk (50 ms more per call)", "running", disk_slow, often=False),
]
ALL_SCENARIOS = [*resources.SCENARIOS, *STORE_SCENARIOS, *LEVEL_SCENARIOS, *HOST_SCENARIOS, *IDENTITY_SCENARIOS]
