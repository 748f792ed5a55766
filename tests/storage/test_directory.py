"""Who can reach what is stored: the daemon's user alone, whatever the umask, also in a store made earlier.

And whether the directory is still ours.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transferd.errors import StorageUnavailable
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage import file_io
from transferd.storage.base import Item
from transferd.storage.batch import Write
from transferd.storage.directory import ObjectDirectory
from transferd.storage.queues import GONE


@pytest.fixture(params=[0o000, 0o007, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*")) if path.is_dir()}


def pull(root: Path) -> None:
    """Its disk is gone; what it was mounted on is there."""
    root.rename(root.parent / "pulled")
    root.mkdir()


def store(root: Path) -> None:
    """Open it, write an object into a directory that is not there yet, close it."""
    directory = ObjectDirectory(root, fsync=True, clock=SYSTEM_CLOCK)
    directory.open()
    directory.write("model/generation/ab/0", memoryview(b"bytes"))
    directory.close()


def test_every_directory_of_a_store_is_the_daemons_alone(tmp_path: Path, umask: int) -> None:
    store(tmp_path / "missing" / "store")
    assert modes(tmp_path / "missing" / "store") == {0o700}


@pytest.mark.parametrize(("before", "after"), [(0o770, 0o700), (0o755, 0o700), (0o750, 0o750), (0o700, 0o700)])
def test_a_store_that_others_could_write_or_all_could_read_is_closed_at_its_top(
    tmp_path: Path, before: int, after: int
) -> None:
    root = tmp_path / "store"
    store(root)
    root.chmod(before)
    store(root)
    assert stat.S_IMODE(root.stat().st_mode) == after


def test_an_object_of_a_disk_that_is_not_mounted_is_not_gone(tmp_path: Path) -> None:
    """Or its block would be retracted, and stored again, while the disk that has it is away."""
    root, name = tmp_path / "store", "model/generation/ab/0"
    directory = ObjectDirectory(root, fsync=False, clock=SYSTEM_CLOCK)
    directory.open()
    directory.write(name, memoryview(b"bytes"))
    assert directory.missing(name, 5) == ""
    pull(root)
    for look in (lambda: directory.missing(name, 5), lambda: directory.read(name, memoryview(bytearray(5)))):
        with pytest.raises(StorageUnavailable, match="not this daemon's any more"):
            look()
    root.rmdir()
    (tmp_path / "pulled").rename(root)
    assert directory.missing(name, 5) == ""
    assert directory.missing("model/generation/cd/0", 5) == GONE
    directory.close()


def test_a_disk_that_goes_during_a_write_leaves_nothing_beneath_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, name = tmp_path / "store", "model/generation/ab/0"
    directory = ObjectDirectory(root, fsync=False, clock=SYSTEM_CLOCK)
    directory.open()
    put = directory._io.put

    def pulled(*args: Any, **kwargs: Any) -> None:
        pull(root)
        put(*args, **kwargs)

    monkeypatch.setattr(directory._io, "put", pulled)
    with pytest.raises(StorageUnavailable, match="not this daemon's any more"):
        directory.write(name, memoryview(b"bytes"))
    assert not list(root.iterdir())
    directory.close()


@pytest.mark.skipif(not file_io.NATIVE, reason="the installation had no compiler")
def test_a_disk_that_goes_during_a_native_call_leaves_nothing_beneath_it(tmp_path: Path) -> None:
    root = tmp_path / "store"
    directory = ObjectDirectory(root, fsync=False, clock=SYSTEM_CLOCK)
    directory.open()
    writes = [Write(i, Item(f"model/generation/ab{i}/0", 5), []) for i in range(4)]

    def fill(position: int, data: memoryview, near: bool, /) -> bool:
        data[:] = b"bytes"
        if position == 1:
            pull(root)
        return True

    storing = directory.storing(writes, fill, [memoryview(bytearray(5))], len(writes), True, lambda *_: None)
    storing.call()
    assert storing.ended() == [True, None, None, None]
    assert not list(root.iterdir())
    directory.close()
