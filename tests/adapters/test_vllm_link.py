"""An engine process's link to a real daemon that it has started itself, with memory that has no name; without vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import queue
import re
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.waits import wait_until
from transferd.adapters.common import link as link_module
from transferd.adapters.common import packaged
from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.entry import EngineFacts, OfferedMemory
from transferd.adapters.common.link import Link, why_not_stored
from transferd.adapters.common.memory import shared_memory_at
from transferd.adapters.vllm.settings import VLLM
from transferd.client.client import Client
from transferd.client.engines import Engine
from transferd.client.launch import running
from transferd.client.pages import Pages
from transferd.client.sync_client import SyncClient
from transferd.errors import Closed, RequestError
from transferd.tasks import ErrorInfo, ReadStorageTask, Status, TaskResult, WriteStorageTask

pytestmark = pytest.mark.one_loop

BLOCKS, PAGE = 16, 4096
WAIT_S = 60.0


class OneEngine:
    """An engine of one rank: two layers, whose pages lie one block behind the other."""

    def __init__(self, name: str = "e") -> None:
        self.fd = os.memfd_create("kv")
        os.ftruncate(self.fd, 2 * BLOCKS * PAGE)
        self._mapped = mmap.mmap(self.fd, 2 * BLOCKS * PAGE)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._mapped, dtype=np.uint8)
        mapped = shared_memory_at(self.bytes.ctypes.data, self.bytes.nbytes)
        memory = OfferedMemory(0, mapped, ((0, PAGE), (BLOCKS * PAGE, PAGE)), self.bytes)
        facts = EngineFacts(name, "model", "", "identity", 1, BLOCKS, (PAGE, PAGE), memory)
        self.finder = DaemonFinder(VLLM, block_bytes=facts.block_bytes)
        self.link = Link(self.finder, facts.name, facts.enter)
        assert self.link.wait_ready(WAIT_S)

    def block(self, number: int) -> npt.NDArray[np.uint8]:
        return self.bytes.reshape(2, BLOCKS, PAGE)[:, number]

    def start(self, task: ReadStorageTask | WriteStorageTask) -> queue.SimpleQueue[TaskResult]:
        answers: queue.SimpleQueue[TaskResult] = queue.SimpleQueue()
        self.link.submit(task, answers.put)
        return answers

    def daemon(self) -> int:
        assert self.finder.started is not None
        assert self.finder.started.process is not None
        return self.finder.started.process.pid

    def close(self) -> None:
        self.link.close(10.0)
        del self.bytes
        os.close(self.fd)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneEngine]:
    place = Path(tempfile.mkdtemp(prefix="tl."))  # a short name: a socket lives in it
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.delenv("TRANSFERD_ENDPOINT", raising=False)
    one = OneEngine()
    yield one
    one.close()
    shutil.rmtree(place, ignore_errors=True)


def write(engine: OneEngine, *keys: str) -> None:
    for i in range(1, len(keys) + 1):
        engine.block(i)[:] = np.random.default_rng(i).integers(0, 256, (2, PAGE), dtype=np.uint8)
    task = WriteStorageTask(task_id=f"w{keys}", keys=list(keys), gpu_block_ids=list(range(1, len(keys) + 1)))
    assert engine.start(task).get(timeout=WAIT_S).status is Status.OK


def test_each_key_has_an_answer_and_each_block_its_bytes(engine: OneEngine) -> None:
    write(engine, "a", "b", "c")
    assert engine.link.exists(["a", "x", "c"]) == [True, False, True]
    answers: queue.SimpleQueue[list[bool] | None] = queue.SimpleQueue()
    engine.link.ask(["x", "b"], answers.put)
    assert answers.get(timeout=WAIT_S) == [False, True]
    read = ReadStorageTask(task_id="r", keys=["a", "x", "c"], gpu_block_ids=[8, 9, 10], prefix=False)
    result = engine.start(read).get(timeout=WAIT_S)
    assert (result.status, result.block_ids) == (Status.PARTIAL, [8, 10])
    assert np.array_equal(engine.block(8), engine.block(1))
    assert np.array_equal(engine.block(10), engine.block(3))
    assert not engine.block(9).any()


def test_one_line_says_that_a_daemon_was_started_which_lives_until_the_last_engine_has_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="tl.") as place, caplog.at_level(logging.INFO, logger="vllm.transferd"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        monkeypatch.setenv("XDG_CACHE_HOME", f"{place}/cache")
        monkeypatch.delenv("TRANSFERD_ENDPOINT", raising=False)
        one, other = OneEngine(), OneEngine("f")
        pid = one.daemon()
        assert one.finder.started is not None
        daemon = one.finder.started.process
        assert daemon is not None
        write(other, "a")
        one.close()
        assert other.link.exists(["a"]) == [True], "whoever has started it"
        assert daemon.process.poll() is None
        other.close()
        assert daemon.process.wait(WAIT_S) == 0
    (line,) = [record.getMessage() for record in caplog.records if "started one" in record.getMessage()]
    assert f"pid {pid}, up to " in line
    assert f" GiB in {place}/cache/transferd, log in {place}/" in line


def test_a_task_of_a_suspended_daemon_is_answered_when_it_can_write_no_more(engine: OneEngine) -> None:
    write(engine, "a")
    os.kill(engine.daemon(), signal.SIGSTOP)
    try:
        answers = engine.start(ReadStorageTask(task_id="r", keys=["a"], gpu_block_ids=[8]))
        wait_until(lambda: not engine.link.ready, within=WAIT_S)
        assert engine.link.exists(["a"]) == [False], "look-ups do not wait for it"
        refused = engine.start(ReadStorageTask(task_id="s", keys=["a"], gpu_block_ids=[9])).get(timeout=WAIT_S)
        assert refused.error is not None
        assert refused.error.code == "not_connected"
        assert answers.empty()
    finally:
        os.kill(engine.daemon(), signal.SIGCONT)
    result = answers.get(timeout=WAIT_S)
    assert np.array_equal(engine.block(8), engine.block(1)) or not result.block_ids


def test_a_killed_daemon_answers_its_tasks_and_is_started_again(engine: OneEngine) -> None:
    write(engine, "a")
    before = engine.daemon()
    os.kill(before, signal.SIGSTOP)  # so that the task cannot end first
    answers = engine.start(ReadStorageTask(task_id="r", keys=["a"], gpu_block_ids=[8]))
    os.kill(before, signal.SIGKILL)
    result = answers.get(timeout=WAIT_S)
    assert (result.status, result.error and result.error.code) == (Status.FAILED, "daemon_lost")
    # The link may still be ready for the daemon that has died: only the new one finds the block.
    wait_until(lambda: engine.daemon() != before and engine.link.exists(["a"]) == [True], within=WAIT_S)
    assert engine.start(ReadStorageTask(task_id="t", keys=["a"], gpu_block_ids=[8])).get(timeout=WAIT_S).block_ids == [
        8
    ]
    assert np.array_equal(engine.block(8), engine.block(1))


def test_what_was_not_stored_while_no_daemon_answered_is_in_the_next_ones_report(engine: OneEngine) -> None:
    os.kill(engine.daemon(), signal.SIGKILL)
    wait_until(lambda: not engine.link.ready, within=WAIT_S)
    (result,) = [engine.start(WriteStorageTask(task_id="w", keys=["a" * 64], gpu_block_ids=[1])).get(timeout=WAIT_S)]
    engine.link.count_not_stored(why_not_stored(result), 1)
    engine.link.count_not_stored("no_room", 4)
    with SyncClient(engine.link.endpoint, connect_timeout=WAIT_S, await_ready=False) as watcher:
        wait_until(lambda: watcher.stats()["server"]["not_stored"], within=WAIT_S)
        assert watcher.stats()["server"]["not_stored"] == {"not_ready": 1, "no_room": 4}


def test_counts_from_before_the_first_daemon_are_kept_for_it() -> None:
    said: list[tuple[str, int]] = []
    link = linked(None)
    link.count_not_stored("not_ready", 2)
    link.count_not_stored("not_ready", 3)
    link._begin(nothing()).result(WAIT_S)  # the link's thread has come so far
    link._client = SimpleNamespace(count_not_stored=lambda *count: said.append(count), close=nothing)  # type: ignore[assignment]
    link.count_not_stored("failed", 1)
    link._begin(nothing()).result(WAIT_S)
    assert said == [("not_ready", 5), ("failed", 1)]
    link.close(5.0)


def test_a_rank_that_comes_before_rank_0_has_registered_says_what_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not that vLLM runs without the daemon: this is how every start with several ranks goes."""
    answers = [RequestError("no engine 'e' is registered", code="unknown_engine")] * 2

    async def offer(rank: int, *_: object, **__: object) -> None:
        if answers:
            raise answers.pop()
        assert rank == 1

    async def nothing(*_: object) -> None: ...

    memory: Any = SimpleNamespace(rank=1, handle=lambda: None, caches=lambda _: None, entered=nothing)
    facts = EngineFacts("e", "model", "", "identity", 2, BLOCKS, (PAGE, PAGE), memory)
    finder: Any = SimpleNamespace(find=lambda: "", starting=True, close=lambda _: None, program=VLLM)
    client: Any = SimpleNamespace(
        connected=True, boot_id="b", outdated=[], endpoint="ipc:///d", offer=offer, wait_ready=nothing, close=nothing
    )
    with caplog.at_level(logging.INFO, logger="vllm.transferd"):
        link = Link(finder, facts.name, facts.enter)
        link._client = client
        assert link.wait_ready(WAIT_S)
        link.close(10.0)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "transferd: waiting until rank 0 has registered the engine with the daemon at ipc:///d"),
        ("INFO", "transferd: using the daemon at ipc:///d"),
    ]


def test_a_rank_that_starts_no_daemon_waits_for_the_one_that_rank_0_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would call a daemon missing that is about to listen."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TRANSFERD_ENDPOINT", raising=False)
    monkeypatch.setattr(packaged, "DEFAULT_ENDPOINT", f"ipc://{tmp_path}/packaged")
    finder = DaemonFinder(VLLM)
    path = finder.find().removeprefix("ipc://")
    assert finder.starting
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        assert not finder.starting
    assert not DaemonFinder(VLLM, endpoint=f"ipc://{path}").starting, "nobody says that one is started there"


def test_an_engine_that_the_daemon_gave_up_enters_again_under_the_same_boot() -> None:
    """On a GPU its timelines are the daemon's: those that it had mapped are gone."""
    entered: list[bool] = []

    async def enter(client: Client) -> None:
        client.outdated.clear()
        entered.append(True)

    async def ready() -> None: ...

    link = Link(SimpleNamespace(find=lambda: "", starting=True, close=lambda _: None, program=VLLM), "e", enter)  # type: ignore[arg-type]
    client = SimpleNamespace(connected=True, boot_id="b", outdated=[], wait_ready=ready, close=ready, endpoint="")
    link._client = client  # type: ignore[assignment]
    wait_until(lambda: len(entered) == 1, within=WAIT_S)
    client.outdated.append(0)
    wait_until(lambda: len(entered) == 2, within=WAIT_S)
    link.close(10.0)
    assert len(entered) == 2


def test_a_daemon_that_answers_while_the_link_closes_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client used to stay open: it became the link's after the close had looked for one."""
    connecting, ends = threading.Event(), list[str]()

    class Late:
        boot_id, connected = "", True

        def __init__(self, *_: Any, **__: Any) -> None: ...

        async def connect(self) -> None:
            connecting.set()
            with contextlib.suppress(asyncio.CancelledError):  # the answer comes with the end
                await asyncio.sleep(WAIT_S)

        async def close(self) -> None:
            ends.append("closed")

    monkeypatch.setattr(link_module, "Client", Late)
    link = Link(SimpleNamespace(find=lambda: "", starting=False, close=lambda _: None, program=VLLM), "e")  # type: ignore[arg-type]
    assert connecting.wait(WAIT_S)
    link.close(WAIT_S)
    assert ends == ["closed"]


class Looking:
    """A companion that finds nothing; `found` says what comes of each look."""

    starting = True
    program = VLLM

    def __init__(self, *found: Exception) -> None:
        self._found = iter(found)
        self.looks = 0

    def find(self) -> str:
        self.looks += 1
        for error in self._found:
            raise error
        return ""

    def close(self, timeout: float) -> None: ...


def test_two_servers_of_one_name_are_both_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As two containers whose processes have the same ids, or two starts of one configuration."""
    monkeypatch.setattr(link_module, "PATIENT_LOOKS", 2)
    with running({"storage": {"backend": "memory"}}, tmp_path) as daemon:
        monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
        with contextlib.ExitStack() as stack:
            for number in range(2):
                engine = OneEngine()
                stack.callback(engine.close)
                write(engine, f"k{number}")
            with SyncClient(daemon.endpoint, await_ready=False) as client:
                names = sorted(client.stats()["engines"])
            assert names[0] == "e"
            assert re.fullmatch("e-[0-9a-f]{6}", names[1])
    assert f"another engine keeps the name; this one is {names[1]!r} now" in caplog.text


@contextlib.contextmanager
def silent(link: Link) -> Iterator[None]:
    """The link's thread neither hears nor speaks, as that of a suspended process."""
    speaks = threading.Event()
    link._loop.call_soon_threadsafe(speaks.wait)
    try:
        yield
    finally:
        speaks.set()


def replica(endpoint: str, model: str) -> SyncClient:
    """Another engine's client, which has registered the name of OneEngine."""
    client = SyncClient(endpoint, engine="e", await_ready=False)
    client.connect()
    layout = Pages(layers=1, page_bytes=PAGE, blocks=BLOCKS, identity="identity")
    client.register(Engine(ranks=1, model=model, layout=layout))
    return client


@pytest.mark.parametrize("model", ["model", "another model"])
def test_an_engine_that_takes_another_name_serves_the_weights_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Under the new name a daemon knows the configured generation only: its blocks are KV of the first weights."""
    monkeypatch.setattr(link_module, "PATIENT_LOOKS", 2)
    tree = {"storage": {"backend": "memory"}}
    with contextlib.ExitStack() as stack:
        with running(tree, tmp_path) as daemon:
            monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
            link = OneEngine().link
            stack.callback(link.close, 10.0)
            assert link.renew("v2")
            speaks = stack.enter_context(contextlib.ExitStack())
            speaks.enter_context(silent(link))
        stack.enter_context(running(tree, tmp_path))
        other = stack.enter_context(contextlib.closing(replica(daemon.endpoint, model)))
        speaks.close()
        wait_until(lambda: link.ready and link.name != "e", within=WAIT_S)
        assert other.stats()["engines"][link.name]["generation"] == "v2"


def linked(client: object) -> Link:
    """A link that has entered a daemon, as far as it can tell from this client."""
    link = Link(Looking(), "e")  # type: ignore[arg-type]
    link._client, link._entered = client, "b"  # type: ignore[assignment]
    return link


async def nothing() -> None: ...


def test_after_any_error_the_next_look_for_a_daemon_follows() -> None:
    finder = Looking(RuntimeError("can't start new thread"), KeyError("data"))
    link = Link(finder, "e")  # type: ignore[arg-type]
    wait_until(lambda: finder.looks > 2, within=WAIT_S)
    link.close(10.0)


def test_a_look_up_is_answered_whatever_becomes_of_it() -> None:
    async def exists(_: list[str], *, use: bool) -> list[bool]:
        raise RuntimeError("a bug")

    link = linked(SimpleNamespace(connected=True, boot_id="b", outdated=[], exists=exists, close=nothing))
    answers: queue.SimpleQueue[list[bool] | None] = queue.SimpleQueue()
    link.ask(["a", "b"], answers.put)
    assert answers.get(timeout=WAIT_S) is None
    link.close(10.0)


def test_a_task_that_a_closed_client_refuses_is_answered() -> None:
    """The link is closing, and a task of a lost daemon was about to be pushed once more."""

    async def insist(_: object, *, settled: bool, progressed: object) -> TaskResult:
        raise Closed("the client is closed")

    link = linked(SimpleNamespace(connected=True, boot_id="b", outdated=[], insist=insist, close=nothing))
    answers: queue.SimpleQueue[TaskResult] = queue.SimpleQueue()
    link.submit(ReadStorageTask(task_id="r", keys=["a"], gpu_block_ids=[8]), answers.put)
    result = answers.get(timeout=WAIT_S)
    assert (result.status, result.error and result.error.code) == (Status.FAILED, "closed")
    link.close(10.0)


def test_ids_of_tasks_differ_from_those_of_an_engine_before_in_the_same_process() -> None:
    """A daemon that outlives an engine still knows the ids of its tasks, and an object's address is used again."""
    lives = set()
    for _ in range(3):
        link = Link(Looking(), "e")  # type: ignore[arg-type]
        link.close(10.0)
        lives.add(link.life)
        del link
    assert len(lives) == 3


@pytest.mark.parametrize(
    ("code", "reason"), [("not_connected", "not_ready"), ("storage_full", "failed"), ("not_admitted", "not_admitted")]
)
def test_why_blocks_were_not_stored(code: str, reason: str) -> None:
    result = TaskResult(task_id="w", status=Status.PARTIAL, error=ErrorInfo(code, "why"))
    assert why_not_stored(result) == reason
