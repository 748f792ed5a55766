"""What only files can do: survive restarts and kill -9, meet full, read-only and foreign directories."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import Harness, Open, file_config
from tests.support.waits import until
from transferd.blocks.formats import FOOTER_BYTES, ObjectNamer, check, key_digest
from transferd.config import FileStorageSection, StorageSection
from transferd.config.size import Capacities
from transferd.errors import ConfigError, StorageError, StorageFull
from transferd.runtime.compat import timeout
from transferd.runtime.threads import Crew, ThreadPools
from transferd.storage.base import EXISTS, FOUND, MISSING, STORED, Found
from transferd.storage.file import FileStorage
from transferd.storage.paths import is_temporary, path_of

GIB = 1024**3


def name(number: int, rank: int = 0) -> str:
    return f"demo/0123456789abcdef/RL-1/{number:040x}/{rank}"


def content(number: int, nbytes: int = 1000) -> bytes:
    return random.Random(number).randbytes(nbytes)


def file_of(root: Path, number: int) -> Path:
    return root / "objects" / path_of(name(number))


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if not path.is_dir())


async def fill(store: Harness, *numbers: int) -> None:
    for number in numbers:
        assert await store.put((name(number), content(number))) == [STORED]


async def present(store: Harness, count: int) -> list[int]:
    """Which of the objects 0 … count-1 can really be loaded."""
    answers = await store.get(*((name(number), 1000) for number in range(count)))
    assert all(data == content(i) for i, (outcome, data) in enumerate(answers) if outcome == FOUND)
    return [i for i, (outcome, _) in enumerate(answers) if outcome == FOUND]


# --- restart --------------------------------------------------------------------------------------


async def test_objects_are_found_again_after_a_restart(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    odd = "a/b/../ü \ud800/f//" + "ab" * 20 + "/7"
    await store.put((name(1), content(1)), (odd, content(2)))
    await store.storage.close()
    again = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    assert await again.storage.exists([name(1), odd, name(2)]) == [True, True, False]
    assert await again.get((name(1), 1000), (odd, 1000)) == [(FOUND, content(1)), (FOUND, content(2))]
    assert again.storage.statistics()["bytes"] == 2 * 4096, "as the disk counts"
    assert await again.put((name(1), content(1))) == [EXISTS]


async def test_a_store_that_is_out_of_use_has_nothing_also_while_it_finds_its_objects(
    open_storage: Open, tmp_path: Path
) -> None:
    """A look that is no use said that the object was there, and its load failed."""
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await store.put((name(1), content(1)))
    opening = asyncio.ensure_future(store.storage.open_anew())
    out = 0
    while not opening.done():
        await asyncio.sleep(0)
        usable = not store.storage.unusable()
        out += not usable
        assert store.storage.index.find([name(1)], None) == [usable]
    assert out
    assert store.storage.index.find([name(1)], None) == [True]


async def test_the_order_of_use_survives_an_orderly_restart_exactly(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await fill(store, *range(8))
    await store.get((name(2), 1000))
    await store.storage.exists([name(0)])
    await store.storage.close()
    again = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    assert await again.storage.exists([name(5)]) == [True]
    await again.storage.close()
    third = await open_storage(FileStorage(file_config(tmp_path, 4000), unit=1))
    assert await present(third, 8) == [0, 2, 5, 7]


async def test_more_than_a_smaller_capacity_holds_leaves_at_start_the_oldest_first(
    open_storage: Open, tmp_path: Path
) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await fill(store, *range(8))
    await store.storage.close()
    again = await open_storage(FileStorage(file_config(tmp_path, 3500), unit=1))
    assert again.storage.statistics()["bytes"] == 3000
    assert await present(again, 8) == [5, 6, 7]
    await again.storage.close()
    assert len(files_below(tmp_path / "objects")) == 3, "and their files have gone"


async def test_a_start_removes_temporary_files_and_empty_directories_and_nothing_foreign(
    open_storage: Open, tmp_path: Path
) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await fill(store, 1)
    await store.storage.close()
    mine = file_of(tmp_path, 1)
    left = [mine.with_name(f"{mine.name}~17"), mine.parent.parent / "ab" / ("ab" * 20 + "@0~3")]
    foreign = [
        tmp_path / "README",
        tmp_path / "objects" / "notes.txt",
        tmp_path / "objects" / ".hidden" / "a@0~1",
        tmp_path / "objects" / "some dir" / "a@0~1",
        tmp_path / "objects" / "mine@home~1",  # no name has its object there, so nobody was writing it
        mine.parent / ("ab" * 20 + "@0~3"),
        mine.parent / "abc.txt",
        mine.parent / ".abc@0",
        mine.parent / "elsewhere@0",
        tmp_path / "quarantine" / "mine.txt",
    ]
    for path in [*left, *foreign]:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    (tmp_path / "objects" / "demo" / "old" / "gen").mkdir(parents=True)
    os.symlink("/etc/passwd", mine.parent / ("00" * 20 + "@9"))
    again = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    assert not any(path.exists() for path in left)
    assert all(path.read_bytes() == b"x" for path in foreign)
    assert not (tmp_path / "objects" / "demo" / "old").exists()
    assert again.storage.statistics()["objects"] == 1
    await again.storage.quarantine(name(1))
    assert all(path.exists() for path in foreign)


async def test_a_link_in_an_objects_place_is_not_followed_when_the_order_is_recorded(
    open_storage: Open, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"x")
    os.utime(theirs, (1000, 1000))
    store = await open_storage(FileStorage(file_config(tmp_path / "blocks", GIB)))
    await fill(store, 1, 2)
    file_of(tmp_path / "blocks", 1).unlink()
    os.symlink(theirs, file_of(tmp_path / "blocks", 1))
    await store.storage.close()
    assert theirs.stat().st_mtime == 1000


async def test_files_of_impossible_length_are_set_aside_at_start_and_can_be_stored_anew(
    open_storage: Open, tmp_path: Path
) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await fill(store, *range(5))
    await store.storage.close()
    file_of(tmp_path, 1).write_bytes(b"")  # as after a power failure
    file_of(tmp_path, 2).write_bytes(content(2)[:-1])
    file_of(tmp_path, 3).write_bytes(content(3) + b"x")
    storage = FileStorage(file_config(tmp_path, GIB))
    storage.expect(lambda asked, nbytes: asked != name(4) and nbytes == 1000)
    again = await open_storage(storage)
    assert await storage.exists([name(i) for i in range(5)]) == [True, False, False, False, False]
    statistics = storage.statistics()
    assert (statistics["objects"], statistics["bytes"], statistics["corrupt"]) == (1, 4096, 4)
    assert await again.put((name(1), content(1))) == [STORED], "it waits until the file is out of the way"
    assert await again.get((name(1), 1000)) == [(FOUND, content(1))]
    assert len(list((tmp_path / "quarantine").iterdir())) == 4


# --- directories ----------------------------------------------------------------------------------


def directories_below(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_dir()}


@pytest.mark.parametrize("fsync", [False, True])
async def test_directories_of_generations_that_are_over_go_with_their_last_object(
    open_storage: Open, tmp_path: Path, fsync: bool
) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, 40_000, fsync=fsync), unit=1))
    foreign = tmp_path / "objects" / "demo" / "0123456789abcdef" / "RL-1" / "notes" / "mine.txt"
    for generation in range(6):
        names = [f"demo/0123456789abcdef/RL-{generation}/{i << 152 | generation:040x}/0" for i in range(40)]
        outcomes = await store.put(*((each, content(i)) for i, each in enumerate(names)))
        assert outcomes == [STORED] * 40
        store.reuse_memory()
        if generation == 1:
            foreign.parent.mkdir(parents=True)
            foreign.write_bytes(b"x")
    await store.storage.quarantine(names[0])
    await store.storage.close()
    objects = tmp_path / "objects"
    needed = {path for file in files_below(objects) for path in file.parents if objects in path.parents}
    assert directories_below(objects) == needed, "each holds something"
    assert len(list(objects.rglob("*@0"))) == 39, "those of the last generation, less the one that was bad"
    assert foreign.read_bytes() == b"x"
    assert not (objects / path_of(names[0])).parent.exists()


async def test_writes_beside_removals_of_the_last_object_in_their_directory_never_fail(
    open_storage: Open, tmp_path: Path
) -> None:
    """Both ends of a directory's life at once, from many threads."""
    store = await open_storage(FileStorage(file_config(tmp_path, 3_000), unit=1))

    async def caller(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            number = rng.randrange(8)
            outcomes = await store.put((f"demo/f0/g{number % 3}/{number:040x}/0", content(number)))
            assert outcomes[0] in (STORED, EXISTS), outcomes

    await asyncio.gather(*(caller(seed) for seed in range(6)))
    assert store.storage.statistics()["errors"] == 0


KILLED_WRITER = """
import asyncio, sys
from transferd.blocks.formats import FOOTER_BYTES, ObjectNamer, key_digest, seal
from transferd.config import FileStorageSection, Size
from transferd.storage.base import Blob
from transferd.storage.file import FileStorage
from tests.support.blobs import put

async def main(path, payload, first):
    storage = FileStorage(FileStorageSection(path=path, capacity=Size(2**30), fsync=bool(first // 1000 % 2)))
    await storage.open()
    namer = ObjectNamer("demo", "f0")
    async def writer(number):
        while True:
            key = f"{number}"
            digest = key_digest(key)
            slot = memoryview(bytearray(digest.encode() * (payload // 40 + 1))[:payload] + bytes(FOOTER_BYTES))
            [stamp] = ObjectNamer("demo", "f0").stamps("g", [digest], 0)
            seal(slot, payload, stamp)
            [outcome] = await put(storage, [Blob(namer.names("g", [digest], 0)[0], slot)])
            print(key, outcome.found.value, flush=True)
            number += 4
    await asyncio.gather(*(writer(first + i) for i in range(4)))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def keys_reported_as_stored(lines: bytes) -> set[str]:
    return {line.split()[0] for line in lines.decode().splitlines() if line.endswith(" stored")}


@pytest.mark.timeout(900)  # 20 processes are started
async def test_after_kill_9_during_writes_every_object_is_right_or_missing(open_storage: Open, tmp_path: Path) -> None:
    """20 times: kill, start again, load everything. What was reported stored is there: only the process died.

    Every other time the writer syncs, so that most of its time is spent between the first byte and the rename.
    """
    namer, payload, rounds = ObjectNamer("demo", "f0"), 400_000, 20
    torn_writes = 0
    for attempt in range(rounds):
        first = attempt * 1000
        command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path), str(payload), str(first)]
        writer = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        stored: set[str] = set()
        async with timeout(60):
            while len(stored) < 4 + attempt:
                stored |= keys_reported_as_stored(await writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        stored |= keys_reported_as_stored(await writer.stdout.read())
        await writer.wait()
        torn_writes += sum(
            is_temporary(str(path.relative_to(tmp_path / "objects"))) for path in files_below(tmp_path / "objects")
        )

        store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
        assert not [
            path
            for path in files_below(tmp_path / "objects")
            if is_temporary(str(path.relative_to(tmp_path / "objects")))
        ]
        for key in sorted({str(first + i) for i in range(len(stored) + 8)} | stored):
            digest = key_digest(key)
            [(outcome, data)] = await store.get((namer.names("g", [digest], 0)[0], payload + FOOTER_BYTES))
            assert outcome in (FOUND, MISSING)
            assert outcome == FOUND or key not in stored
            if outcome == FOUND:
                [stamp] = ObjectNamer("demo", "f0").stamps("g", [digest], 0)
                assert check(memoryview(data), payload, stamp) is None
                assert data[:40].decode() == digest
            store.reuse_memory()
        await store.storage.close()
    assert torn_writes, f"no kill of {rounds} met a write half done: the test lost its point"


# --- one daemon, a usable directory ---------------------------------------------------------------


async def test_a_second_daemon_on_the_directory_is_refused_and_the_first_goes_on(
    open_storage: Open, tmp_path: Path
) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await fill(store, 1)
    second = FileStorage(file_config(tmp_path, GIB))
    with pytest.raises(ConfigError, match=r"^storage\.file\.path: is in use by another daemon \(pid \d+\)") as refusal:
        await second.open()
    assert str(os.getpid()) in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)
    await second.close()
    await fill(store, 2)
    assert await present(store, 3) == [1, 2]
    await store.storage.close()
    await open_storage(FileStorage(file_config(tmp_path, GIB)))


@pytest.mark.parametrize("place", ["file", "file/below", "nul\0"])
async def test_a_path_that_cannot_be_a_directory_is_one_clear_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = FileStorage(file_config(tmp_path / place, GIB))
    with pytest.raises(ConfigError, match=r"^storage\.file\.path: cannot be used") as refusal:
        await storage.open()
    assert "\n" not in str(refusal.value)
    assert repr(str(tmp_path / place))[1:-1] in str(refusal.value)
    await storage.close()


class UnprivilegedThreads(ThreadPools):
    """Its threads have the file permissions of nobody, even in tests that run as root."""

    def __init__(self) -> None:
        super().__init__(1)

    def _crew(self, name: str, size: int) -> Crew:
        return UnprivilegedCrew(name, size)


class UnprivilegedCrew(Crew):
    def _serve(self, name: str) -> None:
        _become_nobody()
        super()._serve(name)


def _become_nobody() -> None:
    if os.geteuid() == 0:
        ctypes.CDLL(None).setfsuid(65534)  # this thread's only, and takes its override of permissions with it


@pytest.fixture
def shared_tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A temporary directory that nobody can reach and write in."""
    closed = [path for path in tmp_path.parents if path.stat().st_mode & 0o011 != 0o011]
    changed = [(path, path.stat().st_mode) for path in closed]
    for path, mode in changed:
        with contextlib.suppress(OSError):
            path.chmod(mode | 0o011)
    tmp_path.chmod(0o777)
    yield tmp_path
    for path, mode in changed:
        with contextlib.suppress(OSError):
            path.chmod(mode)


async def test_a_directory_without_permission_to_write_is_one_clear_line(shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "locked"
    path.mkdir(0o555)
    path.chmod(0o555)
    storage = FileStorage(file_config(path, GIB), threads=UnprivilegedThreads())
    with pytest.raises(ConfigError, match=r"storage\.file\.path: cannot be used at \S+: Permission denied") as refusal:
        await storage.open()
    assert str(path) in str(refusal.value)
    await storage.close()


async def test_losing_permission_while_running_fails_objects_by_type_and_serves_the_rest(
    open_storage: Open, shared_tmp_path: Path
) -> None:
    store = await open_storage(FileStorage(file_config(shared_tmp_path / "blocks", GIB), threads=UnprivilegedThreads()))
    await fill(store, 1)
    fan = file_of(shared_tmp_path / "blocks", 1).parent
    fan.chmod(0o555)
    [outcome] = await store.put((name(2), content(2)))
    assert outcome.error is not None
    assert outcome.error.reason == "storage_denied"
    assert "Permission denied" in str(outcome.error)
    assert await present(store, 3) == [1]
    fan.chmod(0o755)
    await fill(store, 2)


# --- a small, a full, a read-only file system -----------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def remount(path: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(path)], check=True)


BIG = 500_000


async def test_a_full_disk_evicts_the_oldest_and_stores_the_new(open_storage: Open, small_disk: Path) -> None:
    store = await open_storage(FileStorage(file_config(small_disk, GIB)))
    for number in range(30):
        assert await store.put((name(number), content(number, BIG))) == [STORED]
    answers = await store.get(*((name(number), BIG) for number in range(30)))
    kept = [number for number, (outcome, _) in enumerate(answers) if outcome == FOUND]
    assert kept == list(range(30 - len(kept), 30))
    assert 6 <= len(kept) <= 8
    assert all(answers[number][1] == content(number, BIG) for number in kept)
    statistics = store.storage.statistics()
    assert statistics["bytes"] == -(-BIG // 4096) * 4096 * len(kept)
    assert statistics["evictions"] == 30 - len(kept)
    assert len(files_below(small_disk / "objects")) == len(kept), "no half-written file is left"


async def test_a_full_disk_under_many_writers_never_loses_a_stored_object_unasked(
    open_storage: Open, small_disk: Path
) -> None:
    store = await open_storage(FileStorage(file_config(small_disk, GIB)))
    batches = [[(name(8 * batch + i), content(i, BIG)) for i in range(3)] for batch in range(4)]
    answers = await asyncio.gather(*(store.put(*batch) for batch in batches))
    failed = [outcome for outcomes in answers for outcome in outcomes if outcome.found is Found.FAILED]
    assert all(isinstance(outcome.error, StorageFull) for outcome in failed)
    index = store.storage._index  # type: ignore[attr-defined]
    await until(
        lambda: len(files_below(small_disk / "objects")) == len(index)
    )  # a look at the disk may evict meanwhile
    assert len(index) >= 4
    for batch in batches:
        for (object_name, data), (outcome, got) in zip(
            batch, await store.get(*((n, BIG) for n, _ in batch)), strict=True
        ):
            assert (outcome == FOUND) == (object_name in index)
            assert outcome == MISSING or got == data


async def test_an_object_larger_than_the_disk_says_so_and_leaves_nothing(open_storage: Open, small_disk: Path) -> None:
    store = await open_storage(FileStorage(file_config(small_disk, GIB)))
    [outcome] = await store.put((name(1), bytes(5 * 1024**2)))
    assert isinstance(outcome.error, StorageFull)
    assert str(outcome.error).startswith("an object of 5242880 bytes is larger than the room on its disk, ")
    assert str(outcome.error).endswith(" are free, and storage.file.reserve keeps 419430 of them")
    assert files_below(small_disk / "objects") == []
    await fill(store, 2)


async def test_a_disk_that_turns_read_only_fails_writes_by_type_and_still_serves_reads(
    open_storage: Open, small_disk: Path
) -> None:
    store = await open_storage(FileStorage(file_config(small_disk, 2000), unit=1))
    await fill(store, 1, 2)
    remount(small_disk, "ro")
    [outcome] = await store.put((name(3), content(3)))
    assert outcome.error is not None
    assert outcome.error.reason == "storage_read_only"
    assert await present(store, 3) == [1, 2], "what could not be evicted is still there"
    await store.storage.quarantine(name(1))
    assert await store.storage.exists([name(1)]) == [False]
    remount(small_disk, "rw")


async def test_a_read_only_disk_cannot_be_opened(small_disk: Path) -> None:
    remount(small_disk, "ro")
    storage = FileStorage(file_config(small_disk, GIB))
    with pytest.raises(ConfigError, match="Read-only file system"):
        await storage.open()
    await storage.close()


# --- errors of the medium, injected at the system call --------------------------------------------


def failing(number: int) -> Any:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.usefixtures("files_in_python")
@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.EDQUOT, StorageFull, "storage_full"),
        (errno.ENOSPC, StorageFull, "storage_full"),
        (errno.EIO, StorageError, "storage_io"),
        (errno.EROFS, StorageError, "storage_read_only"),
        (errno.EMFILE, StorageError, "storage_error"),
    ],
)
async def test_a_failed_write_is_typed_by_its_cause_and_leaves_no_file(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type, code: str
) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(number))
        [outcome] = await store.put((name(1), content(1)))
    assert outcome.error is not None
    assert type(outcome.error) is kind
    assert outcome.error.reason == code
    assert os.strerror(number) in str(outcome.error)
    assert files_below(tmp_path / "objects") == []
    await fill(store, 1)


@pytest.mark.usefixtures("files_in_python")
async def test_a_bad_sector_fails_the_read_and_the_object_can_be_stored_anew(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await fill(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO))
        [(outcome, _)] = await store.get((name(1), 1000))
    assert outcome.error is not None
    assert outcome.error.reason == "storage_io"
    await fill(store, 1)


@pytest.mark.usefixtures("files_both_ways")
async def test_a_store_works_without_fallocate(open_storage: Open, tmp_path: Path) -> None:
    storage = FileStorage(file_config(tmp_path, GIB))
    store = await open_storage(storage)
    storage._directory._io.preallocates = False
    await store.put((name(1), content(1, 300_001)))
    assert await store.get((name(1), 300_001)) == [(FOUND, content(1, 300_001))]


@pytest.mark.usefixtures("files_in_python")
async def test_short_reads_and_writes_are_continued(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real_write(fd, data[:777], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:333]], at))
    await store.put((name(1), content(1, 5000)))
    assert await store.get((name(1), 5000)) == [(FOUND, content(1, 5000))]


# --- damage behind our back -----------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("length", [0, 1, 999, 1001, 5000])
async def test_a_file_of_another_length_is_missing_set_aside_and_heals(
    open_storage: Open, tmp_path: Path, length: int, restart: bool
) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await fill(store, 1)
    if restart:
        await store.storage.close()
    os.truncate(file_of(tmp_path, 1), length)
    if restart:
        store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    [(outcome, _)] = await store.get((name(1), 1000))
    assert outcome == MISSING
    assert await store.storage.exists([name(1)]) == [False]
    # The look at the disk after `fill` may have found the file before the load did: then it is being put aside.
    await until(lambda: [path.stat().st_size for path in files_below(tmp_path / "quarantine")] == [length])
    assert store.storage.statistics()["corrupt"] == 1
    await fill(store, 1)
    assert await present(store, 2) == [1]


async def test_a_deleted_file_is_missing_and_leaves_the_index(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await fill(store, 1, 2)
    file_of(tmp_path, 1).unlink()
    assert await present(store, 3) == [2]
    assert store.storage.statistics()["bytes"] == 4096
    await fill(store, 1)


async def test_a_directory_deleted_as_a_whole_is_made_again(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await fill(store, 1)
    shutil.rmtree(tmp_path / "objects")
    await fill(store, 2)
    assert await present(store, 3) == [2]


async def test_a_symbolic_link_in_an_objects_place_is_not_followed(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    await fill(store, 1)
    target = tmp_path / "secret"
    target.write_bytes(b"s" * 1000)
    file_of(tmp_path, 1).unlink()
    file_of(tmp_path, 1).symlink_to(target)
    [(outcome, data)] = await store.get((name(1), 1000))
    assert outcome.found in (Found.FAILED, Found.MISSING)  # missing: a look at the disk was first
    assert data != target.read_bytes()
    await fill(store, 1)
    assert target.read_bytes() == b"s" * 1000


async def test_a_name_too_long_for_the_file_system_fails_alone(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB)))
    long = f"{'x' * 300}/f//{'ab' * 20}/0"
    outcomes = await store.put((long, content(1)), (name(1), content(1)))
    assert [outcome.found for outcome in outcomes] == [Found.FAILED, Found.STORED]
    assert "File name too long" in str(outcomes[0].error)


async def test_sighup_takes_over_the_capacity(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(FileStorage(file_config(tmp_path, GIB), unit=1))
    await fill(store, *range(8))
    store.storage.reconfigure(StorageSection(file=file_config(tmp_path, 3000)))
    assert store.storage.statistics()["capacity"] == 3000
    assert await present(store, 8) == [5, 6, 7]
    await store.storage.close()
    assert len(files_below(tmp_path / "objects")) == 3


@pytest.mark.parametrize(
    ("others", "capacity"), [(["own", "other"], 3000), (["other", "own"], 5000), (["a", "b"], GIB), (["a"], GIB)]
)
async def test_capacities_of_several_paths_are_not_added_up_for_the_one_that_is_open(
    open_storage: Open, tmp_path: Path, others: list[str], capacity: int
) -> None:
    """Further paths need a restart; until then this directory must not take their room on its own disk."""
    own = tmp_path / "own"
    store = await open_storage(FileStorage(file_config(own, GIB), unit=1))
    paths = [str(tmp_path / path) for path in others]
    section = FileStorageSection(path=paths, capacity=Capacities.parse([3000, 5000] if len(paths) == 2 else 3000))
    store.storage.reconfigure(StorageSection(file=section))
    assert store.storage.statistics()["capacity"] == capacity
