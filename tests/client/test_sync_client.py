"""The blocking client: its lives, many threads, interruptions, races with a close, an exit without one."""

from __future__ import annotations

import concurrent.futures
import inspect
import pydoc
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.test_dropped import SLOW
from tests.support.freezing import freeze, thaw
from tests.support.wire_daemon import serving
from transferd.client import heartbeat
from transferd.client.client import Client
from transferd.client.sync_client import MOST_BEGINNING, SyncClient
from transferd.errors import Closed, ConfigError, ConnectTimeout, NoThreads, RequestError, TransferError
from transferd.tasks import Status, SwapOutTask, TaskResult

SECONDS = 20  # after which a call hangs


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


# --- lives ----------------------------------------------------------------------------------------


def test_a_client_that_could_not_connect_connects_once_the_daemon_is_there(
    tmp_path: Path, threads: Callable[[], list[threading.Thread]]
) -> None:
    address = f"ipc://{tmp_path}/d.sock"
    client = SyncClient(address, connect_timeout=0.05)
    for _ in range(2):
        with pytest.raises(ConnectTimeout):
            client.connect()
        assert not threads()
    client._client._connect_timeout = SECONDS
    for boot_id in ("boot-1", "boot-2"):
        with serving(address, boot_id), client:
            assert (client.submit(task("t")).status, client.boot_id) == (Status.OK, boot_id)
        assert not client.connected
        assert not threads()


def test_connecting_a_connected_client_changes_nothing(
    endpoint: str, threads: Callable[[], list[threading.Thread]]
) -> None:
    with SyncClient(endpoint) as client:
        [thread] = threads()
        client.connect()
        with client:
            assert threads() == [thread]
        assert not threads(), "the inner block has closed it"
        with pytest.raises(Closed):
            client.ping()


def test_a_bad_endpoint_raises_and_leaves_no_thread(threads: Callable[[], list[threading.Thread]]) -> None:
    client = SyncClient("nowhere")
    for _ in range(2):
        with pytest.raises(ConfigError, match="nowhere"):
            client.connect()
    assert not threads()


def test_a_close_ends_a_connect_that_still_waits(tmp_path: Path, threads: Callable[[], list[threading.Thread]]) -> None:
    client = SyncClient(f"ipc://{tmp_path}/nobody.sock", connect_timeout=1000)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(client.connect)
        while not client._client._conversation._waiters:
            pass
        client.close()
        with pytest.raises(Closed):
            connecting.result(SECONDS)
    assert not threads()


def test_no_thread_to_be_had_leaves_the_client_closed(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = SyncClient(endpoint)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(NoThreads, match="can't start"):
            client.connect()
    with client:
        assert client.submit(task("t")).status is Status.OK


# --- closing --------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[SyncClient, str], Any]] = {
    "ping": lambda client, _: client.ping(),
    "match": lambda client, _: client.match(["a"]),
    "submit": lambda client, name: client.submit(task(name)),
    "push": lambda client, name: client.push(task(name)).result(SECONDS),
    "start": lambda client, name: client.start(task(name)).result(SECONDS),
    "held": lambda client, name: client.submit(task(f"held-{name}")),
    "held start": lambda client, name: client.start(task(f"held-{name}")).result(SECONDS),
    "wait_ready": lambda client, _: client.wait_ready(),
}


def _until_closed(client: SyncClient, kind: str, number: int, begun: threading.Barrier) -> set[str]:
    """Call again and again; what came of the calls, of which the last one met the close."""
    outcomes: set[str] = set()
    begun.wait(SECONDS)
    for call in range(10**9):
        try:
            result = CALLS[kind](client, f"{kind}-{number}-{call}-{id(client)}")
        except Closed:
            return outcomes | {"Closed"}
        error = getattr(result, "error", None)
        outcomes.add(error.code if error else "ok")
    raise AssertionError


def test_calls_that_race_with_a_close_are_closed_and_nothing_else(
    endpoint: str, threads: Callable[[], list[threading.Thread]]
) -> None:
    with concurrent.futures.ThreadPoolExecutor(len(CALLS)) as pool:
        for number in range(30):
            client = SyncClient(endpoint)
            client.connect()
            begun = threading.Barrier(len(CALLS) + 1)
            racing = {kind: pool.submit(_until_closed, client, kind, number, begun) for kind in CALLS}
            begun.wait(SECONDS)
            client.close()
            for kind, outcome in racing.items():
                assert outcome.result(SECONDS) <= {"ok", "closed", "Closed"}, kind
    assert not threads()


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (lambda client: client.close(), Status.FAILED, "closed"),
        (lambda client: client.cancel("busy"), Status.CANCELLED, "cancelled"),
    ],
    ids=["close", "cancel"],
)
def test_a_start_that_waits_for_a_busy_daemon_ends(
    endpoint: str, end: Callable[[SyncClient], Any], status: Status, code: str
) -> None:
    client = SyncClient(endpoint)
    client.connect()
    future = client.start(task("busy"))
    while not client._client._busy._waiting:
        pass
    end(client)
    result = future.result(SECONDS)
    assert result.error is not None
    assert (result.status, result.error.code) == (status, code)
    client.close()


def test_many_closes_at_once_are_one(endpoint: str, threads: Callable[[], list[threading.Thread]]) -> None:
    client = SyncClient(endpoint)
    client.connect()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for closing in [pool.submit(client.close) for _ in range(8)]:
            closing.result(SECONDS)
    assert not threads()


def test_a_callback_that_calls_back_is_refused_instead_of_hanging(endpoint: str) -> None:
    told: list[str] = []

    def callback(_: object) -> None:
        for call in (client.ping, client.close):
            try:
                call()
            except RequestError as error:
                told.append(error.reason)

    client = SyncClient(endpoint)
    client.connect()
    future = client.push(task("held-callback"))
    future.add_done_callback(callback)
    client.cancel("held-callback")
    future.result(SECONDS)
    client.close()
    assert told == ["wrong_thread", "wrong_thread"]


# --- calls ----------------------------------------------------------------------------------------


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


def test_questions_have_futures_that_run_beside_each_other(endpoint: str) -> None:
    with SyncClient(endpoint) as client:
        asked = [client.start_exists([f"missing-{number}", "a"], use=False) for number in range(8)]
        leading = client.start_match(["a", "missing"])
        assert [one.result(SECONDS) for one in asked] == [[False, True]] * 8
        assert leading.result(SECONDS) == 1


def test_a_question_to_a_mute_daemon_ends_at_its_own_time_and_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENCE_S", 3600.0)  # else all of them end when the daemon counts as lost
    where = f"ipc://{tmp_path}/d.sock"
    with serving(where) as daemon, SyncClient(where) as client:
        freeze(daemon.pid)
        patient = client.start_exists(["a"], timeout=SECONDS)
        for asked in (client.match, client.exists):
            with pytest.raises(TransferError, match=r"within 0\.05 s") as caught:
                asked(["a"], timeout=0.05)
            assert caught.value.reason == "no_answer"
        with pytest.raises(TransferError) as late:
            client.start_match(["a"], timeout=0.05).result(SECONDS)
        assert late.value.reason == "no_answer"
        assert not patient.done()
        thaw(daemon.pid)
        assert patient.result(SECONDS) == [True]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon", None])
def test_a_questions_timeout_is_a_number_above_0(endpoint: str, timeout: Any) -> None:
    with SyncClient(endpoint) as client, pytest.raises(RequestError, match="timeout must be"):
        client.exists(["a"], timeout=timeout)


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
    while not client._client._conversation._pending.items():  # until the main thread waits for the held task
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    said = [line for line in done.stderr.splitlines() if not SLOW.fullmatch(line)]
    assert (done.stdout, said, done.returncode) == ("ok\n", [], 0)


def test_a_process_that_never_closes_its_client_still_exits(endpoint: str) -> None:
    done = subprocess.run([sys.executable, "-c", NEVER_CLOSED, endpoint], timeout=100, check=False)
    assert done.returncode == 0


# --- the same methods as Client -------------------------------------------------------------------

# `start` insists; an adapter counts on the client's loop; the others serve this client itself
ASYNCIO_ONLY = {"insist", "count_not_stored", "retried", "used", "withdraw", "dropped", "unusable"}


def members(kind: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(members(Client).keys() - ASYNCIO_ONLY))
def test_what_a_client_does_the_blocking_client_does_with_a_docstring_and_the_same_parameters(name: str) -> None:
    mine, theirs = members(SyncClient)[name], members(Client)[name]
    assert inspect.getdoc(mine)
    assert not inspect.iscoroutinefunction(mine)
    if callable(theirs):
        assert mine.__qualname__ == f"SyncClient.{name}"
        ours, original = inspect.signature(mine), inspect.signature(theirs)
        assert [str(each) for each in ours.parameters.values()] == [str(each) for each in original.parameters.values()]


def test_the_types_of_the_blocking_forms_are_those_of_the_calls() -> None:
    script = Path(__file__).parents[2] / "scripts" / "blocking_types.py"
    assert subprocess.run([sys.executable, script, "--check"], check=False, timeout=60).returncode == 0
    assert SyncClient.store.names == Client.store.names


def test_help_of_a_forwarded_method_says_what_its_parameters_mean() -> None:
    text = pydoc.plain(pydoc.render_doc(SyncClient.offer))
    assert "handle: a tier's DeviceHandle" in text
    assert "caches: Mapping[str, Sequence[Any]] | None" in text.replace("'", "")


def only_checked(client: SyncClient) -> None:
    """Never called: mypy checks here that it sees the forwarded methods as they are."""
    from typing_extensions import assert_type

    assert_type(client.match(["key"]), int)
    assert_type(client.submit(task("t"), settled=True), TaskResult)
    assert_type(client.boot_id, str)
    client.match(1)  # type: ignore[arg-type]
    assert_type(client.store.match(["key"]), int)
    assert_type(client.control.token, str)
    client.cache.match(["key"])  # type: ignore[attr-defined]


def test_threads_that_never_wait_take_turns_with_the_others(endpoint: str) -> None:
    """So the loop is never behind by more than so many calls; it was behind by as many as they could make."""
    with SyncClient(endpoint) as client:
        made: list[None] = []
        behind: list[int] = []  # for each call that began: how many were made and have not
        begin = client._client.insist

        async def counted(*given: Any, **more: Any) -> TaskResult:
            behind.append(len(made) - len(behind))
            return await begin(*given, **more)

        client._client.insist = counted  # type: ignore[method-assign]

        def start() -> None:
            for _ in range(2 * MOST_BEGINNING):
                made.append(None)
                client.start(task(uuid.uuid4().hex)).cancel()

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.ping()
        assert len(behind) == len(made), "each has begun"
        # What the loop takes up in one turn begins in the next one, and meanwhile as many may be made.
        assert 1 < max(behind) <= 2 * (MOST_BEGINNING + len(threads))
