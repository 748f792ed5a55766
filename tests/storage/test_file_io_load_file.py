"""`prepared_load` of the extension _files: a whole file, or none, and then file_io.py finds out why."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import put_stranger, skip_without_direct_io
from tests.support.descriptors import open_below
from tests.support.page_cache import pages_in_memory
from transferd.runtime.native import NativeCall
from transferd.storage.file_io import UNIT
from transferd.storage.opening import READ_FLAGS

FLAGS = READ_FLAGS | os.O_DIRECT
CONTENT = random.Random(1).randbytes(3 * UNIT + 120)
ALL = (0, 2**40, 0)  # of a file, whatever its length
READ, NOT = [1], [-1]


@pytest.fixture(scope="module")
def native() -> Any:
    return pytest.importorskip("transferd.storage._files", reason="the installation found no compiler")


def load(native: Any, path: Path, data: memoryview, flags: int) -> list[int]:
    call = native.prepared_load([(str(path), data, 0, 0)], [], data.nbytes, 1, None, None, b"", flags, ALL)
    NativeCall(call)()
    answers: list[int] = native.answers(call)
    return answers


@pytest.fixture
def path(tmp_path: Path) -> Path:
    skip_without_direct_io(tmp_path)
    return tmp_path / "object"


def memory(nbytes: int, offset: int = 0) -> memoryview:
    """Memory that begins at a multiple of UNIT, or `offset` bytes after one; all 0xAA, and a unit longer than that."""
    whole = memoryview(mmap.mmap(-1, nbytes + 2 * UNIT))
    whole[:] = b"\xaa" * len(whole)
    return whole[offset:]


@pytest.mark.parametrize("nbytes", [1, 120, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT, len(CONTENT)])
@pytest.mark.parametrize("dirty", [True, False])
@pytest.mark.parametrize("flags", [FLAGS, READ_FLAGS], ids=["past the page cache", "through it"])
def test_a_load_fills_the_memory_and_no_byte_more(
    native: Any, path: Path, nbytes: int, dirty: bool, flags: int
) -> None:
    path.write_bytes(CONTENT[:nbytes])
    if not dirty:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    target, kept = memory(nbytes), pages_in_memory(path)
    assert load(native, path, target[:nbytes], flags) == READ
    assert target[:nbytes] == CONTENT[:nbytes]
    assert set(target[nbytes:]) == {0xAA}
    assert dirty or flags == READ_FLAGS or pages_in_memory(path) <= kept, "the page cache got none of it"
    assert open_below(path.parent) == []


@pytest.mark.parametrize("nbytes", [len(CONTENT) - 1, len(CONTENT) + 1, 2 * UNIT, 4 * UNIT])
def test_a_file_of_another_length_is_not_read(native: Any, path: Path, nbytes: int) -> None:
    path.write_bytes(CONTENT)
    target = memory(nbytes)
    assert load(native, path, target[:nbytes], FLAGS) == NOT
    assert set(target) == {0xAA}
    assert open_below(path.parent) == []


@pytest.mark.parametrize("stranger", ["", "fifo", "directory", "link"])
def test_what_is_no_file_is_not_read_and_nothing_waits_for_it(native: Any, path: Path, stranger: str) -> None:
    kept = path.with_name("kept")
    kept.write_bytes(CONTENT)
    if stranger:
        put_stranger(path, stranger, kept)
    assert load(native, path, memory(len(CONTENT))[: len(CONTENT)], FLAGS) == NOT
    assert open_below(path.parent) == []


def test_memory_that_the_disk_cannot_write_to_is_left_to_others(native: Any, path: Path) -> None:
    path.write_bytes(CONTENT)
    data = memory(len(CONTENT), offset=1)[: len(CONTENT)]
    assert load(native, path, data, FLAGS) == NOT
    assert set(data) == {0xAA}
    with pytest.raises((TypeError, BufferError)):
        load(native, path, memoryview(bytes(10)), FLAGS)
