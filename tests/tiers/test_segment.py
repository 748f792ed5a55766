"""Shared memory: attached by others, gone with its owner, and never left behind by the dead."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.descriptors import open_memory_and_files
from transferd.errors import RequestError, TierError
from transferd.tiers import populate
from transferd.tiers import segment as module
from transferd.tiers.offered import DIRECTORY
from transferd.tiers.segment import (
    PREFIX,
    SharedMapping,
    SharedSegment,
    attach_arrays,
    remove_stale_segments,
    unlink_all,
)

OWNER = """
import sys
from transferd.tiers.segment import SharedSegment
segment = SharedSegment(sys.argv[1], 8192, create=True)
print("made", flush=True)
sys.stdin.read()
"""


def name(suffix: str) -> str:
    return f"{module.PREFIX}test.{os.getpid()}.{suffix}"


@pytest.fixture
def other_janitors(monkeypatch: pytest.MonkeyPatch) -> None:
    """See nothing of this test's: every daemon that another test starts removes what the dead have left."""
    monkeypatch.setattr(module, "PREFIX", f"of-{PREFIX}")


def owner(segment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, segment], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_processes_share_a_segments_bytes() -> None:
    segment = SharedSegment(name("shared"), 4096, create=True)
    data = {
        "name": segment.name,
        "nbytes": 4096,
        "arrays": [{"plane": "key", "layer": 0, "offset": 256, "shape": [2, 3], "dtype": "uint16"}],
    }
    code = f"from transferd.tiers.segment import attach_arrays; attach_arrays({data!r})['key'][0][1] = 77"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    array = attach_arrays(data)["key"][0]
    assert array.tolist() == [[0, 0, 0], [77, 77, 77]]
    assert array.dtype == np.uint16
    assert (DIRECTORY / segment.name).exists(), "an attaching process that ends takes nothing with it"
    segment.close()
    segment.close()
    assert not (DIRECTORY / segment.name).exists()
    assert array[1, 0] == 77, "a mapping outlives the name"


@pytest.mark.usefixtures("other_janitors")
def test_segments_of_the_dead_are_removed_and_those_of_the_living_are_not() -> None:
    living, dead = owner(name("living")), owner(name("dead"))
    try:
        dead.send_signal(signal.SIGKILL)
        dead.communicate()
        assert (DIRECTORY / name("dead")).exists()
        removed = remove_stale_segments()
        assert name("dead") in removed
        assert name("living") not in removed
        assert (DIRECTORY / name("living")).exists()
    finally:
        end(living)
    assert name("living") in remove_stale_segments()


def test_a_name_in_use_is_refused_and_left_alone() -> None:
    segment = SharedSegment(name("taken"), 4096, create=True)
    with pytest.raises(TierError, match="already exists"):
        SharedSegment(name("taken"), 4096, create=True)
    assert (DIRECTORY / name("taken")).exists()
    segment.close()


def test_more_memory_than_there_is_is_an_error_and_not_a_signal_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(os, "posix_fallocate")  # so nothing is filled in vain
        with pytest.raises(TierError, match=r"cannot allocate .* No space left"):
            SharedSegment(name("huge"), 2**46, create=True)
    assert not (DIRECTORY / name("huge")).exists()


def test_memory_that_an_ending_process_makes_is_not_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate, "PIECE", 4096)
    fallocate, pieces = os.posix_fallocate, list[tuple[int, int]]()

    def allocate(fd: int, at: int, length: int) -> None:
        fallocate(fd, at, length)
        pieces.append((at, length))
        populate.PROGRESS.cancelled = len(pieces) == 2

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(populate.PROGRESS, "cancelled", False)
    with pytest.raises(TierError, match=r"cannot allocate 20000 bytes .*: the process is ending"):
        SharedSegment(name("ending"), 20000, create=True)
    assert pieces == [(0, 4096), (4096, 4096)]
    assert not (DIRECTORY / name("ending")).exists()


def test_a_process_that_ends_removes_the_names_of_what_it_has_and_of_what_it_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, go = threading.Event(), threading.Event()

    def held(*_: object) -> None:
        began.set()
        assert go.wait(60)

    monkeypatch.setattr(module, "_made_here", set())  # only what this test makes
    has = SharedSegment(name("has"), 4096, create=True)
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(module, "_allocate", held)
        making = pool.submit(SharedSegment, name("makes"), 4096, create=True)
        try:
            assert began.wait(60)
            unlink_all()
            assert not (DIRECTORY / name("has")).exists()
            assert not (DIRECTORY / name("makes")).exists()
        finally:
            go.set()
    has.close()
    making.exception()


@pytest.mark.parametrize(
    "wrong", ["", ".", "..", "../etc/passwd", "a\0b", "\ud800", "\x1b[2J", "x\n", "x" * 256, "é" * 128]
)
def test_an_invalid_segment_name_is_a_bad_request(wrong: str) -> None:
    with pytest.raises(RequestError, match="not a valid name of shared memory") as caught:
        attach_arrays({"name": wrong, "nbytes": 1, "arrays": []})
    assert caught.value.reason == "bad_value"
    assert str(caught.value).isprintable()


def test_a_segment_that_is_not_there_is_said_so_in_printable_words() -> None:
    with pytest.raises(TierError, match="cannot open shared memory") as caught:
        attach_arrays({"name": "transferd.nobody", "nbytes": 1, "arrays": []})
    assert str(caught.value).isprintable()


def test_memory_of_another_user_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TierError, match=r"'transferd\.x': permission denied; run daemon and engine as one user$"):
        attach_arrays({"name": "transferd.x", "nbytes": 1, "arrays": []})


@contextmanager
def in_the_directory(suffix: str) -> Iterator[Path]:
    path = DIRECTORY / name(suffix)
    try:
        yield path
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_link_is_not_followed_however_fitting_its_target(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_bytes(bytes(4096))
    with in_the_directory("link") as path:
        path.symlink_to(target)
        with pytest.raises(TierError, match="symbolic link"):
            attach_arrays({"name": path.name, "nbytes": 4096, "arrays": []})


def test_only_regular_files_are_mapped() -> None:
    with in_the_directory("pipe") as path:
        os.mkfifo(path)
        with pytest.raises(TierError, match="not a regular file"):
            attach_arrays({"name": path.name, "nbytes": 1, "arrays": []})
    with in_the_directory("folder") as path:
        path.mkdir()
        with pytest.raises(TierError, match="directory"):
            attach_arrays({"name": path.name, "nbytes": 1, "arrays": []})


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
def test_the_mode_does_not_depend_on_the_umask(mask: int) -> None:
    before = os.umask(mask)
    try:
        segment = SharedSegment(name("mode"), 4096, create=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((DIRECTORY / segment.name).stat().st_mode) == 0o660
    segment.close()


def janitors(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """`times` janitors run between a segment's creation and its lock. Returns what of this test's they removed."""
    removed: list[str] = []
    flock = fcntl.flock

    def meet(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and len(removed) < times:
            removed.extend(gone for gone in remove_stale_segments() if gone == name("swept"))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", meet)
    return removed


@pytest.mark.usefixtures("other_janitors")
def test_a_janitor_that_comes_between_creation_and_lock_costs_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = janitors(monkeypatch, 3)
    segment = SharedSegment(name("swept"), 4096, create=True)
    assert removed == [name("swept")] * 3
    here = (DIRECTORY / segment.name).stat()
    assert here.st_size == 4096
    assert name("swept") not in remove_stale_segments(), "it is locked now"
    data = {"name": segment.name, "nbytes": 4096}
    data |= {"arrays": [{"plane": "key", "layer": 0, "offset": 0, "shape": [4096], "dtype": "uint8"}]}
    attach_arrays(data)["key"][0][:] = 7
    assert bytes(segment.buffer[:]) == b"\7" * 4096, "what is mapped is what has the name"
    segment.close()


@pytest.mark.usefixtures("other_janitors")
def test_janitors_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    janitors(monkeypatch, 10_000)
    with pytest.raises(TierError, match="was removed while it was being created"):
        SharedSegment(name("swept"), 4096, create=True)
    assert not (DIRECTORY / name("swept")).exists()


@pytest.mark.usefixtures("other_janitors")
def test_a_janitor_leaves_a_successor_under_the_same_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has opened a dead segment; before it has the lock, another takes the name."""
    dead = owner(name("again"))
    end(dead)
    made: list[SharedSegment] = []
    flock = fcntl.flock

    def replaced(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB and not made and os.fstat(fd).st_ino == (DIRECTORY / name("again")).stat().st_ino:
            (DIRECTORY / name("again")).unlink()
            made.append(SharedSegment(name("again"), 4096, create=True))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", replaced)
    assert name("again") not in remove_stale_segments()
    assert (DIRECTORY / name("again")).exists()
    made[0].close()


def test_a_segment_that_is_too_small_is_refused() -> None:
    segment = SharedSegment(name("small"), 4096, create=True)
    with pytest.raises(TierError, match="has only 4096 bytes; 8192 are needed"):
        attach_arrays({"name": segment.name, "nbytes": 8192, "arrays": []})
    segment.close()


def test_others_files_are_not_ours_to_remove(tmp_path: Path) -> None:
    foreign = DIRECTORY / f"not-transferd-{os.getpid()}"
    foreign.write_bytes(b"x")
    try:
        remove_stale_segments()
        assert foreign.exists()
    finally:
        foreign.unlink()


@pytest.mark.parametrize("nbytes", [4096, 4 * 1024**2])
def test_a_mapping_takes_no_descriptor(nbytes: int) -> None:
    fd = os.memfd_create("mapped")
    os.ftruncate(fd, nbytes)
    mapping = SharedMapping(fd, nbytes)
    mapping.view[:3] = b"abc"
    assert open_memory_and_files()["/memfd:mapped (deleted)"] == 1, "the one that the test has opened"
    assert os.pread(fd, 3, 0) == b"abc"
    mapping.close()
    os.close(fd)
