"""Mooncake's interface over a real daemon that it starts: return codes as Mooncake has them, and bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.waits import wait_until
from transferd.adapters.mooncake_store import MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig
from transferd.adapters.mooncake_store.settings import VARIABLE, settings
from transferd.errors import ConfigError

pytestmark = pytest.mark.one_loop

SIZE, COUNT = 40_000, 60  # of an object; more objects than the buffer has slots
MISSING = -704
STALE = 0xA5
SETUP = ("localhost", "http://nobody/metadata", 4 << 30, 16 << 20, "tcp", "", "nobody:50051", None)
Make = Callable[..., MooncakeDistributedStore]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes stores as engines do, and closes them."""
    place = Path(tempfile.mkdtemp(prefix="tm."))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setenv(VARIABLE, '{"buffer": "1MiB", "capacity": "64MiB"}')
    monkeypatch.delenv("TRANSFERD_ENDPOINT", raising=False)
    made: list[MooncakeDistributedStore] = []

    def store(**more: str) -> MooncakeDistributedStore:
        made.append(MooncakeDistributedStore())
        assert made[-1].setup(*SETUP, **more) == 0
        return made[-1]

    yield store
    for one in reversed(made):  # the first one's daemon serves all
        one.close()
    shutil.rmtree(place, ignore_errors=True)


class Buffer:
    """Private memory of the engine with COUNT objects."""

    def __init__(self, store: MooncakeDistributedStore, seed: int | None = None) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.full((COUNT, SIZE), STALE, dtype=np.uint8)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.shape, dtype=np.uint8)
        assert store.register_buffer(self.bytes.ctypes.data, self.bytes.nbytes) == 0

    @property
    def at(self) -> list[int]:
        return [int(one.ctypes.data) for one in self.bytes]


KEYS = [f"model@tp_rank:0@{i:064x}" for i in range(COUNT)]
SIZES = [SIZE] * COUNT


def test_what_is_put_is_there_with_its_bytes_and_nothing_else_is_touched(make: Make) -> None:
    store = make()
    source, target = Buffer(store, seed=1), Buffer(store)
    assert store.batch_is_exist(KEYS) == [0] * COUNT
    assert store.batch_put_from(KEYS[:50], source.at[:50], SIZES[:50], ReplicateConfig()) == [0] * 50
    assert store.batch_put_from(KEYS[:2], target.at[:2], SIZES[:2]) == [0, 0], "it is there already, and stays"
    assert store.batch_is_exist(KEYS) == [1] * 50 + [0] * 10
    assert store.batch_get_into(KEYS, target.at, SIZES) == [SIZE] * 50 + [MISSING] * 10
    assert np.array_equal(target.bytes[:50], source.bytes[:50])
    assert (target.bytes[50:] == STALE).all()
    assert (store.is_exist(KEYS[3]), store.get_size(KEYS[3]), store.get_size(KEYS[59])) == (1, SIZE, MISSING)
    assert store.get(KEYS[3]) == source.bytes[3].tobytes()


def test_an_object_may_lie_in_several_pieces(make: Make) -> None:
    store = make()
    source, target = Buffer(store, seed=2), Buffer(store)

    def pieces(buffer: Buffer) -> list[list[int]]:
        return [[buffer.at[3 * i], buffer.at[3 * i + 2], buffer.at[3 * i + 1] + 7] for i in range(20)]

    lengths = [[SIZE, 1000, 33]] * 20
    assert store.batch_put_from_multi_buffers(KEYS[:20], pieces(source), lengths, ReplicateConfig()) == [0] * 20
    assert store.batch_get_into_multi_buffers(KEYS[:20], pieces(target), lengths) == [SIZE + 1033] * 20
    expected = np.full_like(source.bytes, STALE)
    expected[::3] = source.bytes[::3]
    expected[2::3, :1000] = source.bytes[2::3, :1000]
    expected[1::3, 7:40] = source.bytes[1::3, 7:40]
    assert np.array_equal(target.bytes, expected)
    assert store.get(KEYS[0]) == b"".join(
        ctypes.string_at(at, size) for at, size in zip(pieces(source)[0], lengths[0], strict=True)
    )


def test_values_removal_and_tenants(make: Make) -> None:
    store, other = make(), make(tenant_id="other")
    assert store.put("warm-up", b"x" * 4096) == 0
    assert (store.is_exist("warm-up"), store.get("warm-up"), store.get("nobody")) == (1, b"x" * 4096, b"")
    assert store.put_batch(["a", "b"], [b"1", memoryview(b"22")]) == 0
    assert store.get_batch(["a", "b", "c"]) == [b"1", b"22", b""]
    assert other.put("a", b"3") == 0
    assert store.remove("a") == 0
    assert (store.remove("a"), store.is_exist("a"), other.get("a")) == (MISSING, 0, b"3")
    assert store.remove_all(force=True) == 2
    assert store.batch_is_exist(["warm-up", "b"]) == [0, 0]
    assert other.get("a") == b"3"


def test_a_later_process_finds_what_an_earlier_one_has_put(make: Make) -> None:
    first = make()
    source = Buffer(first, seed=3)
    assert first.batch_put_from(KEYS, source.at, SIZES) == [0] * COUNT
    assert first.put("small", b"1234") == 0
    first.close()
    second = make()
    assert second.batch_is_exist([*KEYS, "small", "other"]) == [1] * (COUNT + 1) + [0]
    target = Buffer(second)
    assert second.batch_get_into(KEYS, target.at, SIZES) == SIZES
    assert np.array_equal(target.bytes, source.bytes)


def test_sizes_that_only_earlier_models_have_give_way_to_those_that_are_put(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = make()
    for nbytes in (4096, 8192, 12288):
        assert earlier.put(f"of-{nbytes}", b"x" * nbytes) == 0
    monkeypatch.setattr("transferd.adapters.mooncake_store.store.MOST_SIZES", 2)
    store = make()
    assert store.batch_is_exist(["of-4096", "of-12288", "of-20480"]) == [1, 0, 0], "two sizes have places"
    assert store.put("of-20480", b"y" * 20480) == 0
    assert store.put("of-12288-too", b"z" * 12288) == -800, "both sizes are in use"
    assert (store.get("of-20480"), store.get("of-4096")) == (b"y" * 20480, b"x" * 4096)


def test_memory_that_is_not_registered_or_not_of_the_host_is_left_alone(make: Make) -> None:
    store = make()
    buffer = Buffer(store, seed=4)
    elsewhere = np.zeros(SIZE, dtype=np.uint8)
    codes = store.batch_put_from(
        KEYS[:4], [buffer.at[0], int(elsewhere.ctypes.data), buffer.at[-1] + 1, buffer.at[1]], SIZES[:4]
    )
    assert codes == [0, -600, -600, 0]
    assert store.batch_put_from(KEYS[:2], buffer.at[:1], SIZES[:2]) == [-600, -600]
    assert store.get_into(KEYS[0], int(elsewhere.ctypes.data), SIZE) == -600
    assert not elsewhere.any()
    reserved = mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ)  # as a GPU's addresses are in a process
    address = next(
        int(line.split("-")[0], 16)
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        if line.split()[1].startswith("r--")
    )
    assert store.register_buffer(address, 4096) == -600
    reserved.close()
    assert store.unregister_buffer(buffer.at[0]) == 0
    assert store.get_into(KEYS[0], buffer.at[0], SIZE) == -600


def test_calls_of_many_threads_share_the_slots(make: Make) -> None:
    store = make()
    source, target = Buffer(store, seed=5), Buffer(store)
    results: list[list[int]] = []

    def move(some: Sequence[int]) -> None:
        named = [KEYS[i] for i in some]
        put = store.batch_put_from(named, [source.at[i] for i in some], [SIZE] * len(some))
        got = store.batch_get_into(named, [target.at[i] for i in some], [SIZE] * len(some))
        results.append([*put, *got])

    threads = [threading.Thread(target=move, args=(range(first, COUNT, 12),)) for first in range(12)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert results == [[0] * 5 + [SIZE] * 5] * 12
    assert np.array_equal(target.bytes, source.bytes)


def test_a_suspended_daemon_is_not_waited_for_and_writes_nothing_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    source, target = Buffer(store, seed=6), Buffer(store)
    assert store.batch_put_from(KEYS, source.at, SIZES) == [0] * COUNT
    (size,) = store._attached.values()
    assert store._finder is not None
    assert store._finder.started is not None
    assert store._finder.started.process is not None
    daemon = store._finder.started.process.pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patched:  # only now: a disk may need longer to store them
            patched.setattr(size, "_load_timeout", 0.5)
            assert store.batch_get_into(KEYS, target.at, SIZES) == [MISSING] * COUNT
        assert store.batch_is_exist(KEYS) == [0] * COUNT
    finally:
        os.kill(daemon, signal.SIGCONT)
    wait_until(lambda: store.batch_is_exist(KEYS) == [1] * COUNT, "the daemon serves again", within=60)
    assert (target.bytes == STALE).all()
    wait_until(lambda: store.batch_get_into(KEYS, target.at, SIZES) == SIZES, "not this store", within=60)
    assert np.array_equal(target.bytes, source.bytes)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("{", "is no JSON"),
        ('{"endpont": 1}', "endpont"),
        ('{"load_timeout": 0}', "load_timeout"),
        ('{"buffer": 0}', "buffer"),
        ('{"name": "a b"}', "name: "),
    ],
)
def test_a_wrong_setting_is_named_and_setup_fails(monkeypatch: pytest.MonkeyPatch, given: str, named: str) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ConfigError, match=named):
        settings()
    store = MooncakeDistributedStore()
    assert store.setup(*SETUP) == -600
    assert (store.is_exist("a"), store.put("a", b"1"), store.get("a"), store.remove_all(), store.close()) == (
        0,
        -800,
        b"",
        0,
        0,
    )


def test_what_was_not_stored_without_a_daemon_is_in_the_next_ones_report(make: Make) -> None:
    store = make()
    source = Buffer(store, seed=1)
    assert store.put_from(KEYS[0], source.at[0], SIZE) == 0
    (link,) = [one.link for one in store._attached.values()]
    assert store._finder is not None
    assert store._finder.started is not None
    assert store._finder.started.process is not None
    os.kill(store._finder.started.process.pid, signal.SIGKILL)
    wait_until(lambda: not link.ready, within=60.0)
    assert store.batch_put_from(KEYS[:7], source.at[:7], SIZES[:7]) == [-800] * 7
    wait_until(lambda: link.ready and link.stats()["server"]["not_stored"], within=60.0)
    assert link.stats()["server"]["not_stored"] == {"not_ready": 7}


def test_memory_of_the_allocator_can_be_used_until_it_is_freed() -> None:
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(1 << 20)
    ctypes.memset(address, 1, 1 << 20)
    assert (allocator.free(address), allocator.free(address), allocator.alloc(0)) == (0, -600, 0)


def test_one_variable_puts_it_in_place_of_the_library() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "transferd.adapters.mooncake_store"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    place = printed.stdout.strip()
    what = "from mooncake.store import MooncakeDistributedStore as M, ReplicateConfig; print(M.__module__)"
    done = subprocess.run(
        [sys.executable, "-c", what],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([place, str(Path(__file__).parents[2])])},
    )
    assert done.stdout.strip() == "transferd.adapters.mooncake_store.store"
