"""`put` of file_io.py: what it does to a file, and says of it. test_file_runs.py holds the extension to the same."""

from __future__ import annotations

import errno
import mmap
import random
import resource
import signal
from pathlib import Path

import pytest

from tests.storage.harness import skip_without_direct_io
from tests.support.descriptors import open_below
from transferd.storage.file_io import UNIT, CachedIO, DirectIO

CONTENT = random.Random(1).randbytes(3 * UNIT + 120)


def put(
    directory: Path,
    content: bytes = CONTENT,
    *,
    to: str = "object",
    direct: bool = False,
    allocates: bool = False,
    syncs: bool = False,
) -> None:
    """Put `content` at directory/to, by way of directory/temporary."""
    io, data = (DirectIO(), aligned(content)) if direct else (CachedIO(), memoryview(bytearray(content)))
    io.preallocates = allocates
    io.put(str(directory / "temporary"), str(directory / to), data, 0o640, syncs=syncs)


def aligned(content: bytes) -> memoryview:
    """A copy whose address is a multiple of UNIT."""
    memory = memoryview(mmap.mmap(-1, max(1, len(content))))[: len(content)]
    memory[:] = content
    return memory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("nbytes", [0, 1, UNIT - 1, UNIT, UNIT + 1, len(CONTENT)])
@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
@pytest.mark.parametrize("allocates", [False, True])
def test_a_new_file_is_complete_when_it_gets_its_name(
    tmp_path: Path, nbytes: int, direct: bool, allocates: bool
) -> None:
    if direct:
        skip_without_direct_io(tmp_path)
    put(tmp_path, CONTENT[:nbytes], direct=direct, allocates=allocates, syncs=True)
    assert (tmp_path / "object").read_bytes() == CONTENT[:nbytes]
    assert (names(tmp_path), open_below(tmp_path)) == (["object"], [])


def test_a_new_file_never_takes_the_place_of_one_that_is_being_written(tmp_path: Path) -> None:
    (tmp_path / "temporary").write_bytes(b"somebody's")
    with pytest.raises(FileExistsError):
        put(tmp_path)
    assert (tmp_path / "temporary").read_bytes() == b"somebody's"


def test_a_missing_directory_is_told_and_a_complete_file_keeps_its_bytes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        put(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        put(tmp_path, to="missing/object")
    assert (tmp_path / "temporary").read_bytes() == CONTENT, "the file is complete"
    assert open_below(tmp_path) == []


def test_a_full_disk_returns_its_errno(tmp_path: Path) -> None:
    """No disk is filled for it: no file may become longer than that."""
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (UNIT, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as full:
            put(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (full.value.errno, names(tmp_path), open_below(tmp_path)) == (errno.EFBIG, ["temporary"], [])
