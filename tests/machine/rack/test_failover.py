"""The master that leads dies under load, and another one takes over: a real etcd, two masters, three nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine.rack.engine import engine
from tests.machine.rack.lab import MASTER, WHOLE, Lab, LabMaster, laboratory
from tests.machine.rack.test_leaving import CHAINS, PATIENCE_S, command, share_that_matches
from tests.support.waits import stats_until, until
from transferd import Status
from transferd.cli.pool.master import master_command, master_executable
from transferd.errors import StorageUnavailable

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)"),
    pytest.mark.one_loop,
]
ETCD = f"{MASTER}:2379"


class OneOfTwo(LabMaster):
    """A master of several, on the switch as well. oplog: whether the next leader knows what this one knew."""

    def __init__(self, lab: Lab, number: int, *, oplog: bool) -> None:
        super().__init__(lab.directory / f"master{number}.log", lab.master.prefix)
        self.port, self.metrics_port = 50060 + number, 9060 + number
        self._oplog = oplog

    def _command(self) -> list[str]:
        line = master_command(MASTER, self.port, self.metrics_port, etcd=ETCD)
        return [*self.prefix, *(part for part in line if self._oplog or part != "--enable_oplog=true")]

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(json.loads(self._page("/health")))
        return False

    @property
    def serves(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(json.loads(self._page("/health"))["service_ready"])
        return False


@contextlib.contextmanager
def etcd(lab: Lab) -> Iterator[None]:
    data = ["--data-dir", str(lab.directory / "etcd")]
    client = ["--listen-client-urls", f"http://{ETCD}", "--advertise-client-urls", f"http://{ETCD}"]
    with (lab.directory / "etcd.log").open("wb") as log:
        process = subprocess.Popen([*lab.master.prefix, "etcd", *data, *client], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


CASES = {"memory mooncake": (("memory", "mooncake"), True), "alone": ((), True), "alone, without the log": ((), False)}
FEW = len(CASES) if WHOLE else 1  # each takes half a minute


@pytest.mark.parametrize(("levels", "oplog"), list(CASES.values())[:FEW], ids=list(CASES)[:FEW])
async def test_a_failover_under_load_costs_seconds_and_no_block_that_the_masters_share(
    tmp_path: Path, levels: tuple[str, ...], oplog: bool
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=3))
        stack.enter_context(etcd(lab))
        first = stack.enter_context(OneOfTwo(lab, 1, oplog=oplog))
        await until(lambda: first.serves, "it leads", within=60)
        second = stack.enter_context(OneOfTwo(lab, 2, oplog=oplog))
        pages = f"{MASTER}:{first.metrics_port},{MASTER}:{second.metrics_port}"
        pool: dict[str, Any] = {
            "master_server_addr": f"etcd://{ETCD}",
            "master_pages": pages,
            "global_segment_size": "512MiB",  # room for a minute of load, also when a node is drained
        }
        processes = [lab.daemon(number, levels=levels, **pool) for number in (1, 2, 3)]
        await until(lambda: len(first.segments()) == 3, "three nodes", within=60)
        writer, reader, other = [await stack.enter_async_context(engine(process)) for process in processes]
        for chain in CHAINS[:3]:
            await writer.until_stored(chain)
        if levels:
            await stats_until(writer.client, lambda report: not pending(report))
        assert await share_that_matches(reader, CHAINS[:3], PATIENCE_S if levels else 0.0) == 1.0
        code, report = command(processes[0], "drain")
        assert (code, report["left"]) == (0, 0), "by the pages of the one that leads"

        writer.timeout = 10.0 if levels else 4.0  # a write to memory takes none, unless the machine stands still
        first.stop()
        killed, statuses, content, worst = time.monotonic(), [], 5000, 0.0
        while True:  # load, until a hand-over through the pool works again
            written = await writer.write([content])
            worst = max(worst, writer.took)
            statuses.append(written.status)
            with contextlib.suppress(StorageUnavailable):  # the other node has yet to find the new master
                if written.status is Status.OK and await other.matches([content]) == 1:
                    break
            assert time.monotonic() - killed < 60, (written, second._page("/health"))
            content += 1
            await asyncio.sleep(0.1)
        took = time.monotonic() - killed
        await until(lambda: len(second.segments()) == 3, "the nodes are known again", within=60)
        share = await share_that_matches(other, CHAINS[:3], PATIENCE_S if levels else 0.0)
        print(f"{levels or 'alone'}, log {oplog}: works again after {took:.1f} s, the slowest write {worst:.1f} s,")
        print(f"  {statuses.count(Status.OK)} of {len(statuses)} writes ok, {share:.2f} of the blocks match")
        assert worst < writer.timeout + 6
        assert share == (1.0 if oplog else 0.0)
        if levels:
            assert set(statuses) == {Status.OK}
            await stats_until(writer.client, lambda report: not pending(report))  # else more comes while it drains
        for process in processes[:2]:  # the pages follow
            code, report = command(process, "drain")
            assert (code, report["left"], report["why"]) == (0, 0, "")


def pending(report: dict[str, object]) -> bool:
    storage = report["storage"]
    assert isinstance(storage, dict)
    return any(level["pending_bytes"] for level in storage["levels"])
