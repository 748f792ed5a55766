"""Files that the extension _files maps instead of reading: when it does, and what happens to those that are cut off."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.page_cache import pages_in_memory
from transferd.storage.file_io import CachedIO

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


def load(native: Any, file: IO[bytes], nbytes: int) -> Any:
    """What `load_file` makes of it: (view, mapping), (None, 0) if it read the file, or None."""
    room = memoryview(bytearray(nbytes))
    loaded = native.load_file(f"/proc/self/fd/{file.fileno()}", room, os.O_RDONLY, True, False, (0, 2**40, 2**40))
    return None if loaded is None else loaded[1:]


def map_or_skip(native: Any, file: IO[bytes]) -> tuple[memoryview, int]:
    loaded = load(native, file, os.fstat(file.fileno()).st_size)
    if loaded is None or loaded[0] is None:
        pytest.skip("files have no large pages here, or the kernel cannot say so (PAGEMAP_SCAN, Linux 6.7)")
    made: tuple[memoryview, int] = loaded
    return made


def end(native: Any, mapped: tuple[memoryview, int]) -> bool:
    """End a mapping; whether it lost bytes."""
    mapped[0].release()
    lost: bool = native.unmap(mapped[1])
    return lost


def test_a_file_that_is_cut_off_while_it_is_mapped_is_lost_and_nothing_else_happens(native: Any) -> None:
    content = random.Random(1).randbytes(2 * LARGE)
    with large_file_of(content, 2 * LARGE) as cut, large_file_of(content, 2 * LARGE) as whole:
        one, other = map_or_skip(native, cut), map_or_skip(native, whole)
        os.truncate(cut.fileno(), LARGE + 5000)
        assert bytes(one[0][:LARGE]) == content[:LARGE]  # what is still there
        rest = bytes(one[0][LARGE:])
        assert rest[:5000] == content[LARGE : LARGE + 5000]
        assert not any(rest[8192:])
        assert bytes(other[0]) == content
        assert (end(native, one), end(native, other)) == (True, False)
    native.forget_files()


def test_reads_of_files_that_are_truncated_all_the_time_are_right_or_fail(native: Any) -> None:
    content, over, lost = random.Random(2).randbytes(LARGE), threading.Event(), []
    with large_file_of(content) as file:
        end(native, map_or_skip(native, file))

        def vandal() -> None:
            while not over.is_set():
                os.truncate(file.fileno(), 0)  # all of it, so that it gets a large page again
                os.pwrite(file.fileno(), content, 0)

        def loads() -> None:
            for _ in range(200):
                loaded = load(native, file, LARGE)
                if loaded is not None and loaded[0] is not None:
                    copied = bytes(loaded[0])
                    lost.append(end(native, loaded))
                    assert lost[-1] or copied == content
            native.forget_files()

        with ThreadPoolExecutor(3) as pool:
            breaking, loading = pool.submit(vandal), [pool.submit(loads) for _ in range(2)]
            try:
                for one in loading:
                    one.result()
            finally:
                over.set()
            breaking.result()
    print(f"{sum(lost)} of {len(lost)} mappings lost bytes")


def test_a_file_that_is_not_in_memory_or_of_another_length_is_not_mapped(native: Any, tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(bytes(LARGE))
    with path.open("rb", buffering=0) as file:
        end(native, map_or_skip(native, file))
        native.forget_files()  # or the page cache keeps what is to leave it
        assert load(native, file, LARGE - 1) is None
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if pages_in_memory(path):
            pytest.skip("this file system keeps its files in memory")
        assert load(native, file, LARGE) is None, "it is better fetched first"
        assert not pages_in_memory(path), "the kernel was not asked to read it"


def test_a_file_in_small_pages_is_read(native: Any) -> None:
    """To map them takes longer than to copy them."""
    content = random.Random(5).randbytes(LARGE)
    with large_file_of(content) as file, tempfile.TemporaryFile(buffering=0) as small:
        end(native, map_or_skip(native, file))
        for at in range(0, LARGE, 4096):
            small.write(content[at : at + 4096])
        room = memoryview(bytearray(LARGE))
        loaded = native.load_file(f"/proc/self/fd/{small.fileno()}", room, os.O_RDONLY, True, False, (0, 2**40, 2**40))
        assert loaded[1:] == (None, 0)
        assert bytes(room) == content
    native.forget_files()


def test_a_file_that_comes_back_from_the_disk_has_large_pages_again(native: Any, tmp_path: Path) -> None:
    content, path, cached = random.Random(6).randbytes(LARGE), tmp_path / "object", CachedIO()
    path.write_bytes(content)
    buffer = memoryview(bytearray(LARGE))
    for _ in range(20):  # the kernel may be short of large pages, or take some back
        with path.open("rb", buffering=0) as file:
            end(native, map_or_skip(native, file))
            native.forget_files()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if pages_in_memory(path):
                pytest.skip("this file system keeps its files in memory")
            cached.read(file.fileno(), buffer)
            assert bytes(buffer) == content
            loaded = load(native, file, LARGE)
            if loaded is not None and loaded[0] is not None:
                assert bytes(loaded[0]) == content
                assert not end(native, loaded)
                break
            path.write_bytes(content)
    else:
        pytest.fail("it came back in small pages 20 times")
    native.forget_files()


def ranges_of(file: IO[bytes]) -> int:
    """How many ranges of this process's addresses are of the file."""
    inode = str(os.fstat(file.fileno()).st_ino)
    return sum(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_thread_lets_several_files_go_at_once(native: Any) -> None:
    native.forget_files()
    lengths = [LARGE, LARGE + 128, 3 * LARGE, 20 * LARGE, *[LARGE + 128] * 10, 16 * LARGE, LARGE]
    kept = []
    for number, nbytes in enumerate(lengths):
        content = random.Random(number).randbytes(nbytes)
        with large_file_of(content, nbytes) as file:
            mapped = map_or_skip(native, file)
            assert mapped[0] == content
            assert not end(native, mapped)
            kept.append(ranges_of(file))
            native.forget_files() if number % 7 == 6 else None
            assert not ranges_of(file) or number % 7 != 6
    assert kept == [int(nbytes <= 16 * LARGE) for nbytes in lengths]
    native.forget_files()


def test_a_file_in_use_is_not_let_go(native: Any) -> None:
    native.forget_files()
    content = random.Random(3).randbytes(LARGE)
    with large_file_of(content) as file, large_file_of(nbytes=3 * LARGE) as other:
        held = map_or_skip(native, file)
        for _ in range(30):  # more than fit beside it
            assert not end(native, map_or_skip(native, other))
        assert 1 <= ranges_of(other) <= 16, "those that do not fit are let go at once"
        native.forget_files()
        assert held[0] == content
        end(native, held)
        native.forget_files()
        assert (ranges_of(file), ranges_of(other)) == (0, 0)


def test_there_are_as_many_mappings_as_numbers(native: Any) -> None:
    with large_file_of() as file:
        mapped = [map_or_skip(native, file) for _ in range(64)]
        assert sorted(number for _, number in mapped) == list(range(1, 65))
        assert load(native, file, LARGE) == (None, 0), "then it is read"
        free = mapped[9][1]
        end(native, mapped[9])
        mapped[9] = map_or_skip(native, file)
        assert mapped[9][1] == free
        for one in mapped:
            end(native, one)
    for wrong in (-1, 0, 1, 65):
        with pytest.raises(ValueError, match=f"there is no mapping {wrong}"):
            native.unmap(wrong)
    native.forget_files()


@pytest.mark.parametrize("handlers", ["", "before", "after", "before after"])
def test_a_foreign_bus_error_ends_the_process_as_before(native: Any, handlers: str) -> None:
    """handlers: when Python's own handler, which prints where it happened, is set."""
    program = textwrap.dedent(f"""
        import faulthandler, mmap, os, tempfile
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
        room = bytearray({LARGE})
        place = f"/proc/self/fd/{{file.fileno()}}"
        native.load_file(place, memoryview(room), os.O_RDONLY, True, False, (0, {LARGE}, {LARGE}))
        mine = mmap.mmap(file.fileno(), {LARGE})
        os.truncate(file.fileno(), 0)
        print("alive", flush=True)
        print(mine[0])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "alive\n")
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(handlers)
