"""put_file.py: what it does to a file, and says of it. test_file_runs.py holds the extension to the same."""

from __future__ import annotations

import errno
import mmap
import os
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage.harness import put_stranger, skip_without_direct_io
from tests.support.descriptors import open_below
from transferd.storage.file_io import UNIT
from transferd.storage.put_file import Reached, put_file

FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
CONTENT = random.Random(1).randbytes(3 * UNIT + 120)


def put(
    directory: Path,
    content: bytes = CONTENT,
    *,
    spare: bool = False,
    to: str = "object",
    direct: bool = False,
    allocates: bool = False,
    syncs: bool = False,
) -> tuple[int, int]:
    """Put `content` at directory/to, by way of directory/temporary. spare: overwrite directory/spare."""
    data, whole, flags = memoryview(bytearray(content)), 0, FLAGS
    if direct:
        data, whole, flags = aligned(content), len(content) // UNIT * UNIT, FLAGS | os.O_DIRECT
    return put_file(
        str(directory / "spare") if spare else None,
        str(directory / "temporary"),
        str(directory / to),
        data,
        whole,
        flags,
        0o640,
        allocates,
        syncs,
    )


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
    assert put(tmp_path, CONTENT[:nbytes], direct=direct, allocates=allocates, syncs=True) == (0, 0)
    assert names(tmp_path) == ["object"]
    assert (tmp_path / "object").read_bytes() == CONTENT[:nbytes]
    assert (tmp_path / "object").stat().st_mode & 0o777 == 0o640 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
def test_a_file_is_overwritten_and_stays_the_same_file(tmp_path: Path, direct: bool) -> None:
    if direct:
        skip_without_direct_io(tmp_path)
    (tmp_path / "spare").write_bytes(bytes(len(CONTENT)))
    before = (tmp_path / "spare").stat().st_ino
    assert put(tmp_path, spare=True, direct=direct, allocates=True) == (Reached.NAMED, 0)
    assert (tmp_path / "object").read_bytes() == CONTENT
    assert (names(tmp_path), (tmp_path / "object").stat().st_ino) == (["object"], before)


@pytest.mark.parametrize("allocates", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 2 * UNIT, 4 * UNIT])
def test_a_file_of_another_length_is_overwritten_and_gets_the_new_one(
    tmp_path: Path, nbytes: int, allocates: bool
) -> None:
    (tmp_path / "spare").write_bytes(b"x" * nbytes)
    before = (tmp_path / "spare").stat().st_ino
    assert put(tmp_path, spare=True, allocates=allocates) == (Reached.NAMED, 0)
    assert ((tmp_path / "object").read_bytes(), (tmp_path / "object").stat().st_ino) == (CONTENT, before)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_link(path: Path) -> None:
    kept = path.with_name("kept")
    kept.write_bytes(bytes(len(CONTENT)))
    put_stranger(path, "link", kept)


def a_fifo(path: Path) -> None:
    put_stranger(path, "fifo", path)


def a_file_with_a_backup(path: Path) -> None:
    path.write_bytes(bytes(len(CONTENT)))
    os.link(path, path.with_name("backup"))


@pytest.mark.parametrize(
    ("stranger", "answer"),
    [
        (a_directory, (Reached.NOT_OPENED, errno.EISDIR)),
        (a_link, (Reached.NOT_OPENED, errno.ELOOP)),
        (a_fifo, (Reached.NOT_OPENED, errno.ENXIO)),
        (a_file_with_a_backup, (Reached.UNFIT, 0)),
    ],
)
def test_a_stranger_in_the_spares_place_is_not_written_to(
    tmp_path: Path, stranger: Callable[[Path], None], answer: tuple[int, int]
) -> None:
    stranger(tmp_path / "spare")
    before = names(tmp_path)
    assert put(tmp_path, spare=True) == answer
    assert names(tmp_path) == sorted({*before, "temporary"} - {"spare"})
    for path in tmp_path.iterdir():
        assert not path.is_file() or not any(path.read_bytes())


def test_a_spare_file_that_has_gone_or_cannot_be_taken_changes_nothing(tmp_path: Path) -> None:
    assert put(tmp_path, spare=True) == (Reached.NOT_RETIRED, errno.ENOENT)
    (tmp_path / "spare").write_bytes(CONTENT)
    (tmp_path / "temporary").mkdir()
    assert put(tmp_path, spare=True) == (Reached.NOT_RETIRED, errno.EISDIR)
    assert names(tmp_path) == ["spare", "temporary"]


def test_a_new_file_never_takes_the_place_of_one_that_is_being_written(tmp_path: Path) -> None:
    (tmp_path / "temporary").write_bytes(b"somebody's")
    assert put(tmp_path) == (Reached.NOT_OPENED, errno.EEXIST)
    assert (tmp_path / "temporary").read_bytes() == b"somebody's"


def test_reached_shows_which_directory_is_missing(tmp_path: Path) -> None:
    assert put(tmp_path / "missing") == (Reached.NOT_OPENED, errno.ENOENT)
    assert put(tmp_path, to="missing/object") == (Reached.NOT_NAMED, errno.ENOENT)
    assert (tmp_path / "temporary").read_bytes() == CONTENT, "the file is complete"


def test_a_full_disk_returns_its_errno(tmp_path: Path) -> None:
    """No disk is filled for it: no file may become longer than that."""
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (UNIT, before[1]))
    try:
        assert put(tmp_path) == (Reached.NOT_FILLED, errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert names(tmp_path) == ["temporary"]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    put(tmp_path)
    put(tmp_path, spare=True)
    a_file_with_a_backup(tmp_path / "spare")
    put(tmp_path, spare=True)
    put(tmp_path)
    (tmp_path / "temporary").unlink()
    put(tmp_path, to="missing/object")
    assert open_below(tmp_path) == []
