"""Stores on real file systems of their own, which tests mount, unmount and turn read-only."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.harness import Harness
from transferd.config import FileStorageSection
from transferd.config.size import Capacities
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.base import Found
from transferd.storage.disks import Disk, Disks

NBYTES = 4096
EACH = 256 * NBYTES
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")


def names(count: int, first: int = 0) -> list[str]:
    return [f"m/f/g/{i:04x}/{rank}" for i in range(first, first + count) for rank in range(2)]


def content(name: str) -> bytes:
    return (name.encode() * NBYTES)[:NBYTES]


def disks(paths: list[Path], capacity: int | list[int | str] = EACH) -> Disks:
    section = FileStorageSection(path=[str(path) for path in paths], capacity=Capacities.parse(capacity))
    return Disks([Disk(one, scrub_rate=0, clock=SYSTEM_CLOCK) for one in section.disks])


async def put(harness: Harness, these: list[str]) -> list[Found]:
    outcomes = await harness.put(*((name, content(name)) for name in these))
    return [outcome.found for outcome in outcomes]


async def there(harness: Harness, these: list[str]) -> set[str]:
    """Those that are loaded; their bytes are right."""
    found = set()
    for name, (outcome, data) in zip(these, await harness.get(*((name, NBYTES) for name in these)), strict=True):
        assert outcome.found in (Found.FOUND, Found.MISSING)
        if outcome.found is Found.FOUND:
            assert data == content(name), name
            found.add(name)
    return found


def on_disk(path: Path) -> set[Path]:
    return {file.relative_to(path) for file in (path / "objects").rglob("*@*") if file.is_file()}


@contextlib.contextmanager
def no_answer(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, the disk fails with EIO whenever it is opened."""

    def fail() -> None:
        raise disk._directory.unusable(error := OSError(errno.EIO, "Input/output error")) from error

    with monkeypatch.context() as ill:
        ill.setattr(disk._directory, "open", fail)
        yield


def read_only(path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)


def writable(path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw", str(path)], check=True)


def mounted_at(device: Path, path: Path) -> None:
    """The same file system at another path, too."""
    subprocess.run(["mount", "--bind", str(device), str(path)], check=True)


def gone(path: Path) -> None:
    subprocess.run(["umount", "-l", str(path)], check=True)
