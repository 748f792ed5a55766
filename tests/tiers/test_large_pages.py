"""Shared memory in large pages: made so, mapped so, and complete where the kernel makes none."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from transferd.tiers import segment as large_pages
from transferd.tiers.populate import libc
from transferd.tiers.segment import LARGE_PAGE, PREFIX, SharedMapping, SharedSegment, attach_arrays

NBYTES = 5 * LARGE_PAGE + 3 * mmap.PAGESIZE  # its last large page is not complete
TRIES = 20
TRIES = 20


def name(suffix: str) -> str:
    return f"{PREFIX}test.{os.getpid()}.{suffix}"


def in_large_pages(address: int) -> int:
    """How many bytes of the mapping at this address the CPU addresses as large pages."""
    found = re.search(
        rf"^{address:x}-.*?ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return 1024 * int(found[1])


def makes_large_pages() -> bool:
    fd = os.memfd_create("probe")
    try:
        os.posix_fallocate(fd, 0, LARGE_PAGE)
        mapping = SharedMapping(fd, LARGE_PAGE)
        done: bool = libc.madvise(mapping.address, LARGE_PAGE, large_pages._MADV_COLLAPSE) == 0
        mapping.close()
        return done
    finally:
        os.close(fd)


def allocated(segment: SharedSegment) -> int:
    return os.fstat(segment.descriptor).st_blocks * 512


def of_large_pages(suffix: str) -> SharedSegment:
    """A segment, touched. Beside other processes the kernel may have no large page left for a moment."""
    for _ in range(TRIES):
        segment = SharedSegment(name(suffix), NBYTES, create=True)
        assert allocated(segment) >= NBYTES
        segment.buffer[:] = bytes(NBYTES)
        if in_large_pages(segment.address) == 5 * LARGE_PAGE:
            break
        segment.close()
    return segment


needs_large_pages = pytest.mark.skipif(not makes_large_pages(), reason="this kernel collapses no shared memory")


@needs_large_pages
def test_a_segment_consists_of_large_pages() -> None:
    segment = of_large_pages("large")
    try:
        assert in_large_pages(segment.address) == 5 * LARGE_PAGE
    finally:
        segment.close()


@needs_large_pages
def test_an_attaching_process_also_maps_large_pages() -> None:
    segment = of_large_pages("attached")
    arrays = [{"plane": "key", "layer": 0, "offset": 0, "shape": [NBYTES], "dtype": "uint8"}]
    data = {"name": segment.name, "nbytes": NBYTES, "arrays": arrays}
    code = f"""
from tests.tiers.test_large_pages import in_large_pages
from transferd.tiers.segment import attach_arrays
array = attach_arrays({data!r})["key"][0]
array[:] = 7
print(in_large_pages(array.ctypes.data))
"""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.stderr) == (f"{5 * LARGE_PAGE}\n", "")
        assert bytes(segment.buffer) == b"\7" * NBYTES
    finally:
        segment.close()


def test_memory_is_complete_where_the_kernel_makes_no_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(_address: int, nbytes: int, advice: int) -> int:
        asked.append((nbytes, advice))
        return -1

    monkeypatch.setattr(libc, "madvise", refuse)
    segment = SharedSegment(name("small"), 64 * 1024**2, create=True)
    try:
        assert asked == [(32 * 1024**2, large_pages._MADV_COLLAPSE)], "it asks once, not for every piece"
        assert allocated(segment) >= segment.nbytes
        segment.buffer[:] = b"\2" * segment.nbytes
    finally:
        segment.close()


def test_memory_is_mapped_where_no_aligned_range_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "mmap", lambda *_: ctypes.c_void_p(-1).value)
    segment = SharedSegment(name("unaligned"), NBYTES, create=True)
    try:
        assert allocated(segment) >= NBYTES
        segment.buffer[-4:] = b"last"
        assert os.pread(segment.descriptor, 4, NBYTES - 4) == b"last"
    finally:
        segment.close()


def test_a_mapping_lives_as_long_as_an_array_and_leaves_nothing_behind() -> None:
    segment = SharedSegment(name("mapped"), NBYTES, create=True)
    arrays = [{"plane": "key", "layer": 0, "offset": LARGE_PAGE, "shape": [4], "dtype": "uint8"}]
    array = attach_arrays({"name": segment.name, "nbytes": NBYTES, "arrays": arrays})["key"][0]
    segment.buffer[LARGE_PAGE : LARGE_PAGE + 4] = b"\5" * 4
    segment.close()
    maps = Path("/proc/self/maps")
    assert list(array) == [5] * 4
    assert segment.name in maps.read_text()
    del array
    assert segment.name not in maps.read_text()


def test_a_segment_smaller_than_a_large_page_is_mapped_alone() -> None:
    segment = SharedSegment(name("tiny"), mmap.PAGESIZE, create=True)
    begin, end = f"{segment.address:x}", f"{segment.address + mmap.PAGESIZE:x}"
    assert re.search(rf"^{begin}-{end} .*{re.escape(segment.name)}$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    segment.close()
