"""The C extension that loads blocks in place: XXH3's checksum, the object's bytes, and what its twin in Python does."""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from transferd.workers.block_in_place import BlockInPlace
from transferd.workers.block_memory import BlockMemory
from transferd.workers.loan import Loan

from tests.support.cuda.shim import compiler
from tests.support.descriptors import open_below
from tests.support.page_cache import pages_in_memory
from transferd.blocks.footer import FOOTER_BYTES, Inspection, seal, stamp_of_name
from transferd.blocks.layout import build_layout
from transferd.blocks.layout.base import Arena
from transferd.config import CacheSection
from transferd.storage.file_io import CachedIO, read_now
from transferd.workers import block_memory

SOURCE = Path(block_memory.__file__).with_name("_inplace.c")
LARGE = 2 * 1024**2  # bytes of the shortest file that is mapped
NONE = (0, b"", 0.0)
NEITHER = (0, -1, b"", 0.0)
NAME = f"m/f/g/{'ab' * 20}/0"


@pytest.fixture(scope="module", params=["as installed", "without AVX2"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "as installed":
        module = pytest.importorskip("transferd.workers._inplace", reason="the installation found no compiler")
        module.catch_bus_errors()
        return module
    module = compiled(tmp_path_factory.mktemp("native"), "-DWITHOUT_AVX2")
    module.catch_bus_errors()
    return module


def compiled(directory: Path, *flags: str) -> ModuleType:
    """The extension, built with these flags as well."""
    gcc = compiler()
    if gcc is None:
        pytest.skip("this machine has no C compiler")
    built = directory / "_inplace.so"
    usual = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    command = [gcc, *usual, *flags, str(SOURCE), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return loaded(built)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_inplace", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cut(draw: random.Random, total: int, most: int) -> list[int]:
    """`total` as a sum of at most `most` positive numbers."""
    marks = sorted(draw.sample(range(1, total), min(most, total) - 1))
    return [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]


@settings(max_examples=60, deadline=None)
@given(stripes=st.integers(4, 300), pieces=st.integers(1, 4), parts=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_any_payload_in_any_parts_arrives_whole_with_the_checksum_of_xxhash(
    native: Any, stripes: int, pieces: int, parts: int, seed: int
) -> None:
    draw = random.Random(seed)
    payload = draw.randbytes(64 * stripes)
    memory, wanted = np.zeros(2 * len(payload) + 64, np.uint8), np.zeros(2 * len(payload) + 64, np.uint8)
    block, stride = draw.randrange(2), 64 * stripes
    with file_of(payload) as file, large_file_of(payload) as large:
        mapping = map_or_skip(native, large)
        ways = (
            ((file.fileno(), False), native.read_file),
            ((memoryview(payload),), native.copy_memory),
            ((mapping, False), native.copy_mapped),
        )
        for source, call in ways:
            memory[:], wanted[:] = 0, 0
            state, offset = native.new_state(len(payload)), 0
            for piece in cut(draw, stripes, pieces):
                sizes = [64 * count for count in cut(draw, piece, parts)]
                starts = list(np.cumsum([offset, *sizes[:-1]]))
                table = np.array([(at, stride, size) for at, size in zip(starts, sizes, strict=True)], np.int64)
                order = draw.sample(range(len(sizes)), len(sizes))  # the parts lie in memory in another order
                at = offset
                for row in order:
                    table[row][0], at = at, at + sizes[row]
                for (first, _, size), start in zip(table.tolist(), starts, strict=True):
                    begin = first + stride * block
                    wanted[begin : begin + size] = np.frombuffer(payload[start : start + size], np.uint8)
                assert call(*source, offset, memory.ctypes.data, table, block, state) == 64 * piece
                offset += 64 * piece
            assert native.checksum(state) == xxhash.xxh3_64_intdigest(payload)
            assert np.array_equal(memory, wanted)
        native.unmap(mapping)


@settings(max_examples=60, deadline=None)
@given(stripes=st.integers(4, 300), pieces=st.integers(1, 4), parts=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_any_parts_are_collected_in_order_with_the_checksum_of_xxhash(
    native: Any, stripes: int, pieces: int, parts: int, seed: int
) -> None:
    draw = random.Random(seed)
    nbytes, block, skew = 64 * stripes, draw.randrange(3), draw.choice([0, 1, 32])
    memory = np.frombuffer(draw.randbytes(3 * nbytes), np.uint8)
    target = bytearray(b"\x07" * (nbytes + 64 + skew))
    state, offset, wanted = native.new_state(nbytes), 0, b""
    for piece in cut(draw, stripes, pieces):
        sizes = [64 * count for count in cut(draw, piece, parts)]
        table = np.array([(draw.randrange(nbytes - size + 1), nbytes, size) for size in sizes], np.int64)
        native.collect(memoryview(target)[skew:], offset, memory.ctypes.data, table, block, state, draw.random() < 0.5)
        wanted += b"".join(memory[at + nbytes * block :][:size].tobytes() for at, _, size in table.tolist())
        offset += 64 * piece
    assert native.checksum(state) == xxhash.xxh3_64_intdigest(wanted)
    assert bytes(target) == b"\x07" * skew + wanted + b"\x07" * 64


def test_a_piece_is_not_collected_into_less_room(native: Any) -> None:
    memory, table, target = np.ones(512, np.uint8), np.array([[0, 0, 512]], np.int64), bytearray(600)
    with pytest.raises(ValueError, match="does not fit"):
        native.collect(target, 128, memory.ctypes.data, table, 0, native.new_state(512), False)
    with pytest.raises((TypeError, BufferError)):
        native.collect(bytes(600), 0, memory.ctypes.data, table, 0, native.new_state(512), True)
    assert not any(target)


@pytest.mark.parametrize("nbytes", [256, 320, 1024, 1088, 2048, 64 * 1023, 64 * 1024, 64 * 1025])
def test_lengths_beside_the_borders_of_the_format(native: Any, nbytes: int) -> None:
    payload = random.Random(nbytes).randbytes(nbytes)
    memory, state = np.zeros(nbytes, np.uint8), native.new_state(nbytes)
    native.copy_memory(memoryview(payload), 0, memory.ctypes.data, np.array([[0, 0, nbytes]], np.int64), 0, state)
    assert native.checksum(state) == xxhash.xxh3_64_intdigest(payload)
    assert memory.tobytes() == payload


def test_what_is_not_there_is_not_read_and_not_checked(native: Any) -> None:
    payload, table = bytes(500), np.array([[0, 0, 512]], np.int64)
    memory = np.zeros(512, np.uint8)
    with file_of(payload) as file:
        for source, call in (((file.fileno(), False), native.read_file), ((memoryview(payload),), native.copy_memory)):
            state = native.new_state(512)
            assert call(*source, 0, memory.ctypes.data, table, 0, state) < 512
            with pytest.raises(ValueError, match="not been read to its end"):
                native.checksum(state)
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.read_file(10**6, False, 0, memory.ctypes.data, table, 0, native.new_state(512))


def file_of(content: bytes) -> IO[bytes]:
    """A file that the page cache has. (tmpfs, and so memfd, cannot say what is in memory.)"""
    file = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
    file.write(content)
    file.flush()
    if not read_now(file.fileno(), [memoryview(bytearray(1))], 0):
        pytest.skip("the file system of temporary files cannot read what is in memory only")
    return file


def large_file_of(content: bytes = b"", nbytes: int = LARGE) -> IO[bytes]:
    """A file that may be mapped, and begins with this content."""
    return file_of(content + bytes(nbytes - len(content)))


def map_(native: Any, file: IO[bytes], nbytes: int, end: int) -> Any:
    """What `open_file` maps of it; NONE if it opens it instead, or neither."""
    mapping, fd, *rest = open_(native, file, nbytes, end)
    if fd >= 0:
        os.close(fd)
    return (mapping, *rest) if mapping else NONE


def open_(native: Any, file: IO[bytes], nbytes: int, end: int) -> Any:
    return native.open_file(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY, nbytes, end)


def map_or_skip(native: Any, file: IO[bytes]) -> int:
    mapping: int = map_(native, file, os.fstat(file.fileno()).st_size, 0)[0]
    if not mapping:
        pytest.skip("files have no large pages here, or the kernel cannot say so (PAGEMAP_SCAN, Linux 6.7)")
    return mapping


@pytest.mark.parametrize(
    "rows", [[[0, 0, 100]], [[0, 0, 0]], [[0, 0, -64]], [[0, 0, 576]], [[0, 0, 64]] * 1025, [[0, 0]]]
)
def test_parts_that_are_wrong_touch_nothing(native: Any, rows: list[list[int]]) -> None:
    memory, source = np.zeros(1024, np.uint8), memoryview(b"\x01" * 1024)
    with pytest.raises(ValueError, match="parts of a piece are wrong"):
        native.copy_memory(source, 0, memory.ctypes.data, np.array(rows, np.int64), 0, native.new_state(512))
    with pytest.raises(ValueError, match="parts of a piece are wrong"):
        native.copy_memory(
            source, 0, memory.ctypes.data, np.array([[0, 0, 0, 0, 64, 0]], np.int32), 0, native.new_state(512)
        )
    assert not memory.any()


def test_payloads_of_another_kind_are_refused(native: Any) -> None:
    for nbytes in (0, 64, 192, 300, 1000):
        with pytest.raises(ValueError, match="a multiple of 64"):
            native.new_state(nbytes)
    with pytest.raises(ValueError, match="the state"):
        native.copy_memory(memoryview(bytes(64)), 0, 0, np.array([[0, 0, 64]], np.int64), 0, bytearray(8))


# --- open files ---------------------------------------------------------------------------------------


def opened_or_skip(native: Any, file: IO[bytes], nbytes: int, end: int) -> tuple[int, bytes, float]:
    mapping, fd, last, modified = open_(native, file, nbytes, end)
    assert not mapping, "it is shorter than a large page"
    if fd < 0:
        pytest.skip("the kernel cannot say what is in memory (cachestat, Linux 6.5)")
    return fd, last, modified


def test_a_file_shorter_than_a_large_page_is_opened_and_its_last_call_closes_it(native: Any) -> None:
    content = random.Random(8).randbytes(64 * 2048)
    table = np.array([[0, 0, 64 * 1024]], np.int64)
    with file_of(content) as file:
        fd, last, modified = opened_or_skip(native, file, len(content), 120)
        assert (last, modified) == (content[-120:], pytest.approx(os.fstat(file.fileno()).st_mtime, abs=1e-3))
        state, memory = native.new_state(len(content)), np.zeros(len(content), np.uint8)
        half = len(content) // 2
        assert native.read_file(fd, False, 0, memory.ctypes.data, table, 0, state) == half
        assert os.fstat(fd).st_size == len(content), "it is still open"
        assert native.read_file(fd, True, half, memory.ctypes.data + half, table, 0, state) == half
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert native.checksum(state) == xxhash.xxh3_64_intdigest(content)
        assert memory.tobytes() == content


def test_a_last_call_that_is_wrong_leaves_nothing_open_or_mapped(native: Any) -> None:
    content, wrong = random.Random(8).randbytes(64 * 2048), np.array([[0, 0, 33]], np.int64)
    with file_of(content) as file:
        fd, _, _ = opened_or_skip(native, file, len(content), 120)
        with pytest.raises(ValueError, match="parts of a piece are wrong"):
            native.read_file(fd, True, 0, 0, wrong, 0, native.new_state(len(content)))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with large_file_of() as file:
        mapping = map_or_skip(native, file)
        with pytest.raises(ValueError, match="parts of a piece are wrong"):
            native.copy_mapped(mapping, True, 0, 0, wrong, 0, native.new_state(LARGE))
        with pytest.raises(ValueError, match="there is no mapping"):
            native.unmap(mapping)


def test_a_kernel_that_cannot_say_what_is_in_memory_is_asked_once(tmp_path: Path) -> None:
    native = compiled(tmp_path, "-DSYS_cachestat=99999")
    content = random.Random(9).randbytes(10_000)
    with file_of(content) as file:
        assert open_(native, file, len(content), 120) == NEITHER
    made = tmp_path / "made by open"
    assert native.open_file(str(made), os.O_RDONLY | os.O_CREAT, 10_000, 120) == NEITHER
    assert not made.exists(), "it opens no file any more"


def test_what_is_not_that_file_is_not_opened(native: Any, tmp_path: Path) -> None:
    content = random.Random(9).randbytes(10_000)
    with file_of(content) as file:
        os.close(opened_or_skip(native, file, len(content), 120)[0])
        for nbytes in (len(content) - 1, len(content) + 1):
            assert open_(native, file, nbytes, 120) == NEITHER
        with pytest.raises(ValueError, match="too long"):
            open_(native, file, 100, 120)
    link, path = tmp_path / "link", tmp_path / "file"
    path.write_bytes(content)
    link.symlink_to(path)
    assert native.open_file(str(path), os.O_RDONLY, len(content) - 1, 120) == NEITHER
    assert native.open_file(str(link), os.O_RDONLY | os.O_NOFOLLOW, len(content), 120) == NEITHER
    assert native.open_file(str(tmp_path), os.O_RDONLY, 4096, 120) == NEITHER
    assert native.open_file(str(tmp_path / "missing"), os.O_RDONLY, 4096, 120) == NEITHER
    assert open_below(tmp_path) == []


def test_a_file_that_is_not_all_in_memory_is_not_opened(native: Any, tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(bytes(600_000))
    with path.open("rb", buffering=0) as file:
        os.close(opened_or_skip(native, file, 600_000, 120)[0])
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if pages_in_memory(path):
            pytest.skip("this file system keeps its files in memory")
        assert open_(native, file, 600_000, 120) == NEITHER
        assert not pages_in_memory(path), "the kernel was not asked to read it"


# --- mappings -----------------------------------------------------------------------------------------


def mapped(native: Any, mapping: int, offset: int = 0, nbytes: int = LARGE, *, last: bool = False) -> tuple[int, bytes]:
    """What `copy_mapped` returns, and the memory that it copied to."""
    memory, state = np.full(nbytes, 7, np.uint8), native.new_state(nbytes)
    table = np.array([[0, 0, nbytes]], np.int64)
    return native.copy_mapped(mapping, last, offset, memory.ctypes.data, table, 0, state), memory.tobytes()


def test_a_file_that_is_cut_off_while_it_is_mapped_is_lost_and_nothing_else_happens(native: Any) -> None:
    content = random.Random(1).randbytes(2 * LARGE)
    with large_file_of(content, 2 * LARGE) as cut, large_file_of(content, 2 * LARGE) as whole:
        mappings = map_or_skip(native, cut), map_or_skip(native, whole)
        os.truncate(cut.fileno(), LARGE + 5000)
        assert mapped(native, mappings[0], 0, LARGE) == (LARGE, content[:LARGE])  # what is still there
        copied, bytes_ = mapped(native, mappings[0], LARGE, LARGE)
        assert copied == 0
        assert bytes_[:5000] == content[LARGE : LARGE + 5000]
        assert not any(bytes_[5000:])
        assert mapped(native, mappings[0], 0, LARGE)[0] == 0, "a mapping that has lost bytes stays lost"
        assert mapped(native, mappings[1], LARGE, LARGE) == (LARGE, content[LARGE:])
        for mapping in mappings:
            native.unmap(mapping)


def test_threads_whose_files_are_cut_off_all_the_time_get_the_bytes_or_hear_of_it(native: Any) -> None:
    content, over, lost = random.Random(2).randbytes(LARGE), threading.Event(), []
    with large_file_of(content) as file:
        native.unmap(map_or_skip(native, file))

        def vandal() -> None:
            while not over.is_set():
                os.truncate(file.fileno(), 0)  # all of it, so that it gets a large page again
                os.pwrite(file.fileno(), content, 0)

        def load() -> None:
            for _ in range(200):
                mapping, end, _ = map_(native, file, LARGE, 128)
                if mapping:
                    assert end == content[-128:]
                    copied, bytes_ = mapped(native, mapping, last=True)
                    state, again = native.new_state(LARGE), np.zeros(LARGE, np.uint8)
                    table = np.array([[0, 0, LARGE]], np.int64)
                    native.copy_memory(memoryview(bytes_), 0, again.ctypes.data, table, 0, state)
                    assert copied in (0, LARGE)
                    lost.append(copied == 0)

        with ThreadPoolExecutor(3) as pool:
            breaking, loads = pool.submit(vandal), [pool.submit(load) for _ in range(2)]
            try:
                for one in loads:
                    one.result()
            finally:
                over.set()
            breaking.result()
    print(f"{sum(lost)} of {len(lost)} mappings lost bytes")


def test_a_file_that_is_not_in_memory_or_too_short_is_not_mapped(native: Any) -> None:
    with large_file_of() as file:
        native.unmap(map_or_skip(native, file))
        native.forget_files()  # or the page cache keeps what is to leave it
        assert map_(native, file, LARGE - 1, 128) == NONE
        assert native.open_file("/proc/self/fd/1000000", os.O_RDONLY, LARGE, 128) == NEITHER
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), LARGE // 2, 4096, os.POSIX_FADV_DONTNEED)
        if read_now(file.fileno(), [memoryview(bytearray(1))], LARGE // 2):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # large pages leave as a whole
        assert map_(native, file, LARGE, 128) == NONE


def test_a_file_in_small_pages_is_not_mapped(native: Any) -> None:
    """To map them takes longer than to copy them."""
    content = random.Random(5).randbytes(LARGE)
    with large_file_of(content) as file, tempfile.TemporaryFile(buffering=0) as small:
        native.unmap(map_or_skip(native, file))
        for at in range(0, LARGE, 4096):
            small.write(content[at : at + 4096])
        assert map_(native, small, LARGE, 128) == NONE
        assert read_now(small.fileno(), [memoryview(bytearray(LARGE))], 0) == LARGE, "it is all there"
    native.forget_files()


def test_a_file_that_comes_back_from_the_disk_has_large_pages_again(native: Any, tmp_path: Path) -> None:
    content, path, cached = random.Random(6).randbytes(LARGE), tmp_path / "object", CachedIO()
    path.write_bytes(content)
    buffer = memoryview(bytearray(LARGE))
    for _ in range(20):  # the kernel may be short of large pages, or take some back
        with path.open("rb", buffering=0) as file:
            native.unmap(map_or_skip(native, file))
            native.forget_files()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if pages_in_memory(path):
                pytest.skip("this file system keeps its files in memory")
            cached.read(file.fileno(), buffer)
            assert bytes(buffer) == content
            mapping, end, _ = map_(native, file, LARGE, 128)
            if mapping:
                assert end == content[-128:]
                assert mapped(native, mapping, last=True) == (LARGE, content)
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
            mapping, whole = map_or_skip(native, file), nbytes // 64 * 64
            assert mapped(native, mapping, 0, whole, last=True) == (whole, content[:whole])
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
            assert mapped(native, map_or_skip(native, other), 0, LARGE, last=True) == (LARGE, bytes(LARGE))
        assert 1 <= ranges_of(other) <= 16, "those that do not fit are let go at once"
        native.forget_files()
        assert mapped(native, held, last=True) == (LARGE, content)
        native.forget_files()
        assert (ranges_of(file), ranges_of(other)) == (0, 0)


def test_there_are_as_many_mappings_as_numbers(native: Any) -> None:
    with large_file_of() as file:
        mappings = [map_or_skip(native, file) for _ in range(64)]
        assert sorted(mappings) == list(range(1, 65))
        assert map_(native, file, LARGE, 128) == NONE
        native.unmap(mappings[9])
        assert map_(native, file, LARGE, 3)[:2] == (mappings[9], bytes(3))
        assert mapped(native, mappings[9], last=True) == (LARGE, bytes(LARGE))
        assert map_(native, file, LARGE, 0)[:2] == (mappings[9], b"")
        with pytest.raises(ValueError, match="too long"):
            map_(native, file, LARGE, 257)
        assert mapped(native, mappings[0], 0, 4096)[0] == 4096
        assert mapped(native, mappings[0], LARGE - 4096, 4160)[0] == 0, "behind its end"
        for mapping in mappings:
            native.unmap(mapping)
    for wrong in (-1, 0, 1, 65):
        with pytest.raises(ValueError, match=f"there is no mapping {wrong}"):
            native.unmap(wrong)
        with pytest.raises(ValueError, match=f"there is no mapping {wrong}"):
            mapped(native, wrong)


@pytest.mark.parametrize("handlers", ["", "before", "after", "before after"])
def test_any_other_bus_error_ends_the_process_as_it_would_have(native: Any, handlers: str) -> None:
    """handlers: when Python's own handler, which prints where it happened, is set."""
    program = textwrap.dedent(f"""
        import ctypes, faulthandler, importlib.util, mmap, os, tempfile
        spec = importlib.util.spec_from_file_location("_inplace", {native.__file__!r})
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        if "before" in {handlers!r}:
            faulthandler.enable()
        native.catch_bus_errors()
        if "after" in {handlers!r}:
            faulthandler.disable()
            faulthandler.enable()
        file = tempfile.TemporaryFile()
        file.write(bytes({LARGE}))
        file.flush()
        native.open_file(f"/proc/self/fd/{{file.fileno()}}", os.O_RDONLY, {LARGE}, 0)
        mine = mmap.mmap(file.fileno(), {LARGE})
        os.truncate(file.fileno(), 0)
        print("alive", flush=True)
        print(mine[0])
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "alive\n")
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(handlers)


# --- and its twin -----------------------------------------------------------------------------------


class Blocks:
    """Memory of a layout, and one sealed object, as a file and in memory."""

    def __init__(self, cache: CacheSection, path: Path) -> None:
        layout = build_layout(cache)
        self.bytes = np.frombuffer(os.urandom(layout.device.extent), np.uint8).copy()
        self.memory = BlockMemory(
            Arena(layout.device, self.bytes.ctypes.data), layout.packed(1, layout.block_bytes + FOOTER_BYTES)
        )
        payload = layout.block_bytes
        self.object = memoryview(bytearray(os.urandom(payload) + bytes(FOOTER_BYTES)))
        seal(self.object, payload, stamp_of_name(NAME))
        path.write_bytes(self.object)
        self.path = str(path)
        self.fd = os.open(path, os.O_RDONLY)

    def load(self, block: int, *, file: bool) -> bool:
        loan = Loan()
        inspection = Inspection(stamp_of_name(NAME), self.object.nbytes)
        one = BlockInPlace(self.memory, block, inspection, loan)

        def from_memory(buffers: Sequence[memoryview], offset: int) -> int:
            for buffer in buffers:
                buffer[:] = self.object[offset : offset + buffer.nbytes]
                offset += buffer.nbytes
            return sum(buffer.nbytes for buffer in buffers)

        def from_file(buffers: Sequence[memoryview], offset: int) -> int:
            return read_now(self.fd, buffers, offset)

        if file and one.load_file(self.path, os.O_RDONLY) is not None:
            good = True
        else:
            good = one.load(from_file if file else from_memory, self.fd if file else self.object)
        one.leave()
        assert not loan._holders
        return good


CACHES: dict[str, dict[str, Any]] = {
    "GQA": {"layers": 3, "kv_heads": 2, "head_dim": 32, "block_size": 16},
    "MLA": {"layers": 2, "attention": "mla", "kv_lora_rank": 64, "qk_rope_head_dim": 32, "block_size": 16},
    "large": {"layers": 16, "kv_heads": 4, "head_dim": 128, "block_size": 65},
    "odd": {"layers": 3, "attention": "mla", "kv_lora_rank": 50, "qk_rope_head_dim": 7, "block_size": 3},
}


def mappings_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The mapping, or 0, that each call of open_file returns from now on."""
    mappings: list[int] = []
    if block_memory.NATIVE:
        block_memory.map_files()
        open_file = block_memory._inplace.open_file

        def told(*arguments: Any) -> Any:
            made = open_file(*arguments)
            mappings.append(made[0])
            return made

        monkeypatch.setattr(block_memory._inplace, "open_file", told)
    return mappings


@pytest.mark.parametrize("file", [True, False], ids=["file", "memory"])
@pytest.mark.parametrize("way", ["native", "Python"])
@pytest.mark.parametrize("shape", CACHES)
async def test_both_ways_load_the_block_and_no_other_byte_and_see_each_damage(
    tmp_path: Path, shape: str, way: str, file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_memory, "NATIVE", way == "native" and block_memory.NATIVE)
    monkeypatch.setattr(block_memory, "PIECE_BYTES", 1024)
    mappings = mappings_of(monkeypatch)
    blocks = Blocks(CacheSection(device_blocks=5, **CACHES[shape]), tmp_path / "object")
    assert (blocks.memory.tables is not None) == (block_memory.NATIVE and shape != "odd")
    before = blocks.bytes.copy()
    assert blocks.load(3, file=file)
    assert not any(mappings) or (way, file, shape) == ("native", True, "large")
    parts = [(first + 3 * stride, n) for piece in blocks.memory.pieces for first, stride, n in piece.parts]
    assert b"".join(blocks.bytes[at : at + n].tobytes() for at, n in parts) == bytes(blocks.object[:-FOOTER_BYTES])
    mine = np.zeros(len(before), bool)
    for at, n in parts:
        mine[at : at + n] = True
    assert np.array_equal(blocks.bytes[~mine], before[~mine])
    for position in (0, 1000, blocks.object.nbytes - FOOTER_BYTES - 1):
        blocks.object[position] ^= 1
        (tmp_path / "object").write_bytes(blocks.object)
        assert not blocks.load(2, file=file), position
        blocks.object[position] ^= 1
    (tmp_path / "object").write_bytes(blocks.object)
    assert blocks.load(2, file=file)
    os.close(blocks.fd)


@pytest.mark.parametrize("way", ["native", "Python"])
async def test_a_thread_without_a_loan_touches_no_block(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_memory, "NATIVE", way == "native" and block_memory.NATIVE)
    blocks = Blocks(CacheSection(device_blocks=5, **CACHES["GQA"]), tmp_path / "object")
    before, take = blocks.bytes.copy(), Loan.take
    monkeypatch.setattr(Loan, "take", lambda loan: take(loan) and bool(loan.give_back()))
    assert not blocks.load(1, file=True)
    assert np.array_equal(blocks.bytes, before)
    os.close(blocks.fd)


async def test_a_disk_that_fails_under_a_load_is_left_to_who_opens_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not block_memory.NATIVE:
        pytest.skip("the installation found no compiler")
    blocks = Blocks(CacheSection(device_blocks=3, **CACHES["GQA"]), tmp_path / "object")
    calls, read_file = [], block_memory._inplace.read_file

    def fails(fd: int, last: bool, *rest: Any) -> int:
        calls.append(last)
        read_file(fd, last, *rest)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    inspection = Inspection(stamp_of_name(NAME), blocks.object.nbytes)
    one = BlockInPlace(blocks.memory, 1, inspection, Loan())
    with monkeypatch.context() as patch:
        patch.setattr(block_memory._inplace, "read_file", fails)
        assert one.load_file(blocks.path, os.O_RDONLY) is None
    if not calls:
        pytest.skip("the kernel cannot say what is in memory (cachestat, Linux 6.5)")
    os.close(blocks.fd)
    assert open_below(tmp_path) == []


async def test_a_file_that_is_cut_off_under_a_load_costs_this_load_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings = mappings_of(monkeypatch)
    blocks = Blocks(CacheSection(device_blocks=3, **CACHES["large"]), tmp_path / "object")
    assert blocks.load(1, file=True)
    if not any(mappings):
        pytest.skip("no file can be mapped here")
    take = Loan.take

    def cut_off(loan: Loan) -> bool:
        os.truncate(tmp_path / "object", 100_000)
        return take(loan)

    monkeypatch.setattr(Loan, "take", cut_off)  # it is mapped by then
    assert not blocks.load(2, file=True)
    monkeypatch.setattr(Loan, "take", take)
    (tmp_path / "object").write_bytes(blocks.object)
    assert blocks.load(2, file=True)
    os.close(blocks.fd)


def test_a_piece_has_no_more_parts_than_the_extension_takes() -> None:
    assert f"#define MOST_PARTS {block_memory.MOST_BUFFERS} " in SOURCE.read_text()


@pytest.mark.parametrize("name", ["workers/_inplace", "tiers/_copyruns"])
def test_an_extension_has_no_thread_local_data(name: str) -> None:
    """The C library allocates it when a thread first uses it, and aborts the process if there is no memory."""
    found = list(Path(block_memory.__file__).parents[1].glob(f"{name}.*.so"))
    if not found:
        pytest.skip("the installation found no compiler")
    for path in found:
        elf = path.read_bytes()
        assert elf[:5] == b"\x7fELF\x02", "64 bits"
        (table,) = struct.unpack_from("<Q", elf, 32)
        size, count = struct.unpack_from("<HH", elf, 54)
        kinds = [struct.unpack_from("<I", elf, table + i * size)[0] for i in range(count)]
        assert 1 in kinds, "PT_LOAD"
        assert 7 not in kinds, "PT_TLS"
