"""`transferd restart-check`: what a restart would lose decides the verdict, and `--wait` outwaits what ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hung_files import HANGS, HungFiles
from tests.support.slow_store import let_wait
from tests.support.waits import wait_until
from transferd import Client, ReadStorageTask, SyncClient, WriteStorageTask
from transferd.cli import main as cli
from transferd.cli import restart_check
from transferd.cli.restart_check import LOSES, SAFE, WAIT, rows, verdict
from transferd.client.launch import DaemonProcess, running
from transferd.observability import logs
from transferd.observability.report import LevelReport, Report, StorageReport
from transferd.wire.answers import AtRestart

pytestmark = pytest.mark.one_loop

FOREVER = 3600


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For how many seconds the store lets each call wait."""
    path = tmp_path_factory.mktemp("slow") / "seconds"
    let_wait(path, 0)
    return path


@pytest.fixture(scope="module")
def daemon(waits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    tree = {
        "cache": {"ranks": 1, "device_blocks": 8, "host_blocks": 0},
        "storage": {"backend": "tests.support.slow_store:SlowStore", "model": str(waits)},
    }
    with running(tree, tmp_path_factory.mktemp("restart")) as process:
        yield process


class Check:
    """Runs the command in this process."""

    def __init__(self, endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._endpoint, self._monkeypatch, self._capsys = endpoint, monkeypatch, capsys
        monkeypatch.setattr(logs, "configure", lambda *_: None)  # this process has its own

    def __call__(self, *options: str) -> tuple[int, dict[str, tuple[str, str]]]:
        """The exit status, and state and text of each row."""
        command = ["transferd", "restart-check", "--endpoint", self._endpoint, "--format", "json", *options]
        self._monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        found = json.loads(self._capsys.readouterr().out)
        assert isinstance(ended.value.code, int)
        assert {SAFE: 0, LOSES: 1, WAIT: 3}[found["verdict"]] == ended.value.code
        return ended.value.code, {row["what"]: (row["state"], row["text"]) for row in found["rows"]}


@pytest.fixture
def check(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    return Check(daemon.endpoint, monkeypatch, capsys)


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[SyncClient]:
    with SyncClient(daemon.endpoint) as client:
        client.on_new_boot = lambda: None
        client.attach(0)
        client.ping()  # a Hello, which says so
        wait_until(lambda: len(client.clients()) == 1, "the engine of before has not left")
        yield client
        client.purge()


def test_what_a_real_daemon_would_lose_and_when_it_would_lose_nothing(
    daemon: DaemonProcess, engine: SyncClient, check: Check
) -> None:
    code, found = check()
    assert (code, {state for state, _ in found.values()}) == (0, {SAFE})
    assert found["engine default"][1] == "comes back by itself"
    assert engine.submit(WriteStorageTask(task_id="w", keys=["a", "b"], gpu_block_ids=[1, 2])).status == "ok"
    code, found = check()
    assert (code, found["stored blocks"][0]) == (1, LOSES)
    assert found["stored blocks"][1].startswith("2 objects, ")
    engine.purge()
    engine.pause()
    code, found = check()
    assert (code, found["holds"][0]) == (1, LOSES)
    assert "pause of engine default" in found["holds"][1]
    engine.resume()
    good = daemon.config_file.read_text()
    daemon.config_file.write_text(good.replace("ranks = 1", "ranks = -1"))
    try:
        code, found = check()
    finally:
        daemon.config_file.write_text(good)
    assert (code, found["configuration"][0]) == (1, LOSES)
    assert found["configuration"][1].startswith("the daemon would not start: cache.ranks")
    assert check()[0] == 0


def test_an_engine_that_does_not_hear_of_a_new_daemon_does_not_come_back(engine: SyncClient, check: Check) -> None:
    engine.on_new_boot = None
    engine.ping()  # each one is a Hello
    code, found = check()
    assert (code, found["engine default"][0]) == (1, LOSES)
    assert "Client.on_new_boot" in found["engine default"][1]


def test_a_wait_drains_the_engines_and_ends_when_their_tasks_have_ended(
    engine: SyncClient, check: Check, waits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = [], Client.restart_check

    async def counted(client: Client) -> AtRestart:
        asked.append(client)
        return await ask(client)

    monkeypatch.setattr(Client, "restart_check", counted)
    let_wait(waits, FOREVER)
    task = engine.push(ReadStorageTask(task_id="slow", keys=["absent"], gpu_block_ids=[1]))
    while not engine.stats()["running"]:
        pass
    code, found = check()
    assert (code, found["tasks"]) == (3, (WAIT, "1 running and 0 queued; a stop would fail what is queued"))

    looks, coming = [], restart_check._coming

    async def looked(client: Client) -> str:
        looks.append(client)
        return await coming(client)

    monkeypatch.setattr(restart_check, "_coming", looked)

    def release_once_it_drains() -> None:
        with SyncClient(engine.endpoint) as client:
            while not client.stats()["draining"] or len(looks) < 3:
                pass
        let_wait(waits, 0)

    releasing = threading.Thread(target=release_once_it_drains)
    releasing.start()
    try:
        code, found = check("--wait")
    finally:
        let_wait(waits, 0)
        releasing.join()
    assert (code, found["tasks"]) == (0, (SAFE, "none"))
    assert len(asked) == 1 + 2, "each level is asked what it has at first and at the end, not at each look"
    assert task.result().status == "miss"
    assert not engine.stats()["draining"], "and tasks are admitted again"


def test_copies_that_end_while_the_levels_are_asked_were_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The levels are asked while a copy hangs; it ends before the report is asked for."""
    hangs, files = Path(f"{tmp_path / 'blocks'}{HANGS}"), f"{HungFiles.__module__}:{HungFiles.__name__}"
    file = {"path": str(tmp_path / "blocks"), "capacity": "16MiB", "reserve": "0B"}
    storage = {"levels": ["memory", files], "level": {files: {"write": "back"}}, "file": file}
    tree = {"cache": {"ranks": 1, "device_blocks": 8, "host_blocks": 0}, "storage": storage}
    ask = Client.restart_check

    async def slow(client: Client) -> AtRestart:
        lost = await ask(client)
        hangs.unlink(missing_ok=True)
        while (await client.stats())["storage"]["levels"][1]["pending_bytes"]:
            pass
        return lost

    monkeypatch.setattr(Client, "restart_check", slow)
    hangs.touch()
    with running(tree, tmp_path) as process, SyncClient(process.endpoint) as client:
        client.on_new_boot = lambda: None
        client.attach(0)
        client.ping()  # a Hello, which says that it comes back
        assert client.submit(WriteStorageTask(task_id="w", keys=["a"], gpu_block_ids=[1])).status == "ok"
        check = Check(process.endpoint, monkeypatch, capsys)
        code, found = check()
        assert (code, found["stored blocks"][0]) == (3, WAIT)
        assert check("--wait")[0] == 0


def found(report: Report, **lost: Any) -> dict[str, str]:
    return {row.what: row.state for row in rows(report, AtRestart(**lost))}


def test_copies_that_are_on_their_way_are_waited_for_and_a_pool_may_be_left_by_the_stop() -> None:
    coming = Report(storage=StorageReport(levels=[LevelReport(name="file", pending_bytes=100)]))
    assert found(coming, objects=1, bytes=100) == {
        "configuration": SAFE, "copies": WAIT, "stored blocks": WAIT, "tasks": SAFE, "holds": SAFE,
    }  # fmt: skip
    assert found(coming, objects=2, bytes=101)["stored blocks"] == LOSES, "some of it goes nowhere"
    assert found(Report(), objects=1, bytes=1, stop_copies_s=30.0)["stored blocks"] == SAFE
    assert found(Report(), unknown="no bucket answers")["stored blocks"] == LOSES
    assert found(Report(straggling=1))["tasks"] == LOSES
    assert verdict(list(rows(coming, AtRestart()))) == WAIT
