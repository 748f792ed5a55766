"""Host memory: pinned as its device likes it, given back once, and usable where pinning is refused."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import resource
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from transferd.blocks.layout import build_layout
from transferd.config import CacheSection, from_tree
from transferd.daemon.daemon import Daemon
from transferd.errors import InvariantError, TierError
from transferd.tiers import pinned, populate
from transferd.tiers import pinned as numa
from transferd.tiers.cuda.pinning import is_registered
from transferd.tiers.pinned import HostPool, HostRegion, node_of_pci, prefer_node


class Pins:
    """A device's pinning that keeps book, or refuses."""

    def __init__(self, refusal: str = "", node: int | None = None, unpin_error: str = "") -> None:
        self.refusal = refusal
        self.node = node
        self.unpin_error = unpin_error
        self.calls: list[tuple[str, int, int]] = []

    def pin(self, address: int, nbytes: int) -> str:
        self.calls.append(("pin", address, nbytes))
        return self.refusal

    def unpin(self, address: int, nbytes: int) -> None:
        self.calls.append(("unpin", address, nbytes))
        if self.unpin_error:
            raise TierError(self.unpin_error)


@pytest.fixture(autouse=True)
def _not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_warned", False)


def test_memory_is_pinned_once_as_a_whole_and_unpinned_once() -> None:
    pins = Pins()
    region = HostRegion(5000, pins)
    address = region.address
    assert region.pinned
    assert region.degraded == ""
    region.close()
    region.close()
    assert pins.calls == [("pin", address, 8192), ("unpin", address, 8192)]


def test_the_kernel_locks_every_page() -> None:
    def locked() -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmLck:")))

    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] != resource.RLIM_INFINITY and os.geteuid() != 0:
        pytest.skip("this user may not lock so much memory")
    gc.collect()  # or the garbage of an earlier test may be unlocked meanwhile
    before, nbytes = locked(), 32 * 1024**2
    region = HostRegion(nbytes)
    try:
        assert region.pinned
        assert locked() - before >= nbytes
    finally:
        region.close()
    assert locked() == before


def test_memory_that_is_not_there_has_no_address() -> None:
    region = HostRegion(8192, later=True)
    with pytest.raises(InvariantError, match="8192 bytes of host memory"):
        print(region.address)
    region.allocate()
    assert region.address
    region.close()
    with pytest.raises(InvariantError, match="8192 bytes of host memory"):
        print(region.address)


def test_a_forked_child_has_no_copy_of_host_memory() -> None:
    region = HostRegion(8192)
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if re.fullmatch("[0-9a-f]+-[0-9a-f]+", first):
            start, end = (int(side, 16) for side in first.split("-"))
            here = start <= region.address < end
        elif here and first == "VmFlags:":
            assert "dc" in line.split(), "do not copy on fork"
            break
    else:
        pytest.fail("the region is not mapped")
    region.close()


def test_a_kernel_that_refuses_to_keep_it_from_children_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_DONTFORK", 9999)
    with pytest.raises(TierError, match=r"cannot allocate .* Invalid argument"):
        HostRegion(4096)


def test_where_pinning_is_refused_the_memory_works_says_why_and_warns_once() -> None:
    pins = Pins("the driver does not want to")
    with capture_logs() as logs:
        regions = [HostRegion(4096, pins) for _ in range(3)]
    for region in regions:
        assert not region.pinned
        assert region.degraded == "the driver does not want to"
        region.view[:4] = b"abcd"
        assert bytes(region.view[:5]) == b"abcd\0"
        region.close()
    assert [call for call, *_ in pins.calls] == ["pin"] * 3, "what was not pinned is not unpinned"
    assert [(entry["log_level"], entry["reason"]) for entry in logs] == [("warning", "the driver does not want to")]


def test_memory_that_cannot_be_unpinned_is_still_unmapped_and_the_error_raised() -> None:
    region = HostRegion(4096, Pins(unpin_error="context gone"))
    view = region.view
    with pytest.raises(TierError, match="context gone"):
        region.close()
    with pytest.raises(ValueError, match="released"):
        view[0]
    region.close()


def test_a_pool_is_pinned_as_its_device_says() -> None:
    pins = Pins()
    pool = HostPool(build_layout(CacheSection(layers=1, host_blocks=4)), pins)
    assert pool.memory.pinned is True
    pool.close()
    assert [call for call, *_ in pins.calls] == ["pin", "unpin"]


def test_a_node_is_asked_for_and_its_absence_changes_nothing() -> None:
    for node in (0, 1000):
        region = HostRegion(4096, Pins(node=node))
        region.view[:2] = b"xy"
        assert (bytes(region.view[:3]), region.pinned) == (b"xy\0", True)
        region.close()


def test_the_kernel_is_asked_for_a_node_before_the_first_page_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(pinned, "prefer_node", lambda *_: order.append("prefer"))
    monkeypatch.setattr(pinned, "populate", lambda *_: order.append("populate"))
    HostRegion(4096, Pins(node=0)).close()
    assert order == ["prefer", "populate"]


def test_a_refused_node_is_named() -> None:
    region = HostRegion(4096, Pins())
    assert "EINVAL" in prefer_node(region.address + 1, 4096, 0), "not at a page's start"
    assert prefer_node(region.address, 4096, 5000).startswith("mbind is not supported on ")
    region.close()


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), ("one", None)])
def test_a_devices_node_is_what_the_kernel_says(tmp_path: Path, text: str, node: int | None) -> None:
    device = tmp_path / "0000:17:00.0"
    device.mkdir()
    (device / "numa_node").write_text(text)
    assert node_of_pci("0000:17:00.0", tmp_path) == node
    assert node_of_pci("0000:99:00.0", tmp_path) is None


def test_large_memory_is_registered_in_pieces_that_no_block_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "REGISTER_MOST", 20_000)
    pins = Pins()
    region = HostRegion(50_000, pins, grain=3 * 4096)
    offsets = [(0, 12288), (12288, 12288), (24576, 12288), (36864, 12288), (49152, 4096)]
    assert pins.calls == [("pin", region.address + start, nbytes) for start, nbytes in offsets]
    region.close()
    assert sorted(call for call in pins.calls if call[0] == "unpin") == [
        ("unpin", *call[1:]) for call in pins.calls if call[0] == "pin"
    ]


def test_a_refusal_of_one_piece_leaves_none_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "REGISTER_MOST", 4096)

    class Grudging(Pins):
        def pin(self, address: int, nbytes: int) -> str:
            return "enough" if len(self.calls) == 2 else super().pin(address, nbytes)

    pins = Grudging()
    with capture_logs():
        region = HostRegion(3 * 4096, pins)
    assert (region.pinned, region.degraded) == (False, "enough")
    assert [call for call, *_ in pins.calls] == ["pin", "pin", "unpin", "unpin"]
    region.close()


def test_each_piece_that_is_pinned_counts_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "REGISTER_MOST", 2 * 4096)
    progress = populate.Progress()
    for module in (pinned, populate):
        monkeypatch.setattr(module, "PROGRESS", progress)
    seen: list[tuple[int, int]] = []

    class Watched(Pins):
        def pin(self, address: int, nbytes: int) -> str:
            seen.append((progress.populated, progress.pinned))
            return super().pin(address, nbytes)

    region = HostRegion(5 * 4096, Watched())
    assert seen == [(5 * 4096, done * 4096) for done in (0, 2, 4)]
    assert (progress.populated, progress.pinned) == (5 * 4096, 5 * 4096)
    region.close()


def test_a_process_that_ends_pins_no_more_pieces_and_leaves_none_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "REGISTER_MOST", 4096)
    progress = populate.Progress()
    for module in (pinned, populate):
        monkeypatch.setattr(module, "PROGRESS", progress)

    class Ending(Pins):
        def pin(self, address: int, nbytes: int) -> str:
            progress.cancelled = len(self.calls) == 1
            return super().pin(address, nbytes)

    pins = Ending(unpin_error="context gone")
    region = HostRegion(4 * 4096, pins, later=True)
    with pytest.raises(TierError, match="the process is ending"):
        region.allocate()
    assert [call for call, *_ in pins.calls] == ["pin", "pin", "unpin", "unpin"]
    assert (region.allocated, region.pinned) == (False, False)
    progress.cancelled, pins.unpin_error = False, ""
    region.allocate()
    assert region.pinned
    region.close()


def test_memory_may_come_later_and_come_again() -> None:
    pins = Pins()
    region = HostRegion(4096, pins, later=True)
    assert (region.allocated, region.pinned, pins.calls) == (False, False, [])
    region.close()
    for _ in range(2):
        region.allocate()
        region.allocate()
        assert bytes(region.view[:4]) == bytes(4)
        region.view[:4] = b"abcd"
        region.close()
    assert [call for call, *_ in pins.calls] == ["pin", "unpin"] * 2


@pytest.mark.parametrize("cpus", [(), (0,)])
def test_pages_are_made_in_pieces_by_threads_and_the_gil_is_free_meanwhile(
    monkeypatch: pytest.MonkeyPatch, cpus: tuple[int, ...]
) -> None:
    monkeypatch.setattr(populate, "PIECE", 64 * 4096)
    touched: list[tuple[int, int]] = []
    touch = populate._touch

    def noted(address: int, nbytes: int) -> None:
        touched.append((address, nbytes))
        touch(address, nbytes)

    monkeypatch.setattr(populate, "_touch", noted)
    memory = mmap.mmap(-1, 300 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anchor = (ctypes.c_char * len(memory)).from_buffer(memory)
    before, start = populate.PROGRESS.populated, ctypes.addressof(anchor)
    here = os.sched_getaffinity(0)
    populate.populate(start, len(memory), cpus)
    assert os.sched_getaffinity(0) == here, "only its own threads move"
    assert sorted(touched) == [(start + n * 64 * 4096, min(64, 300 - n * 64) * 4096) for n in range(5)]
    assert populate.PROGRESS.populated - before == len(memory)
    del anchor
    memory.close()


def test_views_that_are_garbage_are_freed_even_if_another_thread_is_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector does nothing then: it never runs twice at once."""
    region, collect, calls = HostRegion(8192), gc.collect, []

    def busy_twice() -> int:
        calls.append(1)
        return collect() if len(calls) > 2 else 0

    cycle: list[object] = [region.view[:100]]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        monkeypatch.setattr(gc, "collect", busy_twice)
        region.close()
    finally:
        gc.enable()
    assert len(calls) == 3


def test_populating_and_locking_pages_release_pythons_lock() -> None:
    holds_the_lock = 4  # FUNCFLAG_PYTHONAPI of ctypes
    for call in (populate.libc.madvise, populate.libc.mlock, populate.libc.munlock):
        assert not call._flags_ & holds_the_lock


def test_memory_is_registered_in_pieces_that_a_watchdog_outlasts() -> None:
    assert pinned.REGISTER_MOST <= 4 * 1024**3, "a tenth of a second of registration for each GiB, without an answer"


def test_a_process_that_ends_makes_no_more_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate, "PIECE", 4096)
    monkeypatch.setattr(populate, "PROGRESS", populate.Progress())
    touched: list[int] = []

    def touch(address: int, _nbytes: int) -> None:
        touched.append(address)
        populate.PROGRESS.cancelled = True

    monkeypatch.setattr(populate, "_touch", touch)
    memory = mmap.mmap(-1, 1000 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anchor = (ctypes.c_char * len(memory)).from_buffer(memory)
    with pytest.raises(TierError, match="the process is ending"):
        populate.populate(ctypes.addressof(anchor), len(memory))
    assert 1 <= len(touched) <= populate.THREADS, "at most what each thread had in hand"
    del anchor
    memory.close()


def test_an_older_kernel_has_its_pages_written_and_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    region = HostRegion(4096)
    for code, raises in ((errno.EINVAL, False), (errno.ENOMEM, True)):
        monkeypatch.setattr(populate.libc, "madvise", lambda *_: -1)
        monkeypatch.setattr(ctypes, "get_errno", lambda code=code: code)
        if raises:
            with pytest.raises(TierError, match="ENOMEM"):
                populate.populate(region.address, 4096)
        else:
            region.view[:2] = b"ab"
            populate.populate(region.address, 4096)
            assert bytes(region.view[:2]) == bytes(2)
    monkeypatch.undo()
    region.close()


def test_pages_elsewhere_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "nodes_of_pages", lambda addresses: [0, 1, 1, -2][: len(addresses)])
    assert numa.placement(0, 4 * 4096, 0, samples=4) == ("2 of 3 sampled pages are on NUMA node 1, the device is on 0")
    assert numa.placement(0, 4096, 0, samples=1) == ""


def test_the_node_of_our_own_pages_is_known_here_or_nobody_says() -> None:
    region = HostRegion(4 * 4096)
    assert set(numa.nodes_of_pages([region.address, region.address + 4096])) <= set(range(64))
    region.close()


def test_the_cpus_of_a_node_are_those_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-1,4,9000-9002\n")
    assert set(numa.cpus_of_node(0, tmp_path)) == {0, 1, 4} & os.sched_getaffinity(0)
    assert numa.cpus_of_node(7, tmp_path) == []


def test_all_host_memory_of_a_rank_is_pinned_as_its_device_says_that_for_direct_transfers_too() -> None:
    tree = {
        "cache": {"device": "tests.support.cuda.tier:FakeCudaTier", "layers": 1, "host_blocks": 4},
        "pd": {"mode": "direct", "listen": "127.0.0.1:0"},
        "server": {"endpoint": "ipc:///nowhere"},
        "metrics": {"listen": ""},
    }
    for worker in Daemon(from_tree(tree)).default.workers:
        context = worker.context
        assert context.peer is not None
        assert context.host is not None
        regions = [context.staging.memory, context.peer.staging.memory, context.host.memory]
        assert [region.urgent for region in regions] == [False, True, False], "no rate bounds direct transfers"
        assert not any(region.allocated for region in regions), "nothing is allocated before the daemon listens"
        for region in regions:
            region.allocate()
            assert is_registered(region.address)
            region.close()
