"""The blocking client: many threads, interruptions, a close in the middle of things, an exit without one."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.wire_daemon import serving
from transferd.client.sync_client import SyncClient
from transferd.errors import Closed, ConnectTimeout, RequestError
from transferd.tasks import Status, SwapOutTask


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    where = f"ipc://{tmp_path_factory.mktemp('sync')}/d.sock"
    with serving(where):
        yield where


def task(task_id: str, **more: Any) -> SwapOutTask:
    return SwapOutTask(task_id=task_id, gpu_block_ids=[1], cpu_block_ids=[2], **more)


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "transferd-client"]


@pytest.fixture
def threads() -> Callable[[], list[threading.Thread]]:
    """The threads of clients that began during the test: other tests of this process may have left theirs."""
    before = running()
    return lambda: [thread for thread in running() if thread not in before]


def test_every_method_blocks_and_answers(endpoint: str, threads: Callable[[], list[threading.Thread]]) -> None:
    with SyncClient(endpoint) as client:
        assert client.submit(task("s-1")).status is Status.OK
        assert client.push(task("s-2")).result(10).status is Status.OK
        assert client.match(["a", "missing"]) == 1
        assert client.exists(["missing", "a"]) == [False, True]
        assert client.ping()[0] == client.boot_id == client.stats()["boot_id"] == "boot-1"
        client.set_generation("g")
        assert client.generation == "g"
        with pytest.raises(RequestError):
            client.set_generation("\n")
        client.resume()
        client.pause()
        assert client.cancel("nothing") is False
    assert not threads()


def test_a_pushed_future_is_done_at_once_if_answered_and_cannot_be_cancelled_here(endpoint: str) -> None:
    with SyncClient(endpoint) as client:
        assert client.push(task("s-3")).done()
        future = client.push(task("held-1"))
        assert not future.done()
        assert not future.cancel()
        assert client.cancel("held-1")
        assert future.result(10).status is Status.CANCELLED


def test_many_threads_share_one_client(endpoint: str) -> None:
    with SyncClient(endpoint) as client, concurrent.futures.ThreadPoolExecutor(16) as pool:

        def work(number: int) -> list[str]:
            return [client.submit(task(f"{number}-{i}")).task_id for i in range(20)]

        for number, names in enumerate(pool.map(work, range(16))):
            assert names == [f"{number}-{i}" for i in range(20)]


def test_closing_ends_what_other_threads_wait_for(endpoint: str, threads: Callable[[], list[threading.Thread]]) -> None:
    client = SyncClient(endpoint)
    client.connect()
    future = client.push(task("held-2"))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(client.submit, task("held-3"))
        while "held-3" not in _pending(client):
            pass
        client.close()
        for ended in (future, waiting):
            result = ended.result(10)
            assert result.error is not None
            assert result.error.code == "closed"
    client.close()
    with pytest.raises(Closed):
        client.submit(task("late"))
    assert not threads()


def _pending(client: SyncClient) -> list[str]:
    conversation = client._client._conversation
    return [getattr(pending.body, "task_id", "") for pending in list(conversation._pending.values())]


def test_a_client_can_be_entered_again(endpoint: str) -> None:
    client = SyncClient(endpoint)
    for turn in range(2):
        with client:
            assert client.submit(task(f"turn-{turn}")).status is Status.OK


def test_connecting_to_nobody_leaves_no_thread(tmp_path: Path, threads: Callable[[], list[threading.Thread]]) -> None:
    client = SyncClient(f"ipc://{tmp_path}/nobody.sock", connect_timeout=0.2)
    with pytest.raises(ConnectTimeout, match="no daemon answered"), client:
        pass
    assert not threads()
    client.close()


INTERRUPTED = """
import os, signal, sys, threading
from transferd import SwapOutTask, SyncClient

def task(task_id):
    return SwapOutTask(task_id=task_id, gpu_block_ids=[1], cpu_block_ids=[2])

def interrupt():
    while not client._client._conversation._pending:  # until the main thread waits for the held task
        pass
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, its children too
with SyncClient(sys.argv[1]) as client:
    try:
        threading.Thread(target=interrupt).start()
        client.submit(task(f"held-{os.getpid()}"))
    except KeyboardInterrupt:
        print(client.submit(task(f"after-{os.getpid()}")).status, flush=True)
"""

NEVER_CLOSED = """
import sys
from transferd import SyncClient
client = SyncClient(sys.argv[1])
client.connect()
client.ping()
"""


def test_an_interrupted_wait_leaves_the_client_usable(endpoint: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("ok\n", "", 0)


def test_a_process_that_never_closes_its_client_still_exits(endpoint: str) -> None:
    done = subprocess.run([sys.executable, "-c", NEVER_CLOSED, endpoint], timeout=20, check=False)
    assert done.returncode == 0
