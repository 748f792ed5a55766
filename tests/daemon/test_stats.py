"""The report of a daemon with engines: of each what is its own, of all together the sums, and plain data."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.daemon.test_engines import running, serving
from tests.integration.own_memory import write
from tests.support.waits import until
from transferd import Status
from transferd.daemon.engine import HostedEngine
from transferd.daemon.stats import report_of
from transferd.runtime.loop_turns import finished
from transferd.runtime.version import VERSION
from transferd.tasks import ErrorInfo

CACHE = {"ranks": 2, "layers": 1, "kv_heads": 1, "head_dim": 8, "block_size": 4, "device_blocks": 4, "host_blocks": 4}


async def test_without_an_engine_the_report_says_so_and_counts_nothing(tmp_path: Path) -> None:
    async with running(f"ipc://{tmp_path}/s") as daemon:
        told = daemon.stats()
    assert (told["version"], told["pid"], told["boot_id"]) == (VERSION, os.getpid(), daemon.boot_id)
    assert (told["engines"], told["ranks"], told["layout"], told["configured"]) == ({}, [], {}, {})
    assert (told["queued"], told["running"], told["memory"]["device_cache"]) == (0, 0, 0)


async def test_engines_have_rows_of_their_own_and_the_daemon_their_sums(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    async with running(endpoint, cache=CACHE) as daemon, serving(endpoint, "a", ranks=1) as (one, _):
        for number in range(3):
            assert (await one.submit(write(f"w{number}", [f"k{number}"], [number]))).status is Status.OK
        told = daemon.stats()
    assert told["engines"].keys() == {"default", "a"}
    assert sum(engine["tasks"].get("ok", 0) for engine in told["engines"].values()) == told["tasks"]["ok"] == 3
    assert told["engines"]["default"]["tasks"].get("ok", 0) == 0
    assert [rank["engine"] for rank in told["ranks"]] == ["default", "default", "a"]
    assert told["layout"]["fingerprint"] == daemon.default.layout.fingerprint
    assert told["staging"]["used"] == 0
    assert told["staging"]["capacity"] == told["memory"]["staging"] >= 3 * 64 * 1024
    assert told["storage"]["objects"] == 3
    assert json.loads(json.dumps(told)) == told


async def test_counts_of_an_engine_that_left_stay_in_the_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    endpoint = f"ipc://{tmp_path}/s"
    async with running(endpoint) as daemon:
        async with serving(endpoint, "a") as (one, _):
            monkeypatch.setattr(daemon.tasks, "ended", broken)
            assert (await one.submit(write("w", ["k"], [0]))).status is Status.OK
            before = daemon.stats()
            await one.unregister()
        await daemon.engines.settled()
        told = daemon.stats()
    assert told["engines"] == {}
    assert told["tasks"]["ok"] == 1
    assert told["effects_failed"] == before["effects_failed"] == {"Publish": 1}
    assert told["barrier"] == before["barrier"]
    assert told["barrier"]["completed"] == 1


async def test_an_engine_that_leaves_while_a_report_is_made_counts_once(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    async with running(endpoint) as daemon:
        async with serving(endpoint, "a") as (one, _):
            assert (await one.submit(write("w", ["k"], [0]))).status is Status.OK
            assert (await one.submit(write("x", ["k"], [99]))).status is Status.REJECTED
            work = report_of(daemon)
            next(work)
            await one.unregister()
        await daemon.engines.settled()
        report = finished(work)
        after = daemon.report()
    assert (report.tasks, report.rejects, report.barrier) == (after.tasks, after.rejects, after.barrier)
    assert (report.tasks["ok"], report.totals.done, report.lanes["write"].done) == (1, 1, 1)


async def test_counts_of_an_engine_stay_when_the_last_one_of_its_name_leaves_after_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, end = asyncio.Event(), HostedEngine.end

    async def late(engine: HostedEngine, why: ErrorInfo) -> None:
        await gate.wait()
        await end(engine, why)

    monkeypatch.setattr(HostedEngine, "end", late)
    endpoint = f"ipc://{tmp_path}/s"
    async with running(endpoint) as daemon:
        async with serving(endpoint, "e"):
            pass
        await until(lambda: daemon.engines.get("e") is None, "its name is free")
        async with serving(endpoint, "e") as (again, _):
            assert await again.exists(["k"]) == [False]
            before = daemon.stats()["engines"]["e"]
            assert (before["misses"], before["missed_for"]) == (1, {"never_stored": 1})
            assert daemon.stats()["engines_leaving"] == 1
            gate.set()
            await daemon.engines.settled()
            after = daemon.stats()["engines"]["e"]
            assert (after["misses"], after["missed_for"]) == (before["misses"], before["missed_for"])
