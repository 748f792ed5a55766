"""Each concern, produced for real: its line in `stats`, its metric, and its end where its cause can end here.

test_concerns.py has disk_full, event_loop_late, held and refused; test_mooncake_faults.py storage_silent.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_concerns import attached, named
from tests.support.sabotage import FILE_VARIABLE, Saboteur
from tests.support.slow_store import let_wait
from tests.support.waits import stats_until, wait_until
from transferd import Client, Engine, ReadStorageTask, Status, SwapOutTask, SyncClient, WriteStorageTask
from transferd.cli.pool.master import free_port
from transferd.client.launch import running, spawn
from transferd.observability.concerns import CONCERNS

pytestmark = pytest.mark.one_loop

CACHE = {"ranks": 1, "device_blocks": 64, "host_blocks": 0}
ELSEWHERE = {  # which test produces it
    "disk_failed": "tests/storage/test_disks.py",
    "disk_full": "test_concerns.py",
    "disk_failing": "tests/machine/faults, with a library that fails reads",
    "disk_nearly_full": "test_store_left_alone.py",
    "store_full": "test_store_left_alone.py",
    "disk_read_only": "test_store_left_alone.py",
    "objects_gone": "test_store_left_alone.py",
    "files_stuck": "test_store_left_alone.py",
    "store_lost": "test_store_left_alone.py",
    "event_loop_late": "test_concerns.py",
    "held": "test_concerns.py",
    "refused": "test_concerns.py",
    "storage_silent": "test_mooncake_faults.py",
    "level_silent": "test_levels.py",
    "level_refuses": "test_spoilt_bucket.py",
    "level_drained": "tests/cli/test_golden_screens.py, by a report",
    "copies_given_up": "tests/cli/test_golden_screens.py, by a report",
    "tasks_refused": "tests/cli/test_golden_screens.py, by a report",
    "reload_refused": "tests/daemon/test_acts.py",
    "link_spoils": "test_spoilt_bucket.py",
    "node_down": "tests/machine/rack/test_partition.py",
    "under_replicated": "tests/machine/rack/test_placement.py",
    "copies_missing": "tests/machine/rack/test_mending.py",
    "not_ready": "tests/daemon/test_hung_devices.py",
    "rank_died": "tests/machine/faults",
    "internal_errors": "tests/observability/test_concerns.py, by a report: it takes a bug",
}
HERE: dict[str, Callable[[Path], None]] = {}


def produces(test: Callable[[Path], None]) -> Callable[[Path], None]:
    HERE[test.__name__.removeprefix("test_")] = test
    return test


class Sick:
    """A daemon with metrics, and a look at one concern of it."""

    def __init__(self, directory: Path, **tree: Any) -> None:
        self.port = free_port()
        self.tree = {"cache": CACHE, "storage": {"backend": "memory"}} | tree
        self.tree |= {"metrics": {"listen": f"127.0.0.1:{self.port}"}}
        self.directory = directory

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        (value,) = [
            line.split()[-1] for line in text.splitlines() if line.startswith(f'transferd_concern{{concern="{name}"')
        ]
        return float(value)

    def has(self, client: SyncClient, name: str, *, within: float = 60) -> str:
        """Wait for the concern in `stats`; look at its metric and its remedy. Returns its text."""
        wait_until(lambda: name in named(client), name, within=within)
        found = named(client)[name]
        assert self.metric(name) == 1.0
        assert found["action"] == CONCERNS[name].remedy
        assert found["for_s"] >= 0
        return str(found["text"])

    def over(self, client: SyncClient, name: str) -> None:
        wait_until(lambda: name not in named(client), name, within=90)
        assert self.metric(name) == 0.0


def slow(directory: Path, seconds: float) -> tuple[Path, dict[str, Any]]:
    file = directory / "seconds"
    let_wait(file, seconds)
    return file, {"backend": "tests.support.slow_store:SlowStore", "model": str(file)}


def write(name: str, timeout: float = 60.0) -> WriteStorageTask:
    return WriteStorageTask(task_id=name, keys=[name], gpu_block_ids=[1], timeout=timeout)


@produces
def test_storage_slow(tmp_path: Path) -> None:
    _, storage = slow(tmp_path, 1.2)
    sick = Sick(tmp_path, storage=storage)
    with running(sick.tree, tmp_path) as process, attached(process) as client:
        assert client.submit(write("w")).status is Status.OK
        waited = re.search(r"waited (\d+(?:\.\d+)?) ?s", sick.has(client, "storage_slow"))
        assert waited is not None
        assert float(waited[1]) >= 1.0, "longer, if the machine stood still meanwhile"


@produces
def test_straggling(tmp_path: Path) -> None:
    """A copy hangs: its task is answered, and still occupies its blocks. Then it ends, and so does the concern."""
    cache = {"ranks": 1, "device_blocks": 8, "host_blocks": 8, "device": "tests.support.sabotage:SabotagedDevice"}
    sick = Sick(tmp_path, cache=cache)
    prefix = ["env", f"{FILE_VARIABLE}={tmp_path / 'order'}"]
    with running(sick.tree, tmp_path, prefix=prefix) as process, attached(process) as client:
        saboteur, numbers = Saboteur(tmp_path / "order"), itertools.count()
        with saboteur.order("copy_out", rank=0, how="stall"):
            while not saboteur.stalls:  # a deadline may pass before the copy has begun
                swap = SwapOutTask(task_id=f"s{next(numbers)}", gpu_block_ids=[1], cpu_block_ids=[1], timeout=0.3)
                assert client.submit(swap).status is Status.EXPIRED
            assert "still occupy blocks" in sick.has(client, "straggling")
        sick.over(client, "straggling")


@produces
def test_deadlines_missed(tmp_path: Path) -> None:
    sick = Sick(tmp_path)
    with running(sick.tree, tmp_path) as process, attached(process) as client:
        client.pause()
        assert client.submit(write("w", timeout=0.2)).status is Status.EXPIRED
        client.resume()
        assert "1 tasks missed" in sick.has(client, "deadlines_missed")


@produces
def test_task_hangs(tmp_path: Path) -> None:
    file, storage = slow(tmp_path, 600.0)
    sick = Sick(tmp_path, storage=storage)
    with running(sick.tree, tmp_path) as process, attached(process) as client:

        async def push() -> None:
            async with Client(process.endpoint) as other:
                await other.attach(0)
                pending = asyncio.ensure_future(other.submit(write("the slow one", timeout=600.0)))
                text = await asyncio.to_thread(sick.has, client, "task_hangs")
                assert "'the slow one' of engine 'default' waits for rank 0" in text
                let_wait(file, 0)
                assert (await pending).status is Status.OK

        asyncio.run(push())
        sick.over(client, "task_hangs")


@produces
def test_stopping(tmp_path: Path) -> None:
    file, storage = slow(tmp_path, 600.0)
    sick = Sick(tmp_path, storage=storage)
    sick.tree["server"] = {"shutdown_timeout": 120.0}
    with running(sick.tree, tmp_path) as process, attached(process) as client:

        async def push() -> None:
            async with Client(process.endpoint) as other:
                await other.attach(0)
                pending = asyncio.ensure_future(other.submit(write("w", timeout=100.0)))
                await stats_until(other, lambda stats: stats["running"])
                process.signal(signal.SIGTERM)
                await asyncio.to_thread(sick.has, client, "stopping")
                let_wait(file, 0)
                assert (await pending).status is Status.OK

        asyncio.run(push())


@produces
def test_storage_corrupt(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks"
    sick = Sick(tmp_path, storage={"backend": "file", "file": {"path": str(blocks), "capacity": "1GiB"}})
    with running(sick.tree, tmp_path) as process, attached(process) as client:
        assert client.submit(write("w")).status is Status.OK
        (file,) = [path for path in (blocks / "objects").rglob("*") if path.is_file()]
        with file.open("r+b") as bytes_:
            bytes_.seek(100)
            bytes_.write(b"damage")
        read = client.submit(ReadStorageTask(task_id="r", keys=["w"], gpu_block_ids=[2]))
        assert read.status is Status.MISS, read
        assert "1 damaged objects" in sick.has(client, "storage_corrupt")


@produces
def test_storage_errors(tmp_path: Path) -> None:
    """The disk becomes read-only, as a kernel makes one that fails; then a person mends it."""
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    mounts = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {blocks} && exec "$@"', "sh"]
    sick = Sick(tmp_path, storage={"backend": "file", "file": {"path": str(blocks), "capacity": "1MiB"}})
    with running(sick.tree, tmp_path, prefix=mounts) as process, attached(process) as client:
        remount = ["nsenter", "--mount", "--target", str(process.pid), "mount", "-o"]
        subprocess.run([*remount, "remount,ro", blocks], check=True)
        assert client.submit(write("w")).error is not None
        sick.has(client, "storage_errors")
        subprocess.run([*remount, "remount,rw", blocks], check=True)
        assert client.submit(write("x")).error is None


@produces
def test_cache_cleared(tmp_path: Path) -> None:
    sick = Sick(tmp_path)
    with running(sick.tree, tmp_path) as process, attached(process) as client:
        client.clear_cache()
        sick.has(client, "cache_cleared")
        client.restore_cache(generation="step-1")
        sick.over(client, "cache_cleared")


@produces
def test_no_memory(tmp_path: Path) -> None:
    sick = Sick(tmp_path, cache=CACHE | {"ownership": "attach"})
    sick.tree["server"] = {"endpoint": f"ipc://{tmp_path}/daemon.sock"}
    process = spawn(sick.tree, tmp_path)
    try:
        with SyncClient(f"ipc://{tmp_path}/daemon.sock", await_ready=False, connect_timeout=60) as client:
            assert "rank 0 without memory" in sick.has(client, "no_memory")
    finally:
        process.stop()


@produces
def test_not_attached(tmp_path: Path) -> None:
    sick = Sick(tmp_path)
    with running(sick.tree, tmp_path) as process, SyncClient(process.endpoint) as client:
        assert client.submit(write("w")).status is Status.REJECTED
        assert "rank 0" in sick.has(client, "not_attached")
        client.attach(0)
        sick.over(client, "not_attached")
        with SyncClient(process.endpoint) as looks:
            client.close()
            wait_until(lambda: looks.stats()["cache"]["unmapped"] == [0], "the engine has left")
            assert "not_attached" not in named(looks)
            looks.submit(write("next"))
            assert "rank 0" in sick.has(looks, "not_attached")


@produces
def test_engine_not_ready(tmp_path: Path) -> None:
    sick = Sick(tmp_path)
    del sick.tree["cache"]
    layout = {"layers": 2, "kv_heads": 2, "head_dim": 64, "block_size": 16, "device_blocks": 16}
    with running(sick.tree, tmp_path) as process, SyncClient(process.endpoint, await_ready=False) as looker:

        async def engine() -> None:
            async with Client(process.endpoint, engine="half-born", await_ready=False) as client:
                await client.register(Engine(ranks=1, model="m", layout=layout))
                text = await asyncio.to_thread(sick.has, looker, "engine_not_ready")
                assert "'half-born' is connected and not ready: " in text

        asyncio.run(engine())
        sick.over(looker, "engine_not_ready")


@produces
def test_degraded(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give up CAP_IPC_LOCK")
    poor = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=65536"]
    sick = Sick(tmp_path, cache=CACHE | {"host_blocks": 64})
    with running(sick.tree, tmp_path, prefix=poor) as process, attached(process) as client:
        assert "is not pinned" in sick.has(client, "degraded")


@produces
def test_log_dropped(tmp_path: Path) -> None:
    """The log goes to a disk that is full."""
    sick = Sick(tmp_path)
    full = ["sh", "-c", 'exec "$@" 2>/dev/full', "sh"]
    with running(sick.tree, tmp_path, prefix=full) as process, attached(process) as client:
        assert "log lines were lost" in sick.has(client, "log_dropped")


def test_each_concern_has_its_test() -> None:
    assert set(CONCERNS) - set(HERE) - set(ELSEWHERE) == set()
    assert not set(HERE) & set(ELSEWHERE)
