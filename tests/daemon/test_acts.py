"""Who did what: an act is in the log and in the report once it is done, and not if it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog.testing

from tests.daemon.test_reload import World
from transferd import Client, RequestError, WriteStorageTask
from transferd.client.launch import running
from transferd.daemon.acts import KEPT, Acts
from transferd.daemon.clients import KnownClient
from transferd.observability.report import read
from transferd.wire import protocol as wire

pytestmark = pytest.mark.one_loop


def test_an_act_is_noted_with_all_but_secrets() -> None:
    now = [10.0]
    acts, client = Acts(lambda: now[0]), KnownClient(b"p", 1, 1, 0.0, 0.0, engine_name="e")
    now[0] = 12.0
    with structlog.testing.capture_logs() as lines:
        acts.done(client, wire.Pause("trainer", "a secret"), None)
        acts.done(client, wire.Purge(keys=["a", "b"], older_than=5.0), {"objects": 2, "bytes": 8})
        acts.done(client, wire.Purge(dry_run=True), {"objects": 2})
        acts.done(client, wire.Stats(), {})
    now[0] = 15.0
    newest, first = acts.report()
    assert (first.what, first.wanted, first.engine, first.ago_s) == ("pause", "", "e", 3.0)
    assert (newest.what, newest.wanted) == ("purge", "keys 2, older_than 5.0, dry_run False, shared False")
    assert [line["act"] for line in lines] == ["pause", "purge"]
    assert (lines[1]["objects"], lines[1]["by"]["client"]) == (2, "p")
    assert "a secret" not in str(lines)


def test_few_are_kept() -> None:
    acts = Acts(lambda: 0.0)
    for number in range(2 * KEPT):
        acts.noted("reload", str(number))
    assert [one.wanted for one in acts.report()][:2] == ["39", "38"]
    assert len(acts.report()) == KEPT


async def test_a_refused_reload_is_a_concern_until_one_succeeds() -> None:
    world = World()
    world.tree["log"] = {"level": "loud"}
    world.reload()
    report = world.daemon.report()
    assert report.reload_refused.startswith("log.level: expected one of")
    assert "reload_refused" in [one.name for one in report.concerns]
    assert report.acts == []
    del world.tree["log"]
    world.reload()
    report = world.daemon.report()
    assert report.reload_refused == ""
    assert "reload_refused" not in [one.name for one in report.concerns]
    assert report.acts[0].what == "reload"


async def test_a_real_daemon_says_who_purged_and_paused(tmp_path: Path) -> None:
    cache = {"ranks": 1, "device_blocks": 8, "host_blocks": 0}
    with running({"cache": cache, "storage": {"backend": "memory"}}, tmp_path) as process:
        async with Client(process.endpoint) as client:
            await client.attach(0)
            await client.submit(WriteStorageTask(task_id="w", keys=["k"], gpu_block_ids=[1]))
            await client.pause()
            held = read(await client.stats())
            await client.resume()
            await client.purge()
            with pytest.raises(RequestError):
                await client.drain_level("memory")
            report = read(await client.stats())
    assert [one.what for one in report.acts] == ["purge", "resume", "pause"]
    assert all(one.uid is not None and one.pid for one in report.acts)
    assert [(one.what, one.engine) for one in held.held] == [("pause", "default")]
    assert held.engines["default"].paused
