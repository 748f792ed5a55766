"""Two engines name their tasks as they like: no story, list or dump takes one engine's task for another's."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.integration.caches import attached_sync
from tests.support.waits import wait_until
from transferd import Engine, Pages, Status, SyncClient, WriteStorageTask
from transferd.cli.pool.master import free_port
from transferd.client.launch import running
from transferd.observability.dump_file import read_dump

CACHE = {"ranks": 1, "layers": 2, "kv_heads": 1, "head_dim": 16, "block_size": 8, "device_blocks": 8, "host_blocks": 0}
ENGINE = Engine(ranks=1, model="m", layout=Pages(layers=1, page_bytes=64, blocks=8, identity="test"))
# What the default engine calls its tasks: among them what earlier versions made of another engine's.
NAMES = ["[b] t1", "t1", "b t1", "b/t1", "[default] t1", "('b', 't1')"]


def write(task_id: str) -> WriteStorageTask:
    return WriteStorageTask(task_id=task_id, keys=[f"key of {task_id}"], gpu_block_ids=[0])


def events(story: dict[str, Any]) -> set[str]:
    return {event["what"] for life in story["lives"] for event in life["events"]}


def test_tasks_of_two_engines_have_stories_of_their_own(tmp_path: Path) -> None:
    url = f"127.0.0.1:{free_port()}"
    tree = {"cache": CACHE, "storage": {"backend": "memory"}, "metrics": {"listen": url}}
    with (
        running(tree, tmp_path) as daemon,
        attached_sync(daemon.endpoint) as own,
        SyncClient(daemon.endpoint, engine="b", await_ready=False) as other,
    ):
        other.register(ENGINE)
        refused = str(other.submit(write("t1")).status)  # it has no memory yet
        for name in NAMES:
            assert own.submit(write(name)).status is Status.OK
            bad = own.submit(WriteStorageTask(task_id=f"bad {name}", keys=["k"], gpu_block_ids=[99]))
            assert bad.error is not None
            assert bad.error.code == "id_out_of_range"
        rows = own.tasks("failed", limit=100)
        assert {(row["engine"], row["task_id"]) for row in rows} == {
            ("b", "t1"), *(("default", f"bad {name}") for name in NAMES)
        }  # fmt: skip
        assert [row["task_id"] for row in own.tasks("failed", engine="b")] == ["t1"]

        def page(task_id: str, engine: str = "default") -> dict[str, Any]:
            query = urlencode({"task": task_id, "engine": engine})
            with urllib.request.urlopen(f"http://{url}/explain?{query}", timeout=30) as answer:
                story: dict[str, Any] = json.load(answer)
                return story

        daemon.signal(signal.SIGUSR1)
        directory = tmp_path / "flight"
        wait_until(lambda: list(directory.glob("flight-*.jsonl")), "no dump")
        for story_of in (own.explain, page, read_dump(directory).story):
            theirs = story_of("t1", "b")
            assert (theirs["engine"], theirs["task_id"], events(theirs)) == ("b", "t1", {refused})
            for name in NAMES:
                ours = story_of(name, "default")
                assert (ours["engine"], ours["task_id"], len(ours["lives"])) == ("default", name, 1)
                assert events(ours) == {"admitted", "from", "started", "done"}


def test_a_stranger_adds_nothing_to_the_story_of_a_task(tmp_path: Path) -> None:
    """A client that speaks for no engine may name any engine and any task in a bad message."""
    with (
        running({"cache": CACHE, "storage": {"backend": "memory"}}, tmp_path) as daemon,
        attached_sync(daemon.endpoint) as own,
    ):
        assert own.submit(write("t1")).status is Status.OK
        before = own.explain("t1")["lives"][0]["events"]
        with SyncClient(daemon.endpoint, engine="nobody", await_ready=False) as stranger:
            answer = stranger.submit(write("t1"))
            assert answer.error is not None
            assert answer.error.code == "unknown_engine"
        assert own.explain("t1")["lives"][0]["events"] == before
