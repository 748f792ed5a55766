"""Lists of tasks and clients: the right rows in the right order, bounded, and safe on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cli.conftest import NASTY, transferd
from transferd import SwapOutTask, SyncClient
from transferd.cli.tasks_view import tasks_table, where
from transferd.client.launch import DaemonProcess
from transferd.errors import RequestError

pytestmark = pytest.mark.one_loop


def test_recent_tasks_are_the_newest_first_and_say_where_their_time_went(engine: SyncClient) -> None:
    rows = [row for row in engine.tasks() if row["status"] in ("ok", "miss")]
    assert [row["task_id"] for row in rows][-3:] == ["read-2", "read-1", NASTY]
    write = rows[-1]
    assert (write["kind"], write["status"], write["blocks"], write["done"]) == ("write", "ok", 1, 1)
    assert write["bytes"] == 2 * engine.stats()["layout"]["block_bytes"]
    assert write["seconds"] >= write["storage_s"] > 0
    assert write["ended_s"] > 0
    assert (write["waits_for"], write["ranks"]) == ("", [])


def test_slow_tasks_are_the_slowest_first(engine: SyncClient) -> None:
    seconds = [row["seconds"] for row in engine.tasks("slow")]
    assert len(seconds) >= 3
    assert seconds == sorted(seconds, reverse=True)


def test_failed_tasks_are_also_those_that_were_refused(engine: SyncClient) -> None:
    (row,) = [row for row in engine.tasks("failed") if row["task_id"] == "swap-1"]
    assert (row["kind"], row["status"], row["code"]) == ("", "rejected", "id_out_of_range")


def test_answers_are_bounded(engine: SyncClient) -> None:
    assert len(engine.tasks("recent", 2)) == 2
    assert len(engine.tasks("slow", 1)) == 1
    assert len(engine.clients(1)) == 1
    for limit in (0, 1001):
        with pytest.raises(RequestError, match="Expected `int`"):
            engine.tasks("recent", limit)


def test_a_task_that_waits_says_for_what(engine: SyncClient) -> None:
    engine.pause()
    try:
        first = engine.push(SwapOutTask(task_id="held-1", gpu_block_ids=[1], cpu_block_ids=[1]))
        second = engine.push(SwapOutTask(task_id="held-2", gpu_block_ids=[2], cpu_block_ids=[1]))
        rows = engine.tasks("running")
        assert [row["task_id"] for row in rows] == ["held-1", "held-2"]
        assert [row["status"] for row in rows] == ["queued", "queued"]
        assert [row["waits_for"] for row in rows] == ["resume", "1 tasks before it on its blocks"]
        assert rows[0]["seconds"] > 0
        assert {row["task_id"] for row in engine.tasks("slow")} >= {"held-1", "held-2"}
        (me,) = [row for row in engine.clients() if row["tasks"]]
        assert (me["pid"], me["uid"], me["tasks"], me["observer"]) == (os.getpid(), os.geteuid(), 2, False)
        assert me["connected_s"] >= me["silent_s"] >= 0
    finally:
        engine.resume()
    assert [first.result(30).status, second.result(30).status] == ["ok", "ok"]
    assert engine.tasks("running") == []


def test_the_commands_print_tables_and_json(daemon: DaemonProcess, engine: SyncClient) -> None:
    env = os.environ | {"TRANSFERD_ENDPOINT": daemon.endpoint}
    rows = json.loads(transferd("tasks", "--failed", "--format", "json", env=env).stdout)
    assert "swap-1" in {row["task_id"] for row in rows}
    listed = transferd("tasks", "--slow", env=env)
    assert listed.returncode == 0
    assert "evil" in listed.stdout
    assert "\x1b" not in listed.stdout
    assert all(re.match(r"\S", line) for line in listed.stdout.splitlines()), "a line a row, none of them wrapped"
    assert transferd("tasks", "--running", env=env).stdout == "no matching tasks\n"
    assert f"pid {os.getpid()}" in transferd("clients", env=env).stdout.replace("\n", " ")
    assert transferd("tasks", "--running", "--engine", "default", env=env).stdout == "no matching tasks\n"
    for command in (["tasks"], ["clients"], ["top", "--once"]):
        unknown = transferd(*command, "--engine", "defualt", env=env)
        assert (unknown.returncode, unknown.stdout) == (1, "")
        assert "no engine 'defualt'; there are: default" in unknown.stderr
    both = transferd("tasks", "--slow", "--failed", env=env)
    assert (both.returncode, both.stderr.count("\n")) == (2, 1)


def test_a_recording_that_cannot_begin_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    down = transferd("record", str(file), "--seconds", "0", "--endpoint", f"ipc://{tmp_path}/none")
    assert (down.returncode, "no daemon answered" in down.stderr) == (1, True)
    assert not file.exists()


def test_a_recording_overwrites_nothing(daemon: DaemonProcess, engine: SyncClient, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("mine")
    refused = transferd("record", str(file), "--seconds", "0", "--endpoint", daemon.endpoint)
    assert (refused.returncode, "File exists" in refused.stderr, file.read_text()) == (1, True, "mine")


def test_names_from_clients_are_printed_escaped(engine: SyncClient) -> None:
    out = io.StringIO()
    Console(file=out, width=200, highlight=False).print(tasks_table(engine.tasks()))
    assert r"evil\x1b[2J\n[red]task" in out.getvalue()


def test_ranks_that_are_waited_for_are_named_with_their_step() -> None:
    row: dict[str, Any] = {"waits_for": "rank 1 fetch", "ended_s": None, "code": "", "problem": ""}
    assert where(row) == "waits for rank 1 fetch"
