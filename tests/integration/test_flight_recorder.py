"""The flight recorder of a real daemon: a task explained while it lives, and from dumps when it does not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import attached_sync
from transferd import ReadStorageTask, Status, SwapOutTask, TaskResult, WriteStorageTask
from transferd.client.launch import DaemonProcess, running, start
from transferd.observability.dump_file import Dump, read_dump

ROOT = Path(__file__).parents[2]
KEYS = ["a", "b", "c"]
WRITE = WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=[0, 1, 2])


def tree(how: str = "", **recorder: Any) -> dict[str, dict[str, Any]]:
    storage = {"backend": "tests.integration.misbehaving:Misbehaving", "model": how} if how else {"backend": "memory"}
    cache = {"ranks": 2, "layers": 2, "kv_heads": 1, "head_dim": 16, "block_size": 8}
    return {"cache": cache | {"device_blocks": 8, "host_blocks": 8}, "storage": storage, "recorder": recorder}


@pytest.fixture(autouse=True)
def tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with running(tree(keep=2), tmp_path) as process:
        yield process


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "transferd", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def dump_of(daemon: DaemonProcess, reason: str) -> Dump:
    """Wait for a dump of this kind, and read it."""
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        for path in (daemon.log_file.parent / "flight").glob(f"flight-*-{reason}.jsonl"):
            return read_dump(path)
        time.sleep(0.01)
    raise AssertionError(f"no dump of kind {reason}; the log ends:\n{daemon.log[-3000:]}")


def whats(story: dict[str, Any], rank: int | None = None) -> list[str]:
    (life,) = story["lives"]
    return [event["what"] for event in (life["events"] if rank is None else life["ranks"][rank]["events"])]


def last_of_each_rank(story: dict[str, Any]) -> list[str]:
    return [rank["events"][-1]["what"] for rank in story["lives"][0]["ranks"]]


def test_a_running_daemon_explains_each_kind_of_task_rank_by_rank(daemon: DaemonProcess) -> None:
    with attached_sync(daemon.endpoint) as client:
        assert client.submit(WRITE).status is Status.OK
        read = ReadStorageTask(task_id="r", keys=[*KEYS, "not there"], gpu_block_ids=[4, 5, 6, 7])
        assert client.submit(read).status is Status.PARTIAL
        assert client.submit(SwapOutTask(task_id="s", gpu_block_ids=[1], cpu_block_ids=[2])).status is Status.OK
        rejected = client.submit(SwapOutTask(task_id="x", gpu_block_ids=[1], cpu_block_ids=[1, 2]))
        assert rejected.status is Status.REJECTED
        stories = {task_id: client.explain(task_id) for task_id in "wrsx"}
    for task_id in "wrs":
        missed = ["missed"] if task_id == "r" else []
        assert whats(stories[task_id]) == ["admitted", "from", "started", "done", *missed]
        assert [rank["rank"] for rank in stories[task_id]["lives"][0]["ranks"]] == [0, 1]
    assert whats(stories["w"], 1) == ["to store", "put", "stored", "arrived"]
    assert whats(stories["r"], 0) == ["found", "load in place", "arrived"]
    assert whats(stories["s"], 0) == ["arrived"]
    assert whats(stories["x"]) == ["rejected"]
    life = stories["r"]["lives"][0]
    assert (life["kind"], life["blocks"], life["status"]) == ("read", 4, "partial")
    assert life["ranks"][0]["events"][0]["blocks"] == 3
    times = [event["t"] for rank in life["ranks"] for event in rank["events"]]
    assert all(0 <= t <= life["seconds"] for t in times), "between admission and answer"


def test_the_command_tells_the_same_from_the_daemon_and_from_a_dump(daemon: DaemonProcess, tmp_path: Path) -> None:
    with attached_sync(daemon.endpoint) as client:
        client.submit(WRITE)
        from_client = client.explain("w")
    live = explain("w", "--endpoint", daemon.endpoint, "--format", "json")
    assert (live.returncode, live.stderr) == (0, "")
    from_daemon = json.loads(live.stdout)
    daemon.signal(signal.SIGUSR1)
    path = dump_of(daemon, "signal").path
    from_dump = json.loads(explain("w", "--dump", str(path), "--format", "json").stdout)
    assert from_daemon.pop("identity")  # added by the command, from the engine that is there: a dump does not have it
    for story in (from_client, from_daemon, from_dump):
        del story["lives"][0]["began"]  # from a difference of clocks, read at different times
    assert from_client == from_daemon == from_dump
    text = explain("w", "--dump", str(tmp_path / "flight"))
    assert text.returncode == 0
    assert text.stdout.startswith("task w (write, 3 blocks): admitted ")
    assert [line for line in text.stdout.splitlines() if line.startswith("  rank")] == ["  rank 0", "  rank 1"]


def test_an_unknown_task_or_dump_is_one_line_and_exit_1(daemon: DaemonProcess, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for arguments, problem in (
        (["nope", "--endpoint", daemon.endpoint], "unknown task 'nope'"),
        (["w", "--dump", str(nowhere)], f"{nowhere}: cannot be read"),
        (["w", "--endpoint", f"ipc://{nowhere}", "--timeout", "0.2"], f"ipc://{nowhere}: no daemon answered"),
    ):
        done = explain(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith(problem)


def test_sigusr1_dumps_again_and_again_and_keeps_only_the_newest(daemon: DaemonProcess, tmp_path: Path) -> None:
    seen: set[Path] = set()
    for number in range(1, 4):
        daemon.signal(signal.SIGUSR1)
        give_up = time.monotonic() + 30
        # A dump has its name before the oldest one goes; the log says when both have happened.
        while daemon.log.count("dumped the flight recorder") < number:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        seen |= set((tmp_path / "flight").glob("flight-*.jsonl"))
    assert len(seen) == 3
    left = sorted(path.name for path in (tmp_path / "flight").iterdir())
    assert left == sorted(path.name for path in seen)[-2:]
    with attached_sync(daemon.endpoint) as client:
        assert client.submit(WRITE).status is Status.OK, "the daemon goes on"


def test_no_thread_of_the_daemon_can_be_killed_by_a_signal_that_asks_for_a_dump(daemon: DaemonProcess) -> None:
    mask = sum(1 << (number - 1) for number in (signal.SIGUSR1, signal.SIGABRT))
    open_to_it = []
    for thread in Path(f"/proc/{daemon.pid}/task").iterdir():
        try:
            status = (thread / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        blocked = next(x for x in status.splitlines() if x.startswith("SigBlk:"))
        if int(blocked.split()[1], 16) & mask != mask:
            open_to_it.append(thread.name)
    assert len(open_to_it) == 1, "the one that waits for them, for which the kernel shows them as not blocked"


def test_a_daemon_whose_loop_is_stuck_still_dumps_and_says_where_it_is_stuck(tmp_path: Path) -> None:
    daemon = start(tree("stuck"), tmp_path)
    try:
        with attached_sync(daemon.endpoint) as client:
            client.push(WRITE)
            give_up = time.monotonic() + 30
            while True:  # the push returns before the ranks get so far
                daemon.signal(signal.SIGUSR1)
                dump = dump_of(daemon, "signal")
                if "put" in [note.what for note in dump.notes]:
                    break
                assert time.monotonic() < give_up
                dump.path.unlink()
            assert "put" in last_of_each_rank(dump.story("w"))
            daemon.signal(signal.SIGABRT)  # as systemd's watchdog does
            assert daemon.process.wait(30) == -signal.SIGABRT
    finally:
        daemon.kill()
    dump = dump_of(daemon, "abort")
    main = next(stack for name, stack in dump.header["threads"].items() if name.startswith("MainThread"))
    assert main[-1].endswith("never_returns")
    assert "put" in last_of_each_rank(dump.story("w"))
    assert "Fatal Python error: Aborted" in daemon.log
    assert "never_returns" in daemon.log


def test_a_bug_in_a_handler_is_dumped_a_few_times_and_the_daemon_lives(tmp_path: Path) -> None:
    with running(tree("bug", keep=8), tmp_path) as daemon, attached_sync(daemon.endpoint) as client:
        for i in range(5):
            task = WriteStorageTask(task_id=f"w{i}", keys=[f"{i}"], gpu_block_ids=[0])
            assert _code(client.submit(task)) == "internal"
        dump = dump_of(daemon, "failure")
        assert dump.header["problem"].startswith("rank ")
        assert dump.header["problem"].endswith("ZeroDivisionError: a bug in store")
        daemon.signal(signal.SIGUSR1)
        dump_of(daemon, "signal")
        assert len(list((tmp_path / "flight").glob("*-failure.jsonl"))) <= 3


def test_a_daemon_that_ends_by_an_exception_leaves_a_dump(tmp_path: Path) -> None:
    daemon = start(tree("crash"), tmp_path, wait=False)
    assert daemon.process.wait(60) == 1
    dump = dump_of(daemon, "crash")
    assert dump.header["problem"] == "ZeroDivisionError: a bug in open"
    assert dump.header["threads"]["exception"][-1].endswith(" open")


def test_without_a_directory_or_with_one_that_cannot_be_made_the_daemon_says_so_and_lives(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for name, directory, told in (
        ("a", "", "recorder.directory is not set"),
        ("b", f"{tmp_path}/file/x", "cannot dump"),
    ):
        with (
            running(tree(directory=directory), tmp_path, name=name) as daemon,
            attached_sync(daemon.endpoint) as client,
        ):
            daemon.signal(signal.SIGUSR1)
            give_up = time.monotonic() + 30
            while told not in daemon.log:
                assert time.monotonic() < give_up
                time.sleep(0.01)
            assert client.submit(WRITE).status is Status.OK


def _code(result: TaskResult) -> str:
    assert result.error is not None
    return result.error.code
