"""TransferdL2 over a real daemon that it starts, without LMCache: its interface, its slots, what it does not serve."""

from __future__ import annotations

import hashlib
import logging
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support import fake_lmcache as lmcache
from tests.support.blobs import overwrite
from tests.support.fake_lmcache import FLOAT16, UINT8, MemoryObj, ObjectKey
from tests.support.page_cache import tells_what_it_has
from tests.support.waits import wait_until

pytestmark = pytest.mark.one_loop

PATIENCE_MS = 60_000
LARGE: tuple[list[tuple[int, ...]], list[lmcache.Dtype]] = ([(2, 3, 4992)], [FLOAT16])
EVEN: tuple[list[tuple[int, ...]], list[lmcache.Dtype]] = ([(64,), (1024,)], [FLOAT16, UINT8])  # 64 bytes each time
SMALL: tuple[list[tuple[int, ...]], list[lmcache.Dtype]] = ([(17,), (1001,)], [FLOAT16, UINT8])


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes adapters as LMCache does, and closes them."""
    place = Path(tempfile.mkdtemp(prefix="tl."))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.delenv("TRANSFERD_ENDPOINT", raising=False)
    made: list[Any] = []
    with lmcache.installed():
        from transferd.adapters.lmcache import TransferdL2

        def adapter(l1: Any = None, **params: Any) -> Any:
            given = {"weights": "tiny", "buffer": "1MiB", "capacity": "64MiB"} | params
            made.append(TransferdL2(given, l1_memory_desc=l1))
            return made[-1]

        yield adapter
        for one in reversed(made):  # the first one's daemon serves all
            one.close()
    shutil.rmtree(place, ignore_errors=True)


def keys(count: int, group: int = 0, **more: Any) -> list[ObjectKey]:
    return [ObjectKey(hashlib.sha256(bytes([i])).digest(), object_group_id=group, **more) for i in range(count)]


def objects(count: int, kind: Any, seed: int | None = None) -> list[MemoryObj]:
    made = [MemoryObj(*kind) for _ in range(count)]
    for i, one in enumerate(made):
        if seed is not None:
            one.bytes[:] = np.random.default_rng([seed, i]).integers(0, 256, one.bytes.nbytes, dtype=np.uint8)
    return made


def answered(event: int, result: Callable[[], Any]) -> Any:
    """What LMCache's poller does: wait for the eventfd, then fetch."""
    poller = select.poll()
    poller.register(event, select.POLLIN)
    while (found := result()) is None:
        assert poller.poll(PATIENCE_MS), "no event, and no result"
        os.read(event, 4096)
    return found


def store(l2: Any, named: Sequence[ObjectKey], given: Sequence[MemoryObj]) -> int:
    task = l2.submit_store_task(named, given)
    return int(answered(l2.get_store_event_fd(), lambda: l2.pop_completed_store_tasks().get(task)))


def find(l2: Any, named: Sequence[ObjectKey], layouts: dict[int, Any]) -> list[bool]:
    task = l2.submit_lookup_and_lock_task(named, layouts)
    bits: list[bool] = answered(l2.get_lookup_and_lock_event_fd(), lambda: l2.query_lookup_and_lock_result(task)).bits
    return bits


def load(l2: Any, named: Sequence[ObjectKey], given: Sequence[MemoryObj]) -> list[bool]:
    task = l2.submit_load_task(named, given)
    bits: list[bool] = answered(l2.get_load_event_fd(), lambda: l2.query_load_result(task)).bits
    return bits


def hurry(l2: Any, seconds: float = 0.5) -> None:
    """Give an adapter's kinds so much time from now on: what a test stores before may take as long as a disk needs."""
    for one in l2._attached.values():
        one._chosen = replace(one._chosen, timeout=seconds, load_timeout=seconds)
        one._writes._timeout = one._reads._timeout = seconds


def test_objects_of_two_sizes_in_one_batch_come_back_with_their_bytes(make: Callable[..., Any]) -> None:
    l2 = make()
    named = [*keys(40), *keys(40, group=1)]
    given = [*objects(40, LARGE, seed=1), *objects(40, SMALL, seed=2)]  # more than there are slots of the large ones
    assert store(l2, named, given) == sum(one.bytes.nbytes for one in given)
    assert len(l2.stored) == 80
    layouts = {0: lmcache.layout(given[0]), 1: lmcache.layout(given[-1])}
    missing = [*keys(41)[40:], *keys(41, group=1)[40:], *keys(1, group=2)]
    assert find(l2, [*named, *missing], layouts) == [True] * 80 + [False] * 3
    empty = [*objects(40, LARGE), *objects(40, SMALL), *objects(1, LARGE), *objects(1, SMALL)]
    assert load(l2, [*named, *missing[:2]], empty) == [True] * 80 + [False] * 2
    assert all(np.array_equal(one.bytes, other.bytes) for one, other in zip(given, empty, strict=False))
    assert not any(one.bytes.any() for one in empty[80:])
    assert len({l2.get_store_event_fd(), l2.get_lookup_and_lock_event_fd(), l2.get_load_event_fd()}) == 3


def test_an_object_that_does_not_fill_its_layout_is_not_stored_and_logged_once(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    l2, given = make(), objects(3, LARGE, seed=1)
    for one in given[:2]:
        one.used = 100
    with caplog.at_level(logging.WARNING, "lmcache.transferd"):
        assert store(l2, keys(3), given) == -1
    assert sum("serde" in one.message for one in caplog.records) == 1
    assert find(l2, keys(3), {0: lmcache.layout(given[0])}) == [False, False, True]


def test_only_so_many_kinds_are_served(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    l2 = make()
    monkeypatch.setattr("transferd.adapters.lmcache.l2.MOST_KINDS", 1)
    with caplog.at_level(logging.WARNING, "lmcache.transferd"):
        assert store(l2, keys(2), objects(2, LARGE, seed=1)) > 0
        assert store(l2, keys(2), objects(2, SMALL, seed=1)) == -1
        assert store(l2, keys(2), objects(2, SMALL, seed=1)) == -1
    assert sum("1 models and layouts" in one.message for one in caplog.records) == 1


def test_a_kind_that_is_only_in_the_books_gives_way_to_one_that_is_stored(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = make()
    assert store(earlier, keys(2), objects(2, LARGE, seed=1)) > 0
    monkeypatch.setattr("transferd.adapters.lmcache.l2.MOST_KINDS", 1)
    l2, given = make(), objects(2, SMALL, seed=2)
    wait_until(lambda: l2.get_usage() and l2._attached, "the books are compared")
    assert store(l2, keys(2, group=1), given) > 0
    l2.delete(keys(1, group=1))
    assert find(l2, keys(2, group=1), {1: lmcache.layout(given[0])}) == [False, True]
    assert store(l2, keys(2), objects(2, LARGE, seed=1)) == -1, "the small ones are in use"


def test_a_deleted_object_is_gone_and_its_bytes_no_longer_count(make: Callable[..., Any]) -> None:
    l2, given = make(), objects(4, LARGE, seed=1)
    store(l2, keys(4), given)
    before = l2.get_usage()
    assert before.total_bytes_used > 4 * given[0].bytes.nbytes
    assert before.total_capacity_bytes == 64 * 2**20
    l2.delete(keys(2))
    assert find(l2, keys(4), {0: lmcache.layout(given[0])}) == [False, False, True, True]
    assert l2.get_usage().total_bytes_used == before.total_bytes_used // 2
    assert len(l2.deleted) == 2


def test_a_request_under_a_suspended_daemon_ends_and_leaves_its_buffers_alone(make: Callable[..., Any]) -> None:
    l2, given = make(), objects(20, LARGE, seed=1)
    assert store(l2, keys(20), given) > 0
    hurry(l2)
    daemon = l2._finder.started.process.pid
    (kind,) = l2._attached.values()
    os.kill(daemon, signal.SIGSTOP)
    try:
        empty = objects(20, LARGE)
        assert not any(load(l2, keys(20), empty))
        assert store(l2, keys(20, cache_salt="x"), given) == -1
        assert find(l2, keys(20), {0: lmcache.layout(given[0])}) == [False] * 20
    finally:
        os.kill(daemon, signal.SIGCONT)
    hurry(l2, 30.0)
    wait_until(lambda: len(kind.slots._free) == kind.slots.count, "slots are not free again", within=60)
    assert not any(one.bytes.any() for one in empty)
    wait_until(lambda: all(load(l2, keys(20), empty)), "the daemon serves again, but not this adapter", within=60)
    assert all(np.array_equal(one.bytes, other.bytes) for one, other in zip(given, empty, strict=True))


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_lookup_has_locked_is_read_without_the_daemon_until_it_is_unlocked(
    make: Callable[..., Any], in_place: bool
) -> None:
    """In place, LMCache's memory is private here; a request is answered by its deadline all the same."""
    if not tells_what_it_has(Path(tempfile.gettempdir())):
        pytest.skip("the file system cannot say what the page cache has")
    l2 = make(load_timeout=0.5, in_place=in_place)
    named, given = [*keys(20), *keys(20, group=1)], [*objects(20, LARGE, seed=1), *objects(20, EVEN, seed=2)]
    assert store(l2, named, given) > 0
    layouts = {0: lmcache.layout(given[0]), 1: lmcache.layout(given[-1])}
    assert all(find(l2, named, layouts))
    path = _file_of(given[3].bytes.tobytes())
    path.rename(elsewhere := path.with_suffix(".elsewhere"))
    daemon = l2._finder.started.process.pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        empty = [*objects(20, LARGE), *objects(20, EVEN)]
        assert load(l2, named[4:], empty[4:]) == [True] * 36
        assert all(np.array_equal(one.bytes, other.bytes) for one, other in zip(given[4:], empty[4:], strict=True))
        assert load(l2, named[2:6], empty[2:6]) == [True, False, True, True], "it is for the daemon to find out"
        l2.submit_unlock(named[8:])
        wait_until(lambda: sum(len(one.leases._held) for one in l2._attached.values()) == 8, "they are still leased")
        assert not any(load(l2, named[8:12], empty[8:12]))
    finally:
        elsewhere.rename(path)
        os.kill(daemon, signal.SIGCONT)
    wait_until(lambda: all(load(l2, named, empty)), "the daemon serves again, but not this adapter", within=60)
    assert all(np.array_equal(one.bytes, other.bytes) for one, other in zip(given, empty, strict=True))


def test_an_unlock_of_many_objects_is_one_request(make: Callable[..., Any]) -> None:
    """The daemon lets 256 requests of a client wait; with more, objects stayed pinned and lookups missed."""
    l2, given = make(), objects(200, SMALL, seed=1)
    assert store(l2, keys(200), given) > 0
    assert all(find(l2, keys(200), {0: lmcache.layout(given[0])}))
    before = l2._report()
    assert before["storage"]["pinned"] == 200
    l2.submit_unlock(keys(200))
    pinned: list[int] = []

    def unpinned() -> bool:
        pinned.append(l2._report()["storage"]["pinned"])
        return not pinned[-1]

    wait_until(unpinned, "they are still pinned")
    messages = l2._report()["server"]["messages"] - before["server"]["messages"]
    assert messages - len(pinned) < 100, "without our own questions"


def test_damage_that_the_reader_finds_is_found_and_counted_by_the_daemon(make: Callable[..., Any]) -> None:
    l2, given = make(), objects(4, LARGE, seed=1)
    assert store(l2, keys(4), given) > 0
    assert all(find(l2, keys(4), {0: lmcache.layout(given[0])}))
    one, other = _file_of(given[1].bytes.tobytes()), _file_of(given[2].bytes.tobytes())
    content = bytearray(one.read_bytes())
    overwrite(other, content)  # whole, and another object's
    content[5] ^= 1
    overwrite(one, content)
    empty = objects(4, LARGE)
    assert load(l2, keys(4), empty) == [True, False, False, True]
    assert all(np.array_equal(given[i].bytes, empty[i].bytes) for i in (0, 3))
    wait_until(lambda: l2._report()["storage"]["corrupt"] == 2, "the daemon has not noticed")
    assert find(l2, keys(4), {0: lmcache.layout(given[0])}) == [True, False, False, True]


def _file_of(content: bytes) -> Path:
    """The file of the object with this content."""
    files = (one for one in Path(os.environ["XDG_CACHE_HOME"]).rglob("*@0") if "objects" in one.parts)
    return next(one for one in files if one.read_bytes().startswith(content))


class Listener:
    """As LMCache's order of use is one."""

    def __init__(self) -> None:
        self.stored: list[tuple[ObjectKey, int]] = []

    def on_l2_keys_stored(self, named: list[ObjectKey], sizes: list[int]) -> None:
        self.stored += zip(named, sizes, strict=True)


def test_after_a_restart_lmcache_has_its_books_and_can_delete(make: Callable[..., Any]) -> None:
    first, given = make(), objects(5, LARGE, seed=1)
    alice = keys(5, cache_salt="alice")
    store(first, alice, given)
    store(first, keys(2), given[:2])
    store(first, alice, given)
    size = given[0].bytes.nbytes
    assert first.get_usage().bytes_by_cache_salt == {"alice": 5 * size, "": 2 * size}, "nothing counts twice"
    assert len(first.stored) == 7
    first.close()
    second, listener = make(), Listener()
    second.register_listener(listener)
    assert listener.stored == [(key, size) for key in [*alice, *keys(2)]]
    wait_until(lambda: second.get_usage().total_bytes_used > 7 * size, "the daemon has found less", within=60)
    usage = second.get_usage()
    assert usage.bytes_by_cache_salt == {"alice": 5 * size, "": 2 * size}
    assert usage.total_capacity_bytes == 64 * 2**20
    second.delete(alice[:3])
    assert [key for key, _ in second.deleted] == alice[:3]
    assert second.get_usage().bytes_by_cache_salt == {"alice": 2 * size, "": 2 * size}
    assert find(second, alice, {0: lmcache.layout(given[0])}) == [False] * 3 + [True] * 2


def test_what_the_store_has_lost_leaves_the_books(make: Callable[..., Any]) -> None:
    first, other, given = make(name="one"), make(name="other"), objects(6, LARGE, seed=1)
    store(first, keys(6), given)
    assert all(find(other, keys(6), {0: lmcache.layout(given[0])}))
    assert len(other.stored) == 6, "what others have stored counts, too"
    other.delete(keys(2))
    wait_until(lambda: first.get_usage().bytes_by_cache_salt == {"": 4 * given[0].bytes.nbytes}, "the books are wrong")
    assert [key for key, _ in first.deleted] == keys(2)


def test_a_delete_without_an_answer_raises_nothing_and_is_done_later(make: Callable[..., Any]) -> None:
    l2, given = make(), objects(4, LARGE, seed=1)
    store(l2, keys(4), given)
    (kind,) = l2._attached.values()
    assert l2.get_usage().total_capacity_bytes == 64 * 2**20
    os.kill(ended := l2._finder.started.process.pid, signal.SIGKILL)
    l2.delete(keys(2))
    l2.delete(keys(2))
    assert l2.get_usage().total_capacity_bytes == 64 * 2**20, "the last that was known"
    wait_until(lambda: kind.link.ready and l2._finder.started.process.pid != ended, "no new daemon", within=60)
    assert find(l2, keys(4), {0: lmcache.layout(given[0])})[:2] == [False] * 2
    wait_until(lambda: len(l2.deleted) == 2, "the objects were never removed", within=60)
    assert find(l2, keys(4), {0: lmcache.layout(given[0])}) == [False, False, True, True]
    assert store(l2, keys(2), given[:2]) > 0
    assert all(find(l2, keys(4), {0: lmcache.layout(given[0])}))


def test_two_servers_of_one_name_use_one_daemon(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [iter(range(10)), iter(range(10))]  # as in two containers
    servers = []
    for mine in numbers:
        monkeypatch.setattr("transferd.adapters.lmcache.l2.ENGINES", mine)
        servers.append(make(name="lmcache"))
        store(servers[-1], keys(1), objects(1, LARGE, seed=1))
    wait_until(lambda: all(one.report_status()["is_healthy"] for one in servers), "one has no daemon", within=60)
    names = [name for one in servers for name in one.report_status()["engines"]]
    assert names[0] == "lmcache-0"
    assert names[1].startswith("lmcache-0-")
    given = objects(5, LARGE, seed=2)
    assert store(servers[0], keys(5, cache_salt="a"), given) > 0
    assert find(servers[1], keys(5, cache_salt="a"), {0: lmcache.layout(given[0])}) == [True] * 5


def test_damaged_books_cost_what_they_say_and_no_object(make: Callable[..., Any], tmp_path: Path) -> None:
    l2, given = make(path=str(tmp_path)), objects(3, LARGE, seed=1)
    store(l2, keys(3), given)
    l2.close()
    (file,) = tmp_path.glob("books-*.jsonl")
    lines = file.read_text(encoding="ascii").splitlines(keepends=True)
    file.write_text(lines[0] + "[1, 2]\nnonsense\n" + lines[1] + lines[2][:20], encoding="ascii")
    l2 = make(path=str(tmp_path))
    assert l2.get_usage().bytes_by_cache_salt == {"": 2 * given[0].bytes.nbytes}
    assert all(find(l2, keys(3), {0: lmcache.layout(given[0])}))
    assert l2.get_usage().bytes_by_cache_salt == {"": 3 * given[0].bytes.nbytes}
