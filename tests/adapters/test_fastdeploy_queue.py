"""FastDeploy's cache queue over a real daemon: its calls, its shapes, and an answer to everything."""

from __future__ import annotations

import concurrent.futures
import enum
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.integration.caches import attached_sync
from tests.support.sabotage import FILE_VARIABLE, Saboteur
from tests.support.waits import wait_until
from transferd.adapters.fastdeploy import EngineCacheQueue
from transferd.adapters.fastdeploy.books import HostWrite
from transferd.adapters.fastdeploy.queue import NotConnected, endpoint_of
from transferd.client.launch import DaemonProcess, running, start
from transferd.errors import Closed, ConfigError, RequestError
from transferd.tasks import Status, TaskResult

RANKS = 2
WAIT_S = 20.0  # for an answer; far more than it takes
CACHE = {
    "ranks": RANKS,
    "layers": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "block_size": 8,
    "device_blocks": 64,
    "host_blocks": 64,
    "device": "tests.support.sabotage:SabotagedDevice",
}


class CacheStatus(enum.Enum):
    SWAP2CPU = 1
    SWAP2GPU = 2
    STORAGE2GPU = 4
    GPU2STORAGE = 5


@pytest.fixture(scope="module")
def saboteur(tmp_path_factory: pytest.TempPathFactory) -> Saboteur:
    return Saboteur(tmp_path_factory.mktemp("orders") / "order")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, saboteur: Saboteur) -> Iterator[DaemonProcess]:
    tree = {
        "cache": CACHE,
        "host": {"staging": "256KiB"},
        "storage": {"backend": "tests.support.sabotage:SabotagedStorage"},
        "server": {"max_queued_tasks": 2, "lane_depth": 1, "client_timeout": 2.5},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FILE_VARIABLE, str(saboteur.file))
        with running(tree, tmp_path_factory.mktemp("daemon")) as process, attached_sync(process.endpoint) as worker:
            worker.on_new_boot = worker.reattach  # the model runner's process maps the cache, the scheduler pushes
            yield process


@pytest.fixture(autouse=True)
def nothing_of_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRANSFERD_ENDPOINT", "TRANSFERD_STORAGE__VERSION_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make(daemon: DaemonProcess) -> Iterator[Callable[..., EngineCacheQueue]]:
    made = []

    def one(**more: Any) -> EngineCacheQueue:
        arguments: dict[str, Any] = {"address": daemon.endpoint, "num_client": RANKS, "client_id": 0} | more
        made.append(EngineCacheQueue(**arguments))
        return made[-1]

    yield one
    for queue in made:
        queue.close()


@pytest.fixture
def queue(make: Callable[..., EngineCacheQueue]) -> EngineCacheQueue:
    return make()


def done(queue: EngineCacheQueue) -> tuple[Any, ...]:
    """The next answer; of a write, which is answered once for each rank, one of those that are all the same."""
    answer = queue.get_transfer_done_signal(timeout=WAIT_S)
    assert answer is not None, "no answer"
    if answer[0] is CacheStatus.GPU2STORAGE:
        assert [queue.get_transfer_done_signal(timeout=WAIT_S) for _ in range(RANKS - 1)] == [answer] * (RANKS - 1)
    return answer


def fill_host(queue: EngineCacheQueue, block: int) -> None:
    queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, f"fill {block}", [block], [block]))
    assert done(queue)[3] == [block]


def swap(event: CacheStatus, name: str, gpu: list[int], cpu: list[int]) -> tuple[Any, ...]:
    return event, name, [f"node-{i}" for i in gpu], gpu, cpu


def write(name: str, keys: list[str], gpu: list[int], **more: Any) -> tuple[Any, ...]:
    return CacheStatus.GPU2STORAGE, task(name, keys, gpu, **more)


def read(name: str, keys: list[str], gpu: list[int], **more: Any) -> tuple[Any, ...]:
    return CacheStatus.STORAGE2GPU, task(name, keys, gpu, start_read_block_idx=0, **more)


def task(name: str, keys: list[str], gpu: list[int], **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"task_id": name, "keys": keys, "token_ids": None, "gpu_block_ids": gpu, "timeout": 60.0} | more
    )


def story(queue: EngineCacheQueue, *of: Any) -> TaskResult:
    result = queue.transfer_result(*of)
    assert result is not None
    return result


def test_bytes_go_the_whole_round_of_host_and_storage(queue: EngineCacheQueue) -> None:
    caches = [queue.client.attach(rank) for rank in range(RANKS)]
    arrays = [array for cache in caches for layers in cache.values() for array in layers]
    random = np.random.default_rng(5)
    for array in arrays:
        array[1:3] = random.integers(0, 2**16, array[1:3].shape, dtype=np.uint16)
    before = [array[1:3].copy() for array in arrays]

    queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "r1", [1, 2], [5, 6]))
    assert done(queue) == swap(CacheStatus.SWAP2CPU, "r1", [1, 2], [5, 6])
    queue.put_transfer_task(swap(CacheStatus.SWAP2GPU, "r1", [11, 12], [5, 6]))
    assert done(queue) == swap(CacheStatus.SWAP2GPU, "r1", [11, 12], [5, 6])
    queue.put_transfer_task(write("r1", ["k1", "k2"], [11, 12]))
    assert done(queue) == (CacheStatus.GPU2STORAGE, "r1", ["k1", "k2"], [11, 12])
    queue.put_transfer_task(read("r1", ["k1", "k2", "k3"], [21, 22, 23, 24]))
    assert [done(queue) for _ in range(RANKS)] == [
        (CacheStatus.STORAGE2GPU, "r1", ["k1", "k2", "k3"], [21, 22])
    ] * RANKS
    for array, expected in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array[21:23], expected)
    assert queue.result_queue_empty()
    assert queue.empty()
    assert queue.get_transfer_done_signal() is None


def test_one_id_may_be_used_again_and_again(queue: EngineCacheQueue) -> None:
    """A preempted request comes back under its id: its blocks must really be loaded again."""
    (array, *_), *_ = queue.client.attach(0).values()
    array[1] = 7
    queue.put_transfer_task(write("again", ["again"], [1]))
    assert done(queue)[3] == [1]
    for _ in range(2):
        array[2] = 0
        queue.put_transfer_task(read("again", ["again"], [2]))
        assert [done(queue)[3] for _ in range(RANKS)] == [[2]] * RANKS
        assert (array[2] == 7).all()


@pytest.mark.parametrize(
    ("operation", "item", "answers"),
    [
        ("copy_out", swap(CacheStatus.SWAP2CPU, "f", [1, 2], [1, 2]), [(CacheStatus.SWAP2CPU, "f", [], [], [])]),
        ("copy_in", swap(CacheStatus.SWAP2GPU, "f", [1, 2], [1, 2]), [(CacheStatus.SWAP2GPU, "f", [], [], [])]),
        ("copy_out", write("f", ["w1"], [1]), [(CacheStatus.GPU2STORAGE, "f", ["w1"], [])]),
        ("put", write("f", ["w2"], [1]), [(CacheStatus.GPU2STORAGE, "f", ["w2"], [])]),
        ("exists", write("f", ["w3"], [1]), [(CacheStatus.GPU2STORAGE, "f", ["w3"], [])]),
        ("copy_in", read("f", ["there"], [1]), [(CacheStatus.STORAGE2GPU, "f", ["there"], [])] * RANKS),
        ("get", read("f", ["there"], [1]), [(CacheStatus.STORAGE2GPU, "f", ["there"], [])] * RANKS),
        ("exists", read("f", ["there"], [1]), [(CacheStatus.STORAGE2GPU, "f", ["there"], [])] * RANKS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_that_fails_is_answered_with_nothing_and_named(
    queue: EngineCacheQueue, saboteur: Saboteur, operation: Any, item: tuple[Any, ...], answers: list[Any]
) -> None:
    queue.put_transfer_task(write("before", ["there"], [3]))
    assert done(queue)[3] == [3]
    for block in item[4] if item[0] is CacheStatus.SWAP2GPU else ():
        fill_host(queue, block)
    with saboteur.order(operation, 1):
        queue.put_transfer_task(item)
        assert [done(queue) for _ in answers] == answers
    result = story(queue, "f", item[0])
    assert result.status is Status.FAILED
    assert result.error is not None
    assert result.error.message.startswith("rank 1:")
    assert queue.result_queue_empty()


def test_a_task_past_its_timeout_is_answered_with_what_it_did(queue: EngineCacheQueue, saboteur: Saboteur) -> None:
    queue.put_transfer_task(write("late", ["late"], [1]))
    assert done(queue)[3] == [1]
    with saboteur.order("get", 1, "stall"):
        queue.put_transfer_task(read("late", ["late"], [2], timeout=0.1))
        assert [done(queue) for _ in range(RANKS)] == [(CacheStatus.STORAGE2GPU, "late", ["late"], [])] * RANKS
        assert story(queue, "late").status is Status.EXPIRED
    fill_host(queue, 4)
    with saboteur.order("copy_in", 0, "stall"):
        queue.put_transfer_task(swap(CacheStatus.SWAP2GPU, "stuck", [4], [4]))
        wait_until(lambda: saboteur.stalls, "the copy has begun")
        queue.clear_transfer_task()
        wait_until(lambda: queue.client.unsettled, "the rank is left behind")
        assert queue.get_transfer_done_signal() is None, "its copy may still write to the block"
    assert done(queue) == (CacheStatus.SWAP2GPU, "stuck", [], [], [])
    assert story(queue, "stuck").status is Status.CANCELLED


def test_a_put_never_waits_and_a_busy_daemon_is_asked_again(queue: EngineCacheQueue, saboteur: Saboteur) -> None:
    """The daemon takes one running task and two queued ones; the others are put all the same, and all are done."""
    with saboteur.order("put", 1, "stall"):
        for number in range(8):
            queue.put_transfer_task(write(f"busy-{number}", [f"busy-{number}"], [number]))
        while sum(queue.client.stats()["rejects"].values()) == 0:
            pass
        assert not queue.empty()
        assert queue.result_queue_empty()
    assert {done(queue)[1] for _ in range(8)} == {f"busy-{number}" for number in range(8)}
    assert queue.empty()


def test_a_refused_write_of_host_blocks_is_not_pushed_again_after_their_next_swap(
    tmp_path: Path, make: Callable[..., EngineCacheQueue], saboteur: Saboteur
) -> None:
    """The tree gives evicted host blocks to the next swap at once: a later push would store that one's bytes."""
    tree = {"cache": CACHE, "storage": {"backend": "tests.support.sabotage:SabotagedStorage"}}
    one_task = {"server": {"max_inflight_bytes": 1}}  # one alone may be larger
    with running(tree | one_task, tmp_path, name="narrow") as narrow, attached_sync(narrow.endpoint):
        queue = make(address=narrow.endpoint)
        fill_host(queue, 3)
        with saboteur.order("put", 1, "stall"):
            queue.put_transfer_task(write("first", ["first"], [1]))
            wait_until(lambda: saboteur.stalls)
            queue.put_transfer_task((CacheStatus.GPU2STORAGE, HostWrite("evicted", ["old"], [3], 0, ())))
            wait_until(lambda: queue.client.stats()["rejects"].get("bytes_in_flight"))
            queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "next", [9], [3]))
            wait_until(lambda: queue.transfer_result("next"))
        answers = {answer[1]: answer[-1] for answer in (done(queue) for _ in range(3))}
        assert answers == {"first": [1], "evicted": [], "next": [3]}
        assert story(queue, "evicted").status is Status.BUSY
        queue.put_transfer_task(read("old", ["old"], [20]))
        assert done(queue)[3] == []


def test_what_waits_before_a_busy_daemon_can_be_taken_back(queue: EngineCacheQueue, saboteur: Saboteur) -> None:
    refused = queue.client.stats()["rejects"].get("queue_full", 0)
    with saboteur.order("put", 1, "stall"):
        for number in range(6):
            queue.put_transfer_task(write(f"back-{number}", [f"back-{number}"], [number]))
        while queue.client.stats()["rejects"].get("queue_full", 0) < refused + 3:
            pass
        queue.clear_transfer_task()
        answers = [done(queue) for _ in range(6)]
    assert {answer[1] for answer in answers} == {f"back-{number}" for number in range(6)}
    assert all(answer[3] == [] for answer in answers)
    assert {story(queue, f"back-{number}").status for number in range(6)} == {Status.CANCELLED}


@pytest.mark.parametrize(
    "item",
    [
        (CacheStatus.SWAP2CPU, "bad", ["n"], None, [1]),
        (CacheStatus.SWAP2CPU, "bad", ["n"], [1, 2], [1]),
        (CacheStatus.SWAP2CPU, "bad", ["n"], [10**6], [1]),
        (CacheStatus.SWAP2CPU, "bad", ["n"], [object()], [1]),
        write("bad", ["k"], [1, 2]),
        write("bad", ["k"], [1], token_ids=["x"]),
        write("bad", ["k"], [1], timeout=-1.0),
        write("bad", ["k"], [1], timeout=None),
        write("bad", ["\ud800"], [1]),
        (CacheStatus.STORAGE2GPU, "bad", 5, [1], 1.0),
    ],
)
def test_lists_that_make_no_task_are_answered_with_nothing(queue: EngineCacheQueue, item: tuple[Any, ...]) -> None:
    queue.put_transfer_task(item)
    answer = done(queue)
    assert answer[0] is item[0]
    assert answer[-1] == []
    assert story(queue, "bad").status is Status.REJECTED


def test_an_item_of_no_known_shape_raises_at_once(queue: EngineCacheQueue) -> None:
    with pytest.raises(RequestError, match="not an item"):
        queue.put_transfer_task(("what", "ever"))
    assert queue.empty()


def test_many_threads_put_and_one_fetches(queue: EngineCacheQueue) -> None:
    names = [f"many-{number}" for number in range(200)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: queue.put_transfer_task(write(name, [name], [hash(name) % 64])), names))
    assert sorted(done(queue)[1] for _ in names) == sorted(names)


def test_a_server_instance_has_a_port_and_connects_on_first_use(
    make: Callable[..., EngineCacheQueue], monkeypatch: pytest.MonkeyPatch, daemon: DaemonProcess
) -> None:
    monkeypatch.setenv("TRANSFERD_ENDPOINT", daemon.endpoint)
    server, other = (make(address=("127.0.0.1", 0), is_server=True, client_id=-1) for _ in range(2))
    assert 0 < server.get_server_port() != other.get_server_port()
    assert make(address=("127.0.0.1", 9923), is_server=True).get_server_port() == 9923
    client = make(address=("127.0.0.1", server.get_server_port()))
    with pytest.raises(RuntimeError, match="server instance"):
        client.get_server_port()
    assert make(address="/dev/shm/fd_task_queue_1.sock", is_server=True).get_server_port() == 1
    with pytest.raises(RuntimeError, match="no port"):
        make(address="/dev/shm/another.sock", is_server=True).get_server_port()
    server.put_transfer_task(swap(CacheStatus.SWAP2CPU, "s", [1], [1]))
    assert done(server)[1] == "s"
    assert client.result_queue_empty()


@pytest.mark.parametrize(
    ("variable", "address", "endpoint"),
    [
        (None, "ipc:///tmp/a.sock", "ipc:///tmp/a.sock"),
        (None, ("10.0.0.1", 9923), "ipc:///run/transferd/transferd.sock"),
        (None, "/dev/shm/fd_task_queue_9923.sock", "ipc:///run/transferd/transferd.sock"),
        ("", "ipc:///tmp/a.sock", "ipc:///tmp/a.sock"),
        ("ipc:///tmp/b.sock", "ipc:///tmp/a.sock", "ipc:///tmp/b.sock"),
        ("ipc:///tmp/b.sock", ("10.0.0.1", 9923), "ipc:///tmp/b.sock"),
        ("ipc:///tmp/{port}-{dp}.sock", ("10.0.0.1", 9923), "ipc:///tmp/9923-3.sock"),
        ("ipc:///tmp/{dp}.sock", "/dev/shm/q.sock", "ipc:///tmp/3.sock"),
        ("ipc:///tmp/{port}.sock", "/dev/shm/fd_task_queue_9923.sock", "ipc:///tmp/9923.sock"),
    ],
)
def test_the_endpoint_follows_from_the_address_and_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, address: Any, endpoint: str
) -> None:
    if variable is not None:
        monkeypatch.setenv("TRANSFERD_ENDPOINT", variable)
    assert endpoint_of(address, 3) == endpoint


@pytest.mark.parametrize("variable", ["ipc:///{what}", "ipc:///{", "ipc:///{}", "ipc:///{port}"])
def test_a_pattern_that_cannot_be_filled_in_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("TRANSFERD_ENDPOINT", variable)
    with pytest.raises(ConfigError, match="TRANSFERD_ENDPOINT"):
        endpoint_of("/dev/shm/q.sock", 3)


def test_a_group_of_another_size_than_the_daemons_is_refused(make: Callable[..., EngineCacheQueue]) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match="2 ranks"):
        make(num_client=4)
    with pytest.raises(ConfigError, match="client_id"):
        make(client_id=2)
    assert threading.active_count() <= before


def test_a_missing_daemon_raises_like_fastdeploys_client(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="no daemon answered") as caught:
        EngineCacheQueue(f"ipc://{tmp_path}/no.sock", num_client=1, client_id=0, connect_timeout=0.2)
    assert isinstance(caught.value, NotConnected)


def test_a_lost_daemon_answers_everything(
    tmp_path: Path, make: Callable[..., EngineCacheQueue], saboteur: Saboteur, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(saboteur.file))
    with running({"cache": CACHE, "storage": {"backend": "none"}}, tmp_path, name="lost") as doomed:
        queue = make(address=doomed.endpoint)
        for rank in range(RANKS):
            queue.client.attach(rank)
        with saboteur.order("copy_out", 0, "stall"):
            queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "lost", [1], [1]))
            doomed.kill()
            assert done(queue) == (CacheStatus.SWAP2CPU, "lost", [], [], [])
        queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "after", [1], [1]))
        assert done(queue)[1] == "after"
        for name in ("lost", "after"):
            error = story(queue, name).error
            assert error is not None
            assert error.code == "daemon_lost"


def test_closing_answers_what_is_open_and_refuses_more(queue: EngineCacheQueue, saboteur: Saboteur) -> None:
    with saboteur.order("put", 0, "stall"):
        queue.put_transfer_task(write("open", ["open"], [1]))
        queue.cleanup()
        queue.close()
    assert done(queue) == (CacheStatus.GPU2STORAGE, "open", ["open"], [])
    with pytest.raises(Closed):
        queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "more", [1], [1]))
    assert queue.empty()


def test_closing_answers_nothing_whose_copy_may_still_run(queue: EngineCacheQueue, saboteur: Saboteur) -> None:
    with saboteur.order("copy_out", 0, "stall"):
        queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "open", [1], [1]))
        wait_until(lambda: saboteur.stalls)
        queue.close()
    assert queue.get_transfer_done_signal() is None
    assert not queue.empty()
    assert not story(queue, "open", CacheStatus.SWAP2CPU).settled


def test_the_newest_result_is_found_by_id_and_event(queue: EngineCacheQueue) -> None:
    queue.put_transfer_task(write("both", ["both"], [1]))
    done(queue)
    queue.put_transfer_task(read("both", ["both", "no"], [2, 3]))
    done(queue)
    assert story(queue, "both", CacheStatus.GPU2STORAGE).block_ids == [1]
    assert story(queue, "both", CacheStatus.STORAGE2GPU).block_ids == [2]
    assert story(queue, "both").block_ids == [2]
    assert queue.transfer_result("nobody") is None
    assert queue.transfer_result("both", CacheStatus.SWAP2CPU) is None


def test_a_forked_process_gets_an_error_instead_of_waiting_for_ever(queue: EngineCacheQueue) -> None:
    pid = queue._pid
    queue._pid = -1
    try:
        with pytest.raises(Closed, match="fork"):
            queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "fork", [1], [1]))
    finally:
        queue._pid = pid


def test_the_adapter_needs_nothing_of_fastdeploy_and_nothing_heavy() -> None:
    code = "import sys, transferd.adapters.fastdeploy as f; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=os.environ
    ).stdout
    assert not {"fastdeploy", "paddle", "cuda", "mooncake", "uvloop", "pickle5"} & set(out.split())


def test_a_hold_ends_when_no_task_is_at_work_and_drops_what_comes_until_a_release(
    queue: EngineCacheQueue, saboteur: Saboteur
) -> None:
    """FastDeploy resets its tree while it is paused: an answer that came later would name nodes that are gone."""
    with saboteur.order("copy_out", 0, "stall"), concurrent.futures.ThreadPoolExecutor(1) as other:
        queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "at work", [1], [1]))
        wait_until(lambda: queue.client.stats()["running"])
        holding = other.submit(queue.hold)
        wait_until(lambda: queue._paused)
        queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "too late", [2], [2]))
        assert done(queue) == (CacheStatus.SWAP2CPU, "too late", [], [], [])
        assert not holding.done()
        saboteur.lift()
        assert done(queue)[1] == "at work"
        assert queue.get_transfer_done_signal() is None  # an engine asks again and again
        holding.result(WAIT_S)
    assert queue.client.stats()["running"] == queue.client.stats()["queued"] == 0
    queue.release()
    queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "goes on", [1], [1]))
    assert done(queue)[1:] == ("goes on", ["node-1"], [1], [1])


def test_a_hold_waits_until_the_engine_has_handled_every_answer(queue: EngineCacheQueue) -> None:
    queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "answered", [1], [1]))
    assert done(queue)[1] == "answered"  # taken, and perhaps still being worked on
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        holding = other.submit(queue.hold)
        wait_until(lambda: queue._paused and queue.empty())
        assert not holding.done()
        assert queue.get_transfer_done_signal() is None
        holding.result(WAIT_S)
    queue.release()


def test_a_control_request_without_the_plugin_is_refused(queue: EngineCacheQueue) -> None:
    request = SimpleNamespace(method="pause", request_id="pause", args={})
    with pytest.raises(RequestError, match="needs FastDeploy's plugin"):
        queue.put_transfer_task((SimpleNamespace(name="CTRL", value=-1), request))


def test_a_queue_says_whether_a_daemon_answers_and_the_daemon_says_that_an_engine_was_lost(
    tmp_path: Path, daemon: DaemonProcess, queue: EngineCacheQueue
) -> None:
    assert queue.connected
    before = queue.client.stats()["server"]["clients_lost"]
    code = f"""
from transferd.adapters.fastdeploy import EngineCacheQueue
from tests.adapters.test_fastdeploy_queue import CacheStatus, done, swap
import os
queue = EngineCacheQueue({daemon.endpoint!r}, num_client={RANKS}, client_id=0)
queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "last words", [60], [60]))
assert done(queue)[1] == "last words"
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
    wait_until(lambda: queue.client.stats()["server"]["clients_lost"] > before, "the daemon has noticed")
    queue.close()
    assert not queue.connected


def test_after_a_restart_of_the_daemon_transfers_wait_until_the_engine_has_attached_again(tmp_path: Path) -> None:
    tree = {"cache": CACHE | {"device": "shm"}, "host": {"staging": "256KiB"}, "storage": {"backend": "memory"}}
    doomed = start(tree, tmp_path)
    queue = EngineCacheQueue(doomed.endpoint, num_client=RANKS, client_id=0)
    try:
        for rank in range(RANKS):
            queue.client.attach(rank)
        doomed.kill()
        with running(tree, tmp_path):
            give_up = time.monotonic() + WAIT_S
            while not queue.client.outdated:
                assert time.monotonic() < give_up, "the queue has not noticed"
            queue.client.wait_ready(WAIT_S)
            queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "old", [1], [1]))
            assert done(queue) == (CacheStatus.SWAP2CPU, "old", [], [], [])
            told = queue.transfer_result("old")
            assert told is not None
            assert told.error is not None
            assert told.error.code == "not_attached"
            assert sorted(queue.client.reattach()) == list(range(RANKS))
            queue.put_transfer_task(swap(CacheStatus.SWAP2CPU, "new", [1], [1]))
            assert done(queue)[2:] == (["node-1"], [1], [1])
    finally:
        doomed.kill()
        queue.close()
