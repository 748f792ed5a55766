"""What happens when the machine runs out of something: real limits, real file systems, a real daemon.

Each scenario gives its daemon a mount namespace or limits of its own, so nothing on this machine but that
daemon is short of anything, and nothing stays behind when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.machine.faults.cell import Row
from tests.machine.faults.contents import CACHE, DEVICE_BLOCKS, RANKS
from tests.machine.faults.eio import FLAG
from tests.machine.faults.operator import Operator
from tests.machine.faults.world import ROOT
from tests.support.looking import new_stats
from tests.support.waits import until
from transferd import Status, TaskResult, TransferError
from transferd.client import launch
from transferd.client.launch import DaemonProcess
from transferd.runtime.descriptors import raise_limit

START_TIMEOUT_S = 60.0
SERVE_S = 30.0
SMALL_DISK = 8 * 1024**2  # bytes; a task of the whole device is half as large again
SMALL_SHM = 4 * 1024**2  # less than one rank's device memory
FEW_FILES = 2048
TOO_FEW_FILES = 64
CROWD = 9000
REFUSED = "exits and leaves nothing behind"


@dataclass
class Finding:
    """What became of a scenario. told: what the engine, or the operator at start, was told; seconds: until then.

    checked, gone, wrong: keys read back at the end, as in Row; None where no daemon was left to ask.
    """

    told: list[str] = field(default_factory=list)
    seconds: float | None = None
    checked: int | None = None
    gone: int | None = None
    wrong: int | None = None
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.problems.append(otherwise)

    def heard(self, result: TaskResult) -> None:
        code = result.error.code if result.error else ""
        self.told.append(f"{result.status}, {code}" if code else str(result.status))


@dataclass(frozen=True)
class Scenario:
    """One fault, and the row of the table that it fills.

    name, when, fate: for the table. root: it needs to mount, or to drop privileges. compiler: it needs one, for the
    library that it preloads. often: `make test` runs it, too.
    """

    name: str
    when: str
    run: Callable[[Path, Finding], Awaitable[None]]
    root: bool = True
    compiler: bool = False
    often: bool = True
    fate: str = "survives and serves again"

    @property
    def missing(self) -> str:
        """What this machine lacks for it; "" when it can run."""
        if self.root and (os.geteuid() != 0 or shutil.which("unshare") is None):
            return "mounting and dropping privileges need root and util-linux"
        return "there is no C compiler" if self.compiler and shutil.which("gcc") is None else ""


def config(**storage: Any) -> dict[str, dict[str, Any]]:
    return {"cache": dict(CACHE), "host": {"staging": "4MiB"}, "storage": {"model": "faults", **storage}}


def in_own_mounts(script: str) -> list[str]:
    """A prefix: the command in a mount namespace of its own, in which `script` was run first."""
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{script} && exec "$@"', "sh"]


def with_environment(**variables: str) -> list[str]:
    return ["env", f"PYTHONPATH={ROOT}", *(f"{name}={value}" for name, value in variables.items())]


@contextlib.asynccontextmanager
async def serving(
    directory: Path, tree: dict[str, dict[str, Any]], prefix: Sequence[str], finding: Finding, damaged: int = 0
) -> AsyncIterator[tuple[DaemonProcess, Operator]]:
    """A daemon that must still be there at the end, serve, have nothing left over, and stop in good order.

    damaged: objects that it must have found unreadable by then.
    """
    daemon = await asyncio.to_thread(launch.start, tree, directory, prefix=prefix)
    operator = Operator(daemon.endpoint)
    try:
        await operator.open()
        yield daemon, operator
        await operator.served(SERVE_S)
        finding.problems += await operator.left_over(damaged)
        finding.problems += await operator.results_missing()
        row = Row(None)  # type: ignore[arg-type]  # only its counts are wanted
        await operator.read_everything_back(row, SERVE_S)
        finding.problems += row.problems
        finding.checked, finding.gone, finding.wrong = row.checked, row.gone, row.wrong
        finding.expect(row.checked, "nothing was read back")
    finally:
        await operator.close()
        if daemon.process.poll() is not None:
            finding.problems.append(f"the daemon has ended; its log ends:\n{daemon.log[-2000:]}")
        code = await asyncio.to_thread(daemon.stop)
    finding.expect(code == 0, f"the daemon stopped with exit code {code}")


async def refuses_to_start(
    directory: Path, tree: dict[str, dict[str, Any]], prefix: Sequence[str], finding: Finding, words: str
) -> None:
    """A start that ends with one line saying why, exit code 1 or 2, and nothing left behind."""
    before = {path.name for path in Path("/dev/shm").glob("transferd.*")}
    began = time.monotonic()
    daemon = launch.start(tree, directory, prefix=prefix, wait=False)
    code = await asyncio.to_thread(daemon.process.wait, START_TIMEOUT_S)
    finding.seconds = time.monotonic() - began
    lines = [line for line in daemon.log.splitlines() if words in line]
    finding.told = [_problem(line) for line in lines[:1]]
    finding.expect(code in (1, 2), f"exit code {code}")
    finding.expect(len(lines) == 1, f"{len(lines)} lines say {words!r}: {daemon.log[-2000:]}")
    finding.expect("Traceback" not in daemon.log, f"a traceback: {daemon.log[-2000:]}")
    left = {path.name for path in Path("/dev/shm").glob(f"transferd.{daemon.pid}.*")} - before
    finding.expect(not left, f"shared memory left behind: {left}")


def _problem(line: str) -> str:
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        return str(event.get("problem") or event.get("reason") or event["event"])
    return line


# --- the scenarios ----------------------------------------------------------------------------------


def keys_of(name: str, count: int) -> tuple[list[str], list[int]]:
    return [f"{name}-{i}" for i in range(count)], list(range(count))


async def disk_full(directory: Path, finding: Finding) -> None:
    blocks = directory / "blocks"
    blocks.mkdir()
    mounts = in_own_mounts(f"mount -t tmpfs -o size={SMALL_DISK} tmpfs {blocks}")
    async with serving(directory, config(), mounts, finding) as (daemon, operator):
        ballast = Path(f"/proc/{daemon.pid}/root{blocks}/ballast")
        fill(ballast)
        began = time.monotonic()
        refused = await operator.write(*keys_of("refused", 4))
        finding.seconds = time.monotonic() - began
        finding.heard(refused)
        finding.expect(refused.error and refused.error.code == "storage_full", f"a full disk: {refused}")
        ballast.unlink()
        too_much = await operator.write(*keys_of("too-much", DEVICE_BLOCKS))
        finding.heard(too_much)
        codes = {rank.error.code for rank in too_much.ranks if rank.error}
        finding.expect(too_much.block_ids and codes <= {"storage_full"}, f"more than fits, by eviction: {too_much}")


async def others_fill_the_disk(directory: Path, finding: Finding) -> None:
    blocks = directory / "blocks"
    blocks.mkdir()
    mounts = in_own_mounts(f"mount -t tmpfs -o size={4 * SMALL_DISK} tmpfs {blocks}")
    tree = config(file={"path": str(blocks), "reserve": str(SMALL_DISK)})
    async with serving(directory, tree, mounts, finding) as (daemon, operator):
        there = f"/proc/{daemon.pid}/root{blocks}"
        for i in range(4):
            await operator.write(*keys_of(f"before-{i}", DEVICE_BLOCKS))
        began = time.monotonic()
        for number in range(4):
            Path(there, f"theirs-{number}").write_bytes(bytes(SMALL_DISK // 2))
            while (disk := os.statvfs(there)).f_bavail * disk.f_frsize < SMALL_DISK:
                finding.expect(time.monotonic() - began < SERVE_S, "the reserve is not free again")
                if finding.problems:
                    return
                await operator.client.stats()
        finding.seconds = (time.monotonic() - began) / 4
        stats = await new_stats(operator.client)
        finding.told = [one["name"] for one in stats["concerns"] if one["name"].startswith("disk")]
        finding.expect(finding.told == ["disk_nearly_full"], f"concerns: {stats['concerns']}")
        finding.expect(not stats["storage"]["evicted_for"]["medium_full"], "a write met a full disk")
        after = await operator.write(*keys_of("after", 4))
        finding.expect(after.status is Status.OK, f"a write: {after}")


async def out_of_inodes(directory: Path, finding: Finding) -> None:
    blocks = directory / "blocks"
    blocks.mkdir()
    mounts = in_own_mounts(f"mount -t tmpfs -o nr_inodes=200 tmpfs {blocks}")
    async with serving(directory, config(), mounts, finding) as (_, operator):
        began = time.monotonic()
        results = [await operator.write(*keys_of(f"many-{i}", 8)) for i in range(40)]
        finding.seconds = (time.monotonic() - began) / 40
        failed = [result for result in results if result.status is not Status.OK]
        finding.heard(failed[0] if failed else results[-1])
        finding.expect(len(failed) <= 1, f"{len(failed)} of 40 writes found no room: {failed[:2]}")


async def store_removed(directory: Path, finding: Finding) -> None:
    blocks = directory / "blocks"
    async with serving(directory, config(), [], finding) as (daemon, operator):
        await operator.write(*keys_of("before", 4))
        began = time.monotonic()
        # In one step for the daemon: if the files go one by one, it may make the directory anew and lose it once more.
        shutil.rmtree(blocks.rename(directory / "removed"))
        while True:
            written = await operator.write(*keys_of("after", 4))
            finding.expect(time.monotonic() - began < SERVE_S, f"not made anew: {written}")
            if written.status is Status.OK or finding.problems:
                break
            finding.heard(written)
        finding.seconds = time.monotonic() - began
        finding.told = list(dict.fromkeys(finding.told)) or [str(written.status)]
        await until(lambda: "the store is lost" in daemon.log, "no line says that the store is lost")
        lines = [line for line in daemon.log.splitlines() if "the store is lost" in line]
        finding.expect(len(lines) == 1, f"{len(lines)} lines say that the store is lost")


def fill(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


async def read_only(directory: Path, finding: Finding) -> None:
    blocks = directory / "blocks"
    blocks.mkdir()
    mounts = in_own_mounts(f"mount -t tmpfs tmpfs {blocks}")
    async with serving(directory, config(), mounts, finding) as (daemon, operator):
        await operator.write(*keys_of("before", 4))
        remount(daemon, blocks, "ro")
        began = time.monotonic()
        refused = await operator.write(*keys_of("refused", 4))
        finding.seconds = time.monotonic() - began
        finding.heard(refused)
        finding.expect(refused.error and refused.error.code == "storage_read_only", f"a write: {refused}")
        loaded = await operator.read(*keys_of("before", 4))
        finding.heard(loaded)
        finding.expect(loaded.status is Status.OK, f"a read: {loaded}")
        remount(daemon, blocks, "rw")


def remount(daemon: DaemonProcess, path: Path, how: str) -> None:
    command = ["nsenter", "--target", str(daemon.pid), "--mount", "mount", "-o", f"remount,{how}", str(path)]
    subprocess.run(command, check=True, timeout=60)


async def medium_fails(directory: Path, finding: Finding) -> None:
    flag = directory / "eio"
    tree = config(backend="tests.machine.faults.eio:EioFile")
    async with serving(directory, tree, with_environment(**{FLAG: str(flag)}), finding, 4 * RANKS) as (_, operator):
        await operator.write(*keys_of("before", 4))
        flag.touch()
        began = time.monotonic()
        for result in (await operator.write(*keys_of("refused", 4)), await operator.read(*keys_of("before", 4))):
            finding.heard(result)
            finding.expect(result.error and result.error.code == "storage_io", f"on a bad medium: {result}")
        finding.seconds = (time.monotonic() - began) / 2
        flag.unlink()


async def memory_lock(directory: Path, finding: Finding) -> None:
    unprivileged = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]
    prefix = ["prlimit", "--memlock=65536:65536", *(unprivileged if os.geteuid() == 0 else [])]
    async with serving(directory, config(), prefix, finding) as (daemon, operator):
        stats = await new_stats(operator.client)
        await until(lambda: "not pinned" in daemon.log, "there is no warning")
        warnings = [line for line in daemon.log.splitlines() if "not pinned" in line]
        finding.told = stats["degraded"][:1]
        finding.expect("RLIMIT_MEMLOCK" in " ".join(stats["degraded"]), f"degraded: {stats['degraded']}")
        finding.expect(len(warnings) == 1, f"{len(warnings)} warnings: {warnings}")
        began = time.monotonic()
        written = await operator.write(*keys_of("unpinned", 4))
        finding.seconds = time.monotonic() - began
        finding.heard(written)
        finding.expect(written.status is Status.OK, f"a write: {written}")


async def too_few_files(directory: Path, finding: Finding) -> None:
    prefix = ["prlimit", f"--nofile={TOO_FEW_FILES}:{TOO_FEW_FILES}"]
    await refuses_to_start(directory, config(), prefix, finding, "RLIMIT_NOFILE")


async def crowd_of_connections(directory: Path, finding: Finding) -> None:
    prefix = ["prlimit", f"--nofile={FEW_FILES}:{FEW_FILES}"]
    async with serving(directory, config(), prefix, finding) as (daemon, operator):
        await operator.write(*keys_of("before", 4))
        with contextlib.ExitStack() as crowd:
            await asyncio.to_thread(_crowd_in, daemon.endpoint.removeprefix("ipc://"), crowd)
            began = time.monotonic()
            for result in (await operator.write(*keys_of("crowded", 4)), await operator.read(*keys_of("before", 4))):
                finding.heard(result)
                finding.expect(result.status is Status.OK, f"in a crowd: {result}")
            finding.seconds = (time.monotonic() - began) / 2
        await until(lambda: "too_many_connections" in daemon.log, "nobody was refused")


def _crowd_in(path: str, crowd: contextlib.ExitStack) -> None:
    """More connections than the daemon has descriptors, as fast as it accepts them; none says anything."""
    raise_limit()
    for _ in range(CROWD):
        dial = crowd.enter_context(socket.socket(socket.AF_UNIX))
        dial.connect(path)


async def shared_memory_full(directory: Path, finding: Finding) -> None:
    mounts = in_own_mounts(f"mount -t tmpfs -o size={SMALL_SHM} tmpfs /dev/shm")
    await refuses_to_start(directory, config(), mounts, finding, "/dev/shm")


SCENARIOS = [
    Scenario("full disk (ENOSPC)", "running", disk_full),
    Scenario("disk that others fill", "running", others_fill_the_disk),
    Scenario("file system without inodes", "running", out_of_inodes),
    Scenario("removed directory of the store", "running", store_removed, root=False),
    Scenario("file system remounted read-only", "running", read_only),
    Scenario("failing medium (EIO)", "running", medium_fails, root=False),
    Scenario("locked memory limit (RLIMIT_MEMLOCK)", "at start", memory_lock),
    Scenario("more connections than descriptors (RLIMIT_NOFILE)", "running", crowd_of_connections, root=False),
    Scenario("too few descriptors (RLIMIT_NOFILE)", "at start", too_few_files, root=False, fate=REFUSED),
    Scenario("full shared memory", "at start", shared_memory_full, fate=REFUSED),
]


async def run(scenario: Scenario, directory: Path) -> Finding:
    """Play one scenario. Raises nothing for what it finds: that is in `problems`."""
    finding = Finding()
    try:
        await scenario.run(directory, finding)
    except (TimeoutError, RuntimeError, ValueError, OSError, TransferError, subprocess.TimeoutExpired) as error:
        finding.problems.append(f"{type(error).__name__}: {error}")
    return finding
