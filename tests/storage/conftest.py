"""Every storage backend behind one fixture, closed and checked at the end of each test."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.storage.harness import BACKENDS, MEMORY_BYTES, Backend, Harness, Memory, Open
from tests.support.simulation.storage import SimStorage
from transferd.storage import file_io
from transferd.storage.base import Storage
from transferd.storage.levels import level, stack

PATIENT_S = 60.0


@pytest.fixture(autouse=True)
def patient_levels() -> Iterator[None]:
    """No level is too slow because the machine stood still. A test of a slow level sets these times itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(level, "FLOOR_S", PATIENT_S)
        patch.setattr(level, "UNKNOWN_S", PATIENT_S)
        patch.setattr(stack, "LOOK_UP_S", PATIENT_S)
        yield


@pytest.fixture
async def open_storage() -> AsyncIterator[Open]:
    """Open any storage with memory registered; everything is closed at the end, and must have come home."""
    opened: list[Harness] = []

    async def open_(storage: Storage) -> Harness:
        await storage.open()
        harness = Harness(storage, Memory(MEMORY_BYTES))
        opened.append(harness)
        storage.register(harness.memory)
        return harness

    yield open_
    for harness in opened:
        if harness.storage.levels is not None:
            await harness.storage.levels.flush(30)
        assert not harness.storage.statistics().get("in_flight_bytes"), "reserved and never settled"
        harness.storage.unregister(harness.memory)
        await harness.storage.close()
        harness.release()


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[list[Path]]:
    """Three small file systems."""
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], check=True)
    yield paths
    for path in paths:
        subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


@pytest.fixture
async def behind() -> SimStorage:
    """What stands behind the part under test."""
    storage = SimStorage()
    await storage.open()
    return storage


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.fixture
def open_backend(backend: Backend, open_storage: Open, tmp_path: Path) -> Open:
    """Open the backend under test with a capacity in bytes."""

    async def open_(capacity: int = 256 * 1024**2) -> Harness:
        return await open_storage(backend.make(tmp_path / "blocks", capacity))

    return open_


@pytest.fixture
def files_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file backend uses no extension, so a test can replace its system calls."""
    monkeypatch.setattr(file_io, "NATIVE", False)


@pytest.fixture(params=["native", "Python"])
def files_both_ways(request: pytest.FixtureRequest) -> None:
    """Once as installed, once without the file backend's extension."""
    if request.param == "Python":
        request.getfixturevalue("files_in_python")
    elif "files_in_python" in request.fixturenames:
        pytest.skip("this test replaces system calls of the slow version")
    elif not file_io.NATIVE:
        pytest.skip("the installation found no compiler")
