"""TransferdL2 under LMCache's real StorageManager, by sha256: several sizes, restarts, kills, damage, users, models."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc

from tests.machine.with_lmcache.managers import GROUPS, UNIFORM, Server, content_of
from tests.support.waits import wait_until

CHUNKS = list(range(12))
SIZES = {0: 65536, 1: 24576, 2: 20021}  # of the objects of GROUPS
Make = Callable[..., Server]


@pytest.fixture
def make(place: Path) -> Iterator[Make]:
    """Starts servers, and closes those that the test has not closed."""
    del place
    made: list[Server] = []

    def one(groups: dict[int, Any] = GROUPS, **more: Any) -> Server:
        made.append(Server(groups, **more))
        return made[-1]

    yield one
    for server in reversed(made):  # the first one's daemon serves all
        server.close()


def daemon_of(server: Server) -> int:
    process = server.l2._finder.started.process
    assert process is not None
    return int(process.pid)


def kill_daemon(server: Server) -> int:
    daemon = daemon_of(server)
    os.kill(daemon, signal.SIGKILL)
    return daemon


def next_daemon(server: Server, killed: int) -> None:
    """Wait until another one serves every engine."""
    wait_until(lambda: daemon_of(server) != killed, "no daemon was started again", within=60)
    wait_until(lambda: server.l2.report_status()["is_healthy"], "it does not serve", within=60)


def of(server: Server, digests: dict[tuple[int, int], str], chunks: list[int]) -> dict[tuple[int, int], str]:
    return {(group, chunk): digests[group, chunk] for group in server.groups for chunk in chunks}


IN_PLACE = {"private": False, "in_place": True}
KINDS_OF_L1 = pytest.mark.parametrize(
    "l1", [{}, {"private": False}, IN_PLACE], ids=["private-L1", "shared-L1", "in-place"]
)


@KINDS_OF_L1
@pytest.mark.parametrize("groups", [UNIFORM, GROUPS], ids=["one-size", "three-sizes"])
def test_a_server_gets_the_bytes_that_an_earlier_one_stored(
    make: Make, groups: dict[int, Any], l1: dict[str, Any]
) -> None:
    first = make(groups, **l1)
    digests = first.save(CHUNKS)
    first.stored(len(groups) * len(CHUNKS))
    first.close()  # its daemon ends with it
    second = make(groups, **l1)
    assert {one.windows for one in first.l2._attached.values()} == {l1 == IN_PLACE}
    assert second.fetch([*CHUNKS, 99]) == of(second, digests, CHUNKS)
    assert second.fetch([98, 99]) == {}


def test_an_emptied_l1_is_filled_again_and_each_group_has_an_engine_of_its_size(make: Make) -> None:
    server = make()
    digests = server.save(CHUNKS)
    server.stored(3 * len(CHUNKS))
    server.forget()
    assert server.fetch(CHUNKS) == digests
    sizes = sorted(one.kind.nbytes for one in server.l2._attached.values())
    assert sizes == [20021, 24576, 65536]


def test_models_salts_generations_and_weights_are_kept_apart(make: Make) -> None:
    server = make()
    digests = server.save(CHUNKS)
    server.stored(3 * len(CHUNKS))
    different: list[dict[str, Any]] = [
        {"model": "other"},
        {"salt": "someone-else"},
        {"generation": "step-2"},
        {"weights": "retrained"},
    ]
    for one in different:
        other = make(**one)
        assert other.fetch(CHUNKS) == {}, one
        assert other.l2.report_status()["is_healthy"], "it was not asked"
        other.close()
    reshaped = GROUPS | {0: MemoryLayoutDesc([torch.Size([2, 64, 4, 64])], GROUPS[0].dtypes)}
    assert not any(group == 0 for group, _ in make(reshaped).fetch(CHUNKS)), "the same size in another shape"
    assert make().fetch(CHUNKS) == digests


@KINDS_OF_L1
def test_a_killed_daemon_costs_misses_and_the_next_one_serves(make: Make, l1: dict[str, Any]) -> None:
    server = make(**l1)
    digests = server.save(CHUNKS)
    server.stored(3 * len(CHUNKS))
    killed = kill_daemon(server)
    server.forget()
    got = server.fetch(CHUNKS)  # as few as it finds, and no wrong one
    assert got.items() <= digests.items()
    next_daemon(server, killed)
    server.forget()
    assert server.fetch(CHUNKS) == digests


@KINDS_OF_L1
def test_a_daemon_killed_in_the_middle_of_stores_leaves_no_wrong_bytes(make: Make, l1: dict[str, Any]) -> None:
    server = make(**l1)
    digests = server.save([0], seed=3)
    server.stored(3)
    digests |= server.save(list(range(1, 40)), seed=3)
    wait_until(lambda: server.objects() > 6)
    next_daemon(server, kill_daemon(server))
    server.forget()
    got = server.fetch(list(range(40)))
    assert got.items() <= digests.items()
    assert (0, 0) in got, "what was stored before is there"


def test_a_suspended_daemon_gets_no_hold_of_lmcaches_memory(make: Make) -> None:
    server = make(load_timeout=1.0)
    server.save(CHUNKS)
    server.stored(3 * len(CHUNKS))
    server.forget()
    l2 = server.l2
    keys = server.keys(0, CHUNKS)
    objects = server.manager.reserve_write(keys, GROUPS[0])
    buffers = [objects[key] for key in keys]
    daemon = daemon_of(server)
    os.kill(daemon, signal.SIGSTOP)
    try:
        task = l2.submit_load_task(keys, buffers)
        found: list[Bitmap] = []
        wait_until(lambda: found.append(l2.query_load_result(task)) or found[-1] is not None, within=60)
        assert found[-1].popcount() == 0
        for one in buffers:
            memoryview(one.byte_array).cast("B")[:] = b"\x5a" * one.get_size()  # LMCache gives them to others now
    finally:
        os.kill(daemon, signal.SIGCONT)
    slots = l2._attached[next(kind for kind in l2._attached if kind.nbytes == buffers[0].get_size())].slots
    wait_until(lambda: len(slots._free) == slots.count, "the late load has not been settled", within=60)
    assert all(bytes(one.byte_array) == b"\x5a" * one.get_size() for one in buffers)
    server.manager.finish_write(keys)


def test_in_place_no_byte_outside_of_the_objects_is_touched(make: Make) -> None:
    """All of L1, where LMCache has it: the objects of a fetch, each once, and nothing else has changed."""
    server = make(**IN_PLACE)
    digests = server.save(CHUNKS)
    server.stored(3 * len(CHUNKS))
    server.forget()
    l1 = server.l2._l1
    arena = np.ctypeslib.as_array((ctypes.c_uint8 * l1.mapped.nbytes).from_address(l1.address))
    arena[:] = 0xA5
    expected = arena.copy()
    assert server.fetch(CHUNKS) == digests
    for group, chunk in digests:
        content = np.frombuffer(content_of(group, chunk, 0, SIZES[group]), dtype=np.uint8)
        starts = [at for at in range(0, len(arena) - len(content) + 1, l1.align) if arena[at] == content[0]]
        (start,) = [at for at in starts if np.array_equal(arena[at : at + len(content)], content)]
        expected[start : start + len(content)] = content
    assert np.array_equal(arena, expected)


def test_in_place_a_suspended_daemon_is_waited_for_and_then_lets_go(make: Make) -> None:
    server = make(load_timeout=1.0, **IN_PLACE)
    server.save(CHUNKS)
    server.stored(3 * len(CHUNKS))
    server.forget()
    l2 = server.l2
    keys = server.keys(0, CHUNKS)
    objects = server.manager.reserve_write(keys, GROUPS[0])
    buffers = [objects[key] for key in keys]
    daemon = daemon_of(server)
    os.kill(daemon, signal.SIGSTOP)
    found: list[Bitmap | None] = []
    try:
        task = l2.submit_load_task(keys, buffers)
        looked, there = l2.submit_lookup_and_lock_task(keys, GROUPS), []
        wait_until(lambda: there.append(l2.query_lookup_and_lock_result(looked)) or there[-1] is not None, within=60)
        assert there[-1].popcount() == 0, "a question has its own time"
        assert l2.query_load_result(task) is None
    finally:
        os.kill(daemon, signal.SIGCONT)
    wait_until(lambda: found.append(l2.query_load_result(task)) or found[-1] is not None, within=60)
    for one in buffers:
        memoryview(one.byte_array).cast("B")[:] = b"\x5a" * one.get_size()  # LMCache gives them to others now
    looked, there = l2.submit_lookup_and_lock_task(keys, GROUPS), []
    wait_until(lambda: there.append(l2.query_lookup_and_lock_result(looked)) or there[-1] is not None, within=60)
    assert there[-1].popcount() == len(keys), "the daemon has come to what was asked later"
    assert all(bytes(one.byte_array) == b"\x5a" * one.get_size() for one in buffers)
    server.manager.finish_write(keys)


def test_damaged_objects_are_misses(make: Make, place: Path) -> None:
    server = make(UNIFORM)
    digests = server.save(CHUNKS)
    server.stored(len(CHUNKS))
    server.close()
    files = sorted(path for path in (place / "cache" / "transferd" / "lmcache" / "blocks").rglob("*") if path.is_file())
    objects = [path for path in files if path.stat().st_size > 65536]
    assert len(objects) == len(CHUNKS)
    for path in objects[:5]:
        with path.open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)
            file.seek(1000)
            file.write(bytes([byte[0] ^ 1]))
    second = make(UNIFORM)
    got = second.fetch(CHUNKS)
    for _ in range(5):  # LMCache keeps the prefix; what follows it is asked for on its own
        for chunk in CHUNKS:
            got |= second.fetch([chunk])
    assert len(got) == len(CHUNKS) - 5
    assert got.items() <= digests.items()


def test_what_is_deleted_is_gone_and_nothing_else(make: Make) -> None:
    server = make()
    digests = server.save(CHUNKS)
    server.stored(3 * len(CHUNKS))
    server.forget()
    server.l2.delete(server.keys(0, CHUNKS[6:]))
    assert server.objects() == 3 * len(CHUNKS) - 6
    assert server.fetch(CHUNKS) == of(server, digests, CHUNKS[:6])


def test_a_quota_holds_after_a_silent_daemon_and_after_a_restart_of_lmcache(make: Make) -> None:
    """LMCache's loop of evictions ends with the first exception, and knows of its own process only."""
    quota = 4 * SIZES[0]
    server = make(UNIFORM, salt="alice", quotas={"alice": 100 * quota})
    server.save(CHUNKS)
    server.stored(len(CHUNKS))
    os.kill(daemon := daemon_of(server), signal.SIGKILL)
    server.manager.quota_manager.set_quota("alice", quota)  # LMCache begins to delete, and no daemon answers
    wait_until(lambda: server.l2._deleting, "LMCache has deleted nothing", within=60)
    wait_until(lambda: daemon_of(server) != daemon and server.objects() * SIZES[0] < quota, "over its quota", within=60)
    server.close()
    restarted = make(UNIFORM, salt="alice", quotas={"alice": 100 * quota})
    restarted.save(range(100, 103))
    restarted.stored(4)
    left = restarted.l2.get_usage().bytes_by_cache_salt["alice"]
    assert left >= restarted.objects() * SIZES[0], "what was stored before the restart counts"
    restarted.manager.quota_manager.set_quota("alice", 2 * SIZES[0])
    wait_until(lambda: restarted.objects() < 2, "what was stored before the restart is not evicted", within=60)


def test_what_a_lookup_has_locked_is_pinned_until_the_last_unlock(make: Make) -> None:
    server = make(UNIFORM)
    server.save(CHUNKS)
    server.stored(len(CHUNKS))
    l2, keys = server.l2, server.keys(0, CHUNKS)

    def pinned() -> int:
        return int(l2.report_status()["storage"]["pinned"])

    def locked() -> None:
        task, found = l2.submit_lookup_and_lock_task(keys, UNIFORM), []
        wait_until(lambda: found.append(l2.query_lookup_and_lock_result(task)) or found[-1] is not None)
        assert found[-1].popcount() == len(keys)
        assert l2.query_lookup_and_lock_result(task) is None, "a result is given once"

    locked()
    locked()
    assert pinned() == len(keys)
    l2.submit_unlock(keys)
    l2.submit_unlock(keys[:4])
    wait_until(lambda: pinned() == len(keys) - 4)
    l2.submit_unlock(keys)
    wait_until(lambda: pinned() == 0)


def test_without_a_daemon_everything_is_a_miss(make: Make, place: Path) -> None:
    server = make(UNIFORM, endpoint=f"ipc://{place}/nobody.sock", start_timeout=0.1)
    server.save(CHUNKS)
    assert server.fetch([98, 99]) == {}
    assert not server.l2.report_status()["is_healthy"]
