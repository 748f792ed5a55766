"""The same rows once more under NVIDIA's MPS: what copies and an engine cost each other there, and what they share.

Each row starts an MPS of its own and a run of its own beside it, and ends both, however the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.machine.gpu.machine import Failed, Found, Machine, Verdict, within
from tests.machine.gpu.results import CHECKS as CHECKS_FILE
from tests.machine.gpu.results import rows_in
from transferd.runtime.compat import wait_for

CONTROL = "nvidia-cuda-mps-control"
RUN_S = 110.0
SHARED = (
    "an_engine_maps_the_daemons_cache",
    "a_copy_waits_for_the_engines_kernels",
    "the_daemon_maps_the_engines_cache",
    "a_rank_that_is_behind_is_waited_for",
    "two_streams_do_not_wait_for_each_other",
    "a_pending_wait_costs_the_engine_nothing",
)


class NoMps(Exception):
    """MPS does not run here; the message says why."""


@asynccontextmanager
async def _mps(machine: Machine, name: str) -> AsyncIterator[tuple[dict[str, str], Path]]:
    """An MPS of our own: the environment that makes processes its clients, and its directory."""
    if shutil.which(CONTROL) is None:
        raise NoMps(f"there is no {CONTROL} here")
    directory = machine.work / "mps" / name
    directory.mkdir(parents=True)
    env = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}
    said = directory / "said"
    with said.open("wb") as to:  # no pipe: the daemon that it leaves behind would keep it open
        start = [CONTROL, "-d"]
        started = await asyncio.to_thread(subprocess.run, start, env=env, stdout=to, stderr=to, check=False, timeout=30)
    if started.returncode:
        raise NoMps(f"MPS does not start here: {said.read_text().strip()}")
    try:
        yield env, directory
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            quit_ = [CONTROL]
            await asyncio.to_thread(subprocess.run, quit_, input=b"quit\n", env=env, check=False, timeout=30)


async def _rows_under_mps(machine: Machine, name: str, rows: tuple[str, ...]) -> list[dict[str, Any]]:
    """What these rows find under MPS, in a run whose whole family is gone at the end."""
    async with _mps(machine, name) as (env, directory):
        module = ["-m", "tests.support.cuda.abi"] if machine.fake else ["-m"]
        again = [
            sys.executable,
            *module,
            "tests.machine.gpu.check",
            "--only",
            ",".join(rows),
            "--device",
            str(machine.index),
        ]
        again += ["--results", str(directory / "found"), "--limit", str(RUN_S - 10), "--seed", str(machine.seed)]
        process = await asyncio.create_subprocess_exec(
            *again, env=env, stdout=sys.stderr.fileno(), start_new_session=True
        )
        try:
            code = await within(process.wait(), "the run under MPS", RUN_S)
        finally:
            for kill in (signal.SIGTERM, signal.SIGKILL):  # after SIGTERM it ends its worker, a group of its own
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, kill)
                    with contextlib.suppress(TimeoutError):
                        await wait_for(process.wait(), 5)
        found = rows_in(directory / "found" / CHECKS_FILE)
    if not found:
        raise Failed(f"the run under MPS ended with exit code {code}; what it said is above")
    return found


async def a_busy_neighbour_under_mps(machine: Machine) -> Found:
    """a_busy_neighbour under MPS."""
    try:
        row = (await _rows_under_mps(machine, "busy", ("a_busy_neighbour",)))[0]
    except NoMps as reason:
        return Found(str(reason), "skipped")
    return Found(row["note"], row["verdict"], row["figures"])


async def events_and_timelines_under_mps(machine: Machine) -> Found:
    """Memory by IPC both ways, events and timelines between clients of MPS, and what a pending wait costs there."""
    try:
        rows = await _rows_under_mps(machine, "shared", SHARED)
    except NoMps as reason:
        return Found(str(reason), "skipped")
    by_name = {row["name"]: row["verdict"] for row in rows}
    missing = [name for name in SHARED if by_name.get(name, "skipped") == "skipped"]
    wrong = "wrong" in by_name.values()
    told = "; ".join(f"{row['check']}: {row['verdict']}, {' '.join(row['note'].split())}" for row in rows)
    verdict: Verdict = "wrong" if wrong else "skipped" if missing else "right"
    return Found(told, verdict, {row["name"]: row["figures"] | {"verdict": row["verdict"]} for row in rows})


CHECKS = (a_busy_neighbour_under_mps, events_and_timelines_under_mps)
