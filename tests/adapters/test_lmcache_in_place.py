"""TransferdL2 with `in_place`, over a real daemon: objects of two sizes are moved in one arena; every byte compared."""

from __future__ import annotations

import logging
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.adapters.test_lmcache_l2 import LARGE, SMALL, answered, find, hurry, keys, load, make, objects, store
from tests.support import fake_lmcache as lmcache
from tests.support.fake_lmcache import MemoryObj
from tests.support.waits import wait_until
from transferd.adapters.common import link

__all__ = ["make"]  # a fixture
pytestmark = pytest.mark.one_loop

STEP, ARENA = 4096, 8 * 2**20
GUARD = 0xA5


@pytest.fixture
def arena() -> Iterator[npt.NDArray[np.uint8]]:
    """LMCache's L1 in shared memory, full of a guard pattern."""
    fd = os.memfd_create("l1", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ARENA)
    raw = np.frombuffer(mmap.mmap(fd, ARENA), dtype=np.uint8)
    raw[:] = GUARD
    yield raw
    os.close(fd)


def described(arena: npt.NDArray[np.uint8]) -> SimpleNamespace:
    """An L1MemoryDesc."""
    return SimpleNamespace(ptr=arena.ctypes.data, size=arena.nbytes, align_bytes=STEP)


def placed(arena: npt.NDArray[np.uint8], at: int, made: list[MemoryObj]) -> int:
    """Put objects into the arena one behind the other, as LMCache's allocator does. Returns where the next one goes."""
    for one in made:
        content, nbytes = one.bytes, one.bytes.nbytes
        one.bytes = arena[at : at + nbytes]
        one.bytes[:] = content
        at += -(-nbytes // STEP) * STEP
    return at


def test_objects_of_two_sizes_are_stored_from_and_loaded_to_where_they_are(
    make: Callable[..., Any], arena: npt.NDArray[np.uint8]
) -> None:
    l2 = make(in_place=True, l1=described(arena))
    large, small = objects(30, LARGE, seed=1), objects(30, SMALL, seed=2)
    mixed = [one for both in zip(large, small, strict=True) for one in both]
    end = placed(arena, 3 * STEP, mixed)
    before = arena.copy()
    named = [*keys(30), *keys(30, group=1)]
    given = [*large, *small]
    assert store(l2, named, given) == sum(one.bytes.nbytes for one in given)
    assert np.array_equal(arena, before)
    layouts = {0: lmcache.layout(large[0]), 1: lmcache.layout(small[0])}
    missing = keys(1, group=2)
    assert find(l2, [*named, *missing], layouts) == [True] * 60 + [False]
    empty = [*objects(30, SMALL), *objects(30, LARGE)]
    placed(arena, end + STEP, empty)
    expected = arena.copy()
    wanted = [*empty[30:], *empty[:30]]
    for one, source in zip(wanted, given, strict=True):
        start = one.bytes.ctypes.data - arena.ctypes.data
        expected[start : start + source.bytes.nbytes] = source.bytes
    assert load(l2, named, wanted) == [True] * 60
    assert np.array_equal(arena, expected), "every byte, also those beside the objects"
    assert {one.windows for one in l2._attached.values()} == {True}


def test_objects_elsewhere_than_in_the_arena_are_neither_stored_nor_loaded(
    make: Callable[..., Any], arena: npt.NDArray[np.uint8], caplog: pytest.LogCaptureFixture
) -> None:
    l2 = make(in_place=True, l1=described(arena))
    inside, outside = objects(2, LARGE, seed=1), objects(1, LARGE, seed=2)
    placed(arena, 0, inside)
    with caplog.at_level(logging.WARNING, "lmcache.transferd"):
        assert store(l2, keys(3), [*inside, *outside]) == -1
    assert "1 of 3 objects of tiny do not lie in LMCache's L1" in caplog.messages[-1]
    inside[1].bytes = arena[STEP // 2 :][: inside[1].bytes.nbytes]  # between two windows
    assert store(l2, keys(2), inside) == -1
    assert find(l2, keys(3), {0: lmcache.layout(inside[0])}) == [False] * 3


@pytest.mark.parametrize("l1", ["private", "none"])
def test_private_memory_is_copied_and_one_line_names_the_setting(
    l1: str, make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    private = np.zeros(ARENA, dtype=np.uint8)
    with caplog.at_level(logging.WARNING, "lmcache.transferd"):
        l2 = make(in_place=True, l1=described(private) if l1 == "private" else None)
    assert sum("--no-l1-use-lazy" in line for line in caplog.messages) == 1
    given, empty = objects(3, LARGE, seed=1), objects(3, LARGE)
    assert store(l2, keys(3), given) > 0
    assert load(l2, keys(3), empty) == [True] * 3
    assert all(np.array_equal(one.bytes, other.bytes) for one, other in zip(given, empty, strict=True))


def test_under_a_suspended_daemon_a_load_has_no_answer_before_its_buffers_are_free(
    make: Callable[..., Any], arena: npt.NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    l2 = make(in_place=True, l1=described(arena))
    given, empty = objects(20, LARGE, seed=1), objects(20, LARGE)
    placed(arena, placed(arena, 0, given), empty)
    assert store(l2, keys(20), given) > 0
    hurry(l2)
    daemon = l2._finder.started.process.pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        task = l2.submit_load_task(keys(20), empty)
        with monkeypatch.context() as patched:
            patched.setattr(link, "LOOKUP_TIMEOUT_S", 2.0)
            found = find(l2, keys(20), {0: lmcache.layout(given[0])})
        assert found == [False] * 20, "after the time of a question"
        assert l2.query_load_result(task) is None
    finally:
        os.kill(daemon, signal.SIGCONT)
    bits = answered(l2.get_load_event_fd(), lambda: l2.query_load_result(task)).bits
    for one, other, loaded in zip(given, empty, bits, strict=True):
        assert not loaded or np.array_equal(one.bytes, other.bytes)
        other.bytes[:] = 0x5A  # LMCache gives them to others now
    layouts = {0: lmcache.layout(given[0])}
    wait_until(
        lambda: find(l2, keys(20), layouts) == [True] * 20, "the daemon serves again, but not this one", within=60
    )
    assert all((one.bytes == 0x5A).all() for one in empty)
