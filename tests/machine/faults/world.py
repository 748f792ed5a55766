"""The processes that faults happen to: master, segment owner, daemon, engine. All real, each with its own pid.

Beside them lives one that no fault is for, the bystander.

    runner ── operator (a client of its own)
       │            │
    keeper ◀─gates─ daemon ── Mooncake ── master
       │            │            └──────── segment owner (lends all the memory; the daemon lends none)
       ├───gates─── engine
       └───gates─── bystander: a second engine

A world lives through many cells: what died is started again, what did not die goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.machine.faults.contents import BLOCK_BYTES, CACHE
from tests.machine.faults.gates import MODEL, VARIABLE
from tests.machine.faults.keeper import Keeper
from transferd.blocks.formats import FOOTER_BYTES
from transferd.cli.pool.local import Lender, Master
from transferd.client import launch
from transferd.client.launch import DaemonProcess
from transferd.tiers.staging import SLOT_ALIGNMENT

ROOT = Path(__file__).resolve().parents[3]
SEGMENT_BYTES = 192 * 1024**2
START_TIMEOUT_S = 30.0
CLIENT_TIMEOUT_S = 2.5
DEADLINE_SLACK_S = 1.0
CHUNK_BLOCKS = 2
PAUSE_S = 0.1  # between rounds of the bystander: it is there to be disturbed, not to load the machine
_SLOT_BYTES = -(-(BLOCK_BYTES + FOOTER_BYTES) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def config(backend: str, master: Master | None) -> dict[str, dict[str, Any]]:
    """Small timeouts, so that a cell takes seconds; staging so small that a task of six blocks has three chunks."""
    storage: dict[str, Any] = {"backend": "tests.machine.faults.gates:GatedFile"}
    if master is not None:
        pool = {"master_server_addr": master.address, "global_segment_size": 0, "local_buffer_size": "16MiB"}
        pool |= {"timeout": 1.0, "probe_interval": 0.2, "connect_timeout": 30.0}
        storage = {"backend": "tests.machine.faults.gates:GatedMooncake", "mooncake": pool}
    return {
        "server": {"client_timeout": CLIENT_TIMEOUT_S, "deadline_slack": DEADLINE_SLACK_S},
        "cache": CACHE | {"device": "tests.machine.faults.gates:GatedShm"},
        "host": {"staging": 2 * 2 * CHUNK_BLOCKS * _SLOT_BYTES},  # two consumers, two chunks each
        "storage": storage | {"model": MODEL},
    }


class World:
    """Owns all of its processes from `open` to `close`."""

    def __init__(self, directory: Path, backend: str) -> None:
        self.directory = directory
        self.backend = backend
        self.keeper = Keeper(directory / "gates.sock")
        self.master = Master(directory / "master.log") if backend == "mooncake" else None
        self.owner = None if self.master is None else Lender(self.master, SEGMENT_BYTES, directory / "owner.log")
        self.daemon: DaemonProcess | None = None
        self.engine: subprocess.Popen[bytes] | None = None
        self.journal = directory / "journal"
        self.bystander: subprocess.Popen[bytes] | None = None
        self.rounds = directory / "bystander.jsonl"
        self._engines = 0

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.directory / 'daemon.sock'}"

    async def open(self) -> None:
        await self.keeper.open()
        for victim in ("mooncake_master", "segment owner", "daemon", "engine"):
            await self.start(victim)
        self.rounds.touch()
        self.bystander = self._spawn("tests.machine.faults.bystander", self.rounds, str(PAUSE_S), "bystander:")

    async def close(self) -> None:
        """Stop everything; the daemon in good order. Raises RuntimeError when it does not end with exit code 0."""
        self.keeper.let_go()
        self._end(self.engine)
        if self.bystander is not None:
            await asyncio.to_thread(self._dismiss, self.bystander)
        code = 0 if self.daemon is None else await asyncio.to_thread(self.daemon.stop)
        for process in (self.owner, self.master):
            if process is not None:
                process.stop()
        await self.keeper.close()
        if code != 0:
            raise RuntimeError(f"the daemon stopped with exit code {code}; its log ends:\n{self.log_end()}")

    def log_end(self) -> str:
        return "" if self.daemon is None else self.daemon.log[-4000:]

    # --- each of them -------------------------------------------------------------------------------

    async def start(self, victim: str) -> None:
        """Start one process, or start it again after its death. Nothing to do for a pool that is not there."""
        if victim == "engine":
            self._start_engine()
        elif victim == "daemon":
            tree = config(self.backend, self.master)
            self.daemon = await asyncio.to_thread(launch.start, tree, self.directory, prefix=self._environment())
        else:
            process = self.master if victim == "mooncake_master" else self.owner
            if process is not None:
                await asyncio.to_thread(process.start)

    def _environment(self) -> list[str]:
        """A prefix that gives a process its gates, and executes it in its own pid."""
        return ["env", f"PYTHONPATH={ROOT}", f"{VARIABLE}={self.keeper.path}"]

    def _start_engine(self) -> None:
        self._engines += 1
        self.journal = self.directory / f"engine-{self._engines}.jsonl"
        self.journal.touch()
        self.engine = self._spawn("tests.machine.faults.engine", self.journal)

    def _spawn(self, module: str, journal: Path, *more: str) -> subprocess.Popen[bytes]:
        """A client's process. Its standard input stays open for as long as we live, or want it to."""
        command = [*self._environment(), sys.executable, "-m", module, self.endpoint, str(journal), *more]
        with (self.directory / "engine.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def _dismiss(self, process: subprocess.Popen[bytes]) -> None:
        """Ask it to end, by closing its standard input, and make sure of it."""
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(START_TIMEOUT_S)
        self._end(process)

    def _end(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    # --- what is done to them -----------------------------------------------------------------------

    def pid(self, victim: str) -> int:
        process = {"engine": self.engine, "daemon": self.daemon, "mooncake_master": self.master}.get(victim, self.owner)
        assert process is not None, f"there is no {victim}"
        return process.pid

    async def kill(self, victim: str) -> None:
        """SIGKILL, and wait until it is gone."""
        if victim == "engine":
            self._end(self.engine)
        elif victim == "daemon":
            assert self.daemon is not None
            self.daemon.kill()
        else:
            process = self.master if victim == "mooncake_master" else self.owner
            assert process is not None
            await asyncio.to_thread(process.stop)

    def shared_memory_of(self, pid: int) -> list[str]:
        return sorted(path.name for path in Path("/dev/shm").glob(f"transferd.{pid}.*"))

    def half_files(self) -> list[str]:
        """Temporary files in the file backend's directory."""
        return sorted(path.name for path in (self.directory / "blocks").rglob("*.tmp"))
