"""`transferd replay --simulate` against the real thing: the same trace on the same sizes has the same hits."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.integration.storing_engine import Storing
from tests.machine.faults.resources import in_own_mounts
from transferd import Client, SyncClient
from transferd.cli.replay.command import run
from transferd.cli.replay.engine import ReplayEngine, Tiers
from transferd.cli.replay.own import settings
from transferd.cli.replay.predicted import GivenLevel, predict
from transferd.cli.replay.sizing import DISK_BLOCK
from transferd.cli.replay.trace import TraceRequest, generated_workload
from transferd.client.launch import DaemonProcess, running
from transferd.config import from_tree
from transferd.config.toml import to_toml
from transferd.daemon.preflight import build_engine
from transferd.storage.levels.stack import TOUCH_S
from transferd.storage.room import disk_for
from transferd.tasks import Task, TaskResult

pytestmark = pytest.mark.one_loop

SHARED_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
GEOMETRY = {"layers": 2, "kv_heads": 1, "head_dim": 16, "block_size": 16, "ranks": 2}


def really(
    tmp_path: Path, requests: list[TraceRequest], device: int, host: int, capacity: int | None
) -> tuple[dict[str, int], int]:
    """Hits and blocks written of a real replay, one request at a time; capacity in objects of a rank."""
    cache = GEOMETRY | {"device_blocks": device, "host_blocks": host}
    tree: dict[str, Any] = {"server": {"endpoint": "ipc:///nowhere"}, "cache": cache, "storage": {"backend": "none"}}
    if capacity is not None:
        tree["storage"] = {"backend": "file", "file": {"path": str(tmp_path / "unused")}}
        # A disk counts whole blocks.
        nbytes = -(-build_engine(from_tree(tree)).objects.slot_bytes // DISK_BLOCK) * DISK_BLOCK
        tree["storage"]["file"]["capacity"] = capacity * 2 * nbytes
    config = tmp_path / "replayed.toml"
    config.write_text(to_toml(tree))
    report = run(requests, endpoint=None, config=config, ranks=None, concurrency=1, quiet=True)
    assert report.verify_failures == 0
    return dict(report.hits), report.blocks_written


@pytest.mark.parametrize(
    ("device", "host", "capacity"),
    [
        (48, 24, 1000),
        (48, 24, 120),
        (48, 0, 60),
        (20, 60, 30),
        (48, 24, None),
        (16, 0, 1),
    ],
    ids=lambda value: str(value),
)
def test_predicted_hits_are_those_of_a_real_replay(
    device: int, host: int, capacity: int | None, tmp_path: Path
) -> None:
    requests = generated_workload(21, 120)
    levels = [] if capacity is None else [GivenLevel(capacity)]
    predicted, _ = predict(requests, Tiers(device, host, storage=capacity is not None), levels)
    hits, written = really(tmp_path, requests, device, host, capacity)
    assert (dict(predicted.hits), predicted.blocks_written) == (hits, written)
    assert hits["none"] < sum(hits.values())


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the conversation trace is not on this machine")
def test_predicted_hits_of_real_traffic_are_those_of_a_real_replay(tmp_path: Path) -> None:
    from transferd.cli.replay.trace import read_trace

    requests = read_trace(SHARED_TRACE, 500)
    predicted, _ = predict(requests, Tiers(200, 200, storage=True), [GivenLevel(5000)])
    assert (dict(predicted.hits), predicted.blocks_written) == really(tmp_path, requests, 200, 200, 5000)
    assert predicted.hits["storage"] > 0


OBJECTS = GEOMETRY | {
    "layers": 8,
    "head_dim": 128,
}  # large ones, so that what else a daemon has on its disk is less than one
TIERS = {"device_blocks": 24, "host_blocks": 0}


def replayed(daemon: DaemonProcess, requests: list[TraceRequest]) -> tuple[dict[str, int], int]:
    """Hits and blocks written of a real replay against a running daemon."""
    report = run(requests, endpoint=daemon.endpoint, config=None, ranks=None, concurrency=1, quiet=True)
    assert (report.mismatches, report.errors) == ([], [])
    return dict(report.hits), report.blocks_written


def of_a_store(path: Path, **sections: Any) -> dict[str, Any]:
    """A daemon of large objects with a file store at this path."""
    file = {"path": str(path)} | sections.pop("file", {})
    storage = {"backend": "file", "file": file} | sections.pop("storage", {})
    return {"cache": OBJECTS | TIERS, "storage": storage} | sections


def stored_bytes(tree: dict[str, Any]) -> int:
    """What one block takes on the disk, all ranks together."""
    slot = build_engine(from_tree(tree)).objects.slot_bytes
    return -(-slot // DISK_BLOCK) * DISK_BLOCK * int(OBJECTS["ranks"])


def test_predicted_hits_of_second_use_are_those_of_a_real_replay(tmp_path: Path) -> None:
    requests = generated_workload(21, 120)
    tree = of_a_store(tmp_path / "blocks", storage={"admit": "second use"})
    tree["storage"]["file"]["capacity"] = 60 * stored_bytes(tree)
    window = from_tree(tree).storage.admit_window
    predicted, _ = predict(requests, Tiers(24, 0, storage=True), [GivenLevel(60)], window)
    everything, _ = predict(requests, Tiers(24, 0, storage=True), [GivenLevel(60)])
    with running(tree, tmp_path) as daemon:
        assert (dict(predicted.hits), predicted.blocks_written) == replayed(daemon, requests)
    assert 0 < predicted.blocks_written < everything.blocks_written
    assert predicted.hits["storage"] > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("holds", [30, 90])
def test_a_disk_of_the_predicted_size_has_the_predicted_hits(holds: int, tmp_path: Path) -> None:
    """The store may have far more than its disk holds, so the reserve alone decides."""
    requests = generated_workload(21, 120)
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    tree = of_a_store(blocks, file={"capacity": "1GiB", "reserve": "4MiB"})
    capacity = holds * stored_bytes(tree)
    disk = disk_for(capacity, from_tree(tree).storage.file.reserve) + stored_bytes(tree) // 2
    mounts = in_own_mounts(f"mount -t tmpfs -o size={disk} tmpfs {blocks}")
    predicted, _ = predict(requests, Tiers(24, 0, storage=True), [GivenLevel(holds)])
    with running(tree, tmp_path, prefix=mounts) as daemon, SyncClient(daemon.endpoint) as client:
        assert (dict(predicted.hits), predicted.blocks_written) == replayed(daemon, requests)
        storage = client.stats()["storage"]
        assert storage["evicted_for"]["reserve"] + storage["evicted_for"]["capacity"] > 0
        assert storage["evicted_for"]["medium_full"] == 0
        assert storage["disks"][0]["free"] >= 4 * 2**20
    assert predicted.hits["storage"] > 0


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_predicted_hits_within_a_share_are_those_beside_an_engine_that_fills_the_store(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = generated_workload(21, 60)
    tree = of_a_store(tmp_path / "blocks", engines={"storage_share": share})
    tree["storage"]["file"] |= {"capacity": 160 * stored_bytes(tree), "reserve": "0%"}
    predicted, _ = predict(requests, Tiers(24, 0, storage=True), [GivenLevel(int(share * 160))])
    alone, _ = predict(requests, Tiers(24, 0, storage=True), [GivenLevel(160)])
    names = itertools.count()
    with running(tree, tmp_path) as daemon, Storing(daemon.endpoint, "filler", storage_share=0.0) as filler:

        class BesideAFiller(ReplayEngine):
            async def request(self, request: TraceRequest) -> None:
                await super().request(request)
                filler.write([f"f{next(names)}" for _ in range(60)])  # more bytes than the store has

        monkeypatch.setattr("transferd.cli.replay.command.ReplayEngine", BesideAFiller)
        assert (dict(predicted.hits), predicted.blocks_written) == replayed(daemon, requests)
    assert 0 < predicted.hits["storage"] < alone.hits["storage"]


class SettledBetweenTasks(ReplayEngine):
    """An engine that waits before each task until nothing moves between the levels: as an engine with time to spare."""

    async def _submit(self, task: Task) -> TaskResult:
        await self._settle()
        return await super()._submit(task)

    async def _match(self, keys: list[str]) -> int:
        await self._settle()
        return await super()._match(keys)

    async def _settle(self) -> None:
        client = self._client
        assert isinstance(client, Client)
        while any(row["pending_bytes"] for row in (await client.stats())["storage"]["levels"]):
            pass
        await asyncio.sleep(TOUCH_S)  # then the daemon's own timer, which began before, has run out as well
        await client.stats()
        await client.stats()  # the step after it has run what the timer began


def test_predicted_hits_of_each_level_are_those_of_a_real_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, ranks = generated_workload(21, 50), GEOMETRY["ranks"]
    tree: dict[str, Any] = {"cache": GEOMETRY | {"device_blocks": 24, "host_blocks": 0}}
    tree["storage"] = {"levels": ["memory", "file"], "memory": {}, "file": {"path": str(tmp_path / "blocks")}}
    slot = build_engine(from_tree(tree)).objects.slot_bytes
    tree["storage"]["memory"]["capacity"] = 30 * slot * ranks
    tree["storage"]["file"] |= {"capacity": 70 * ranks * -(-slot // DISK_BLOCK) * DISK_BLOCK, "reserve": "0%"}
    predicted, wanted = predict(requests, Tiers(24, 0, storage=True), [GivenLevel(30), GivenLevel(70, 2)])
    monkeypatch.setattr("transferd.cli.replay.command.ReplayEngine", SettledBetweenTasks)
    with running(tree, tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        assert (dict(predicted.hits), predicted.blocks_written) == replayed(daemon, requests)
        rows = client.stats()["storage"]["levels"]
    assert [(row["hits"], row["promoted"], row["objects"], row["evictions"]) for row in rows] == [
        (
            ranks * level.hits,
            ranks * level.promoted,
            ranks * level.objects,
            ranks * (level.written - level.objects),
        )
        for level in wanted.figures()
    ]
    assert all(level.hits and level.written > level.objects for level in wanted.figures())
    assert wanted.figures()[0].promoted


LEVELS = """
[cache]
layers = 4
kv_heads = 2
head_dim = 64
block_size = 64
device_blocks = 512

[storage]
levels = ["memory", "file"]

[storage.memory]
capacity = "64MiB"
"""


def test_the_command_predicts_a_store_in_levels(tmp_path: Path) -> None:
    trace, config = tmp_path / "trace.jsonl", tmp_path / "levels.toml"
    lines = (json.dumps({"hash_ids": request.hash_ids}) for request in generated_workload(3, 80))
    trace.write_text("\n".join(lines))
    config.write_text(LEVELS)
    wanted = ["replay", trace, "--simulate", "--config", config]
    sizes = ["--storage-sizes", "0+1GB,64MiB+1GB", "--load-rates", "10GB,9GB,1GB"]
    done = transferd(*wanted, *sizes, "--format", "json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert tree["rates"]["storage"] == {"memory": 9e9, "file": 1e9}
    alone, both = tree["points"]
    assert [level["nbytes"] for level in both["levels"]] == [64 * 2**20, 10**9]
    assert (alone["levels"][0]["hit_rate"], alone["levels"][0]["written"]) == (0, 0)
    assert both["levels"][0]["hit_rate"] > 0
    for point in (alone, both):
        assert sum(level["hit_rate"] for level in point["levels"]) == pytest.approx(point["hit_rate"]["storage"])
        assert point["storage_written"] == sum(level["written"] for level in point["levels"])
    assert both["load_s"] < alone["load_s"], "memory is faster"
    told = transferd(*wanted, *sizes)
    assert "from memory" in told.stdout
    measured = transferd(*wanted, "--storage-sizes", "64MiB+1GB", "--format", "json")
    assert measured.returncode == 0, measured.stderr
    assert all(rate > 0 for rate in json.loads(measured.stdout)["rates"]["storage"].values())
    for bad, said in (
        (["--storage-sizes", "1GB", *sizes[2:]], "--storage-sizes 1GB: expected a size for each level, memory + file"),
        (["--load-rates", "1GB,1GB"], "--load-rates 1GB,1GB: expected the rates host,memory,file"),
    ):
        assert said in " ".join(transferd(*wanted, *bad).stderr.split())


def transferd(*arguments: object) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRANSFERD_")}
    command = [sys.executable, "-m", "transferd", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=clean)


def test_the_command_prints_sizes_and_draws_them(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = (json.dumps({"hash_ids": request.hash_ids}) for request in generated_workload(3, 80))
    trace.write_text("\n".join(lines))
    chart = tmp_path / "sizes.svg"
    wanted = ["--load-rates", "10GB,1GB", "--host-sizes", "0,64MiB", "--prefill-rate", 5000, "--chart", chart]
    done = transferd("replay", trace, "--simulate", *wanted, "--format", "json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert tree["rates"] == {"host": 10e9, "storage": 1e9, "prefill": 5000.0}
    by_host: dict[int, list[float]] = {}
    for point in tree["points"]:
        assert sum(point["hit_rate"].values()) == pytest.approx(1.0)
        by_host.setdefault(point["host_bytes"], []).append(point["hit_rate"]["none"])
    assert sorted(by_host) == [0, 64 * 2**20]
    assert all(computed[0] > computed[-1] for computed in by_host.values()), "the whole trace stored spares prefill"
    drawn = ET.parse(chart).getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    told = transferd("replay", trace, "--simulate", *wanted)
    assert "where blocks come from" in told.stdout
    assert "saved" in told.stdout


def test_rates_are_measured_where_none_are_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [1, 2, 3]}\n')
    done = transferd("replay", trace, "--simulate", "--storage-sizes", "0,1GB", "--format", "json")
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout)["rates"]
    assert rates["host"] > 0
    assert rates["storage"] > 0
    assert settings(None, None, {}, blocks=7)["cache"]["host_blocks"] == 7


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--load-rates", "10GB"], "--load-rates 10GB: expected the rates host,storage, such as 40GB,5GB"),
        (["--load-rates", "10GB,0"], "--load-rates 10GB,0: expected the rates host,storage, such as 40GB,5GB"),
        (["--load-rates", "1GB,1GB", "--storage-sizes", "much"], "--storage-sizes much: expected a size"),
        (
            ["--load-rates", "1GB,1GB", "--chart", "/nowhere/at/all.svg"],
            "--chart /nowhere/at/all.svg: cannot be written",
        ),
    ],
)
def test_a_bad_option_is_one_line(arguments: list[str], told: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n')
    done = transferd("replay", trace, "--simulate", *arguments)
    assert done.returncode != 0
    assert told in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
