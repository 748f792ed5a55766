"""Files that the extension _files maps instead of reading: when it does, and what happens to those that are cut off."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from tests.support.page_cache import pages_in_memory
from transferd.runtime.native import NativeCall

LARGE = 2 * 1024**2  # bytes of the shortest file that is mapped


@pytest.fixture(scope="module")
def native() -> Any:
    module = pytest.importorskip("transferd.storage._files", reason="the installation found no compiler")
    module.catch_bus_errors()
    return module


def file_of(content: bytes) -> IO[bytes]:
    """A file that the page cache has."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
    file.write(content)
    file.flush()
    return file


def large_file_of(content: bytes = b"", nbytes: int = LARGE) -> IO[bytes]:
    """A file that may be mapped, and begins with this content."""
    return file_of(content + bytes(nbytes - len(content)))


def load(
    native: Any, file: IO[bytes], nbytes: int = 0, take: Callable[[memoryview], object] = lambda _: None
) -> bool | None:
    """Whether the file was mapped for `take`; None if it was not loaded, or lost bytes meanwhile."""
    room = np.zeros(nbytes or os.fstat(file.fileno()).st_size, np.uint8)
    mapped: list[bool] = []

    def taken(_: int, view: memoryview) -> bool:
        mapped.append(np.frombuffer(view, np.uint8).ctypes.data != room.ctypes.data)
        take(view)
        return True

    [answer] = load_all(native, [file], room.data, taken)
    assert answer in (1, -1)
    return mapped[0] if answer == 1 else None


class Drain:
    """See storage.base.Drainer."""

    wanted = True

    def __init__(self, take: Callable[[int, memoryview], bool]) -> None:
        self._take = take

    def __call__(self, i: int, view: memoryview) -> bool:
        return self._take(i, view)


def load_all(native: Any, files: list[IO[bytes]], room: memoryview, take: Callable[[int, memoryview], bool]) -> Any:
    """Load files of one length in one call; the answer for each."""
    orders = [(f"/proc/self/fd/{file.fileno()}", None, i, 0) for i, file in enumerate(files)]
    call = native.prepared_load(orders, [room], room.nbytes, 4, None, Drain(take), b"", os.O_RDONLY, (0, 2**40, 0))
    NativeCall(call)()
    return native.answers(call)


def into(copies: list[bytes]) -> Callable[[memoryview], object]:
    """A `take` that copies what it is given."""
    return lambda view: copies.append(bytes(view))


def map_or_skip(native: Any, file: IO[bytes], take: Callable[[memoryview], object] = lambda _: None) -> None:
    if load(native, file, take=take) is False:
        pytest.skip("files have no large pages here, or the kernel cannot say so (PAGEMAP_SCAN, Linux 6.7)")


def test_a_file_that_is_cut_off_while_it_is_mapped_is_lost_and_nothing_else_happens(native: Any) -> None:
    content, answers = random.Random(1).randbytes(2 * LARGE), []
    with large_file_of(content, 2 * LARGE) as cut, large_file_of(content, 2 * LARGE) as whole:
        map_or_skip(native, cut)
        map_or_skip(native, whole)  # the kernel may be short of large pages for one of them

        def cut_it(one: memoryview, other: memoryview) -> None:
            os.truncate(cut.fileno(), LARGE + 5000)
            assert bytes(one[:LARGE]) == content[:LARGE]  # what is still there
            rest = bytes(one[LARGE:])
            assert rest[:5000] == content[LARGE : LARGE + 5000]
            assert not any(rest[8192:])
            assert bytes(other) == content

        def both(one: memoryview) -> None:
            answers.append(load(native, whole, take=lambda other: cut_it(one, other)))

        assert load(native, cut, take=both) is None
        assert answers == [True]


def test_reads_of_files_that_are_truncated_all_the_time_are_right_or_fail(native: Any) -> None:
    content, over, lost = random.Random(2).randbytes(LARGE), threading.Event(), []
    with large_file_of(content) as file:
        map_or_skip(native, file)

        def vandal() -> None:
            while not over.is_set():
                os.truncate(file.fileno(), 0)  # all of it, so that it gets a large page again
                os.pwrite(file.fileno(), content, 0)

        def loads() -> None:
            for _ in range(200):
                copies: list[bytes] = []
                mapped = load(native, file, LARGE, into(copies))
                lost.append(mapped is None)
                assert not mapped or copies == [content]

        with ThreadPoolExecutor(3) as pool:
            breaking, loading = pool.submit(vandal), [pool.submit(loads) for _ in range(2)]
            try:
                for one in loading:
                    one.result()
            finally:
                over.set()
            breaking.result()
    print(f"{sum(lost)} of {len(lost)} loads had lost bytes, or found none")


def test_a_file_of_another_length_is_not_loaded(native: Any) -> None:
    with large_file_of() as file:
        assert load(native, file, LARGE - 1) is None
        assert load(native, file, LARGE + 1) is None


def test_a_file_in_small_pages_is_read(native: Any) -> None:
    """To map them takes longer than to copy them."""
    content = random.Random(5).randbytes(LARGE)
    copies: list[bytes] = []
    with large_file_of(content) as file, tempfile.TemporaryFile(buffering=0) as small:
        map_or_skip(native, file)
        for at in range(0, LARGE, 4096):
            small.write(content[at : at + 4096])
        assert load(native, small, take=into(copies)) is False
        assert copies == [content]


def test_a_file_that_comes_back_from_the_disk_has_large_pages_again(native: Any, tmp_path: Path) -> None:
    content, path = random.Random(6).randbytes(LARGE), tmp_path / "object"
    path.write_bytes(content)
    for _ in range(20):  # the kernel may be short of large pages, or take some back
        with path.open("rb", buffering=0) as file:
            map_or_skip(native, file)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if pages_in_memory(path):
                pytest.skip("this file system keeps its files in memory")
            copies: list[bytes] = []
            fetched = load(native, file, take=into(copies))
            assert copies == [content]
            if fetched:
                break
            path.write_bytes(content)
    else:
        pytest.fail("it came back in small pages 20 times")


def ranges_of(file: IO[bytes]) -> int:
    """How many ranges of this process's addresses are of the file."""
    inode = str(os.fstat(file.fileno()).st_ino)
    return sum(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("nbytes", [LARGE, LARGE + 128, 3 * LARGE, 16 * LARGE, 20 * LARGE])
def test_a_thread_lets_the_files_of_a_call_go_at_once(native: Any, nbytes: int) -> None:
    contents = [random.Random(number).randbytes(nbytes) for number in range(6)]
    # So many fit at a time; then they are let go, and longer ones as soon as they are taken.
    fit = 16 * LARGE // ((nbytes + LARGE - 1) // LARGE * LARGE)
    kept: list[int] = []
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(large_file_of(content, nbytes)) for content in contents]
        for file in files:
            map_or_skip(native, file)
        room = np.zeros(nbytes, np.uint8)

        def take(i: int, view: memoryview) -> bool:
            kept.append(sum(ranges_of(file) for file in files[:i]))
            return view == contents[i]

        assert load_all(native, files, room.data, take) == [1] * 6
        assert kept == [i % fit if fit else 0 for i in range(6)]
        assert [ranges_of(file) for file in files] == [0] * 6


def test_a_file_in_use_is_not_let_go(native: Any) -> None:
    content = random.Random(3).randbytes(LARGE)
    with large_file_of(content) as file, large_file_of(nbytes=3 * LARGE) as other:

        def beside(held: memoryview) -> None:
            for _ in range(30):  # more than fit beside it
                map_or_skip(native, other)
            assert 1 <= ranges_of(other) <= 16, "those that do not fit are let go at once"
            assert held == content

        map_or_skip(native, file, beside)
        assert (ranges_of(file), ranges_of(other)) == (0, 0)


def test_more_files_than_can_be_mapped_at_once_are_read(native: Any) -> None:
    answers: list[bool | None] = []
    with large_file_of() as file:
        map_or_skip(native, file)

        def one_more(_: memoryview) -> None:
            if len(deeper) < 65:
                deeper.append(None)
                answers.append(load(native, file, take=one_more))

        deeper: list[None] = []
        one_more(memoryview(b""))
        assert answers == [False] + [True] * 64, "the innermost one ended first"
        assert load(native, file), "and the others are free again"


@pytest.mark.parametrize("handlers", ["", "before", "after", "before after"])
def test_a_foreign_bus_error_ends_the_process_as_before(native: Any, handlers: str) -> None:
    """handlers: when Python's own handler, which prints where it happened, is set."""
    program = textwrap.dedent(f"""
        import faulthandler, mmap, os, tempfile
        from transferd.runtime.native import NativeCall
        from transferd.storage import _files as native
        if "before" in {handlers!r}:
            faulthandler.enable()
        native.catch_bus_errors()
        if "after" in {handlers!r}:
            faulthandler.disable()
            faulthandler.enable()
        file = tempfile.TemporaryFile()
        file.write(bytes({LARGE}))
        file.flush()
        order = (f"/proc/self/fd/{{file.fileno()}}", bytearray({LARGE}), 0, 0)
        class Drain:
            wanted = True
            def __call__(self, i, view):
                return True
        how = None, Drain(), b"", os.O_RDONLY, (0, {LARGE}, 0)
        call = native.prepared_load([order], [], {LARGE}, 1, *how)
        NativeCall(call)()
        assert native.answers(call) == [1]
        mine = mmap.mmap(file.fileno(), {LARGE})
        os.truncate(file.fileno(), 0)
        print("alive", flush=True)
        print(mine[0])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "alive\n")
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(handlers)
