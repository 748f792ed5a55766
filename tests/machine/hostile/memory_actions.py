"""What hostile engines do with memory: offer that of others, the same twice, take it away while it is in use."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import random
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

from tests.machine.hostile.accounts import be_visible
from tests.machine.hostile.place import SHARED, Place, Report, fresh_name
from transferd import Client, Engine, Pages, ReadStorageTask, Status, TransferError, WriteStorageTask, shm_pages
from transferd.client import offers
from transferd.runtime.compat import timeout
from transferd.tiers.base import DeviceHandle
from transferd.tiers.owner import as_data, this_process

PAGE, BLOCKS = 4096, 8
NBYTES = PAGE * BLOCKS
LAYOUT = Pages(layers=1, page_bytes=PAGE, blocks=BLOCKS, identity="hostile")
MINE = b"\xee" * PAGE
TASK_S = 8.0
FREE_S = 15.0  # until the daemon has noticed the end of an engine, and its tasks have ended, on a busy machine


@contextlib.contextmanager
def memory(nbytes: int = NBYTES, *, filled: bool = True) -> Iterator[tuple[str, int]]:
    """Shared memory with a name of one's own: (name, descriptor). Everybody may open it, so that any daemon can."""
    name = fresh_name()
    fd = os.open(SHARED / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.fchmod(fd, 0o666)
        os.ftruncate(fd, nbytes)
        if filled:
            os.posix_fallocate(fd, 0, nbytes)
        yield name, fd
    finally:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SHARED / name)


def handle(name: str, nbytes: int = NBYTES, offset: int = 0) -> DeviceHandle:
    """What `shm_pages` makes, also for memory that this user cannot even look at."""
    data = {"name": name, "nbytes": nbytes, "segments": [[offset, PAGE]], "owner": as_data(this_process())}
    return DeviceHandle("shm", data)


@contextlib.asynccontextmanager
async def engine(place: Place, name: str = "") -> AsyncIterator[Client]:
    async with Client(place.door, engine=name or fresh_name(), await_ready=False) as client:
        await client.register(Engine(ranks=1, model="hostile", layout=LAYOUT))
        yield client
        with contextlib.suppress(TransferError):
            await client.unregister()


async def _moved(client: Client, task: WriteStorageTask | ReadStorageTask) -> bool:
    with contextlib.suppress(TransferError, TimeoutError):
        async with timeout(TASK_S):
            return (await client.submit(task)).status is Status.OK
    return False


async def _wrote(client: Client, keys: list[str], first: int = 0) -> bool:
    blocks = [first + number for number in range(len(keys))]
    return await _moved(client, WriteStorageTask(task_id=fresh_name(), keys=keys, gpu_block_ids=blocks, timeout=5))


async def _read(client: Client, keys: list[str], first: int = 0) -> bool:
    blocks = [first + number for number in range(len(keys))]
    task = ReadStorageTask(task_id=fresh_name(), keys=keys, gpu_block_ids=blocks, timeout=5)
    return await _moved(client, task)


async def offer_memory_of_others(place: Place, chance: random.Random, report: Report) -> None:
    """Offer every name in /dev/shm that is another's: load its blocks into one's own, look, and overwrite them."""
    names = [entry.name for entry in os.scandir(SHARED) if entry.stat(follow_symlinks=False).st_uid != os.getuid()]
    chance.shuffle(names)
    for other in names[:6]:
        with memory() as (own, fd):
            theirs, mine = ([f"{own} {who} {number}" for number in range(BLOCKS)] for who in ("theirs", "mine"))
            os.pwrite(fd, MINE * BLOCKS, 0)
            async with engine(place) as reader, engine(place) as thief:
                await reader.offer(0, handle(own))
                await _wrote(reader, mine)
                try:
                    await thief.offer(0, handle(other))
                except TransferError as error:
                    report.told.append(f"{other}: {error.reason}")
                    continue
                report.wrong.append(f"memory of another user was accepted: {other}")
                await _wrote(thief, theirs)
                await _read(thief, mine)
                await _read(reader, theirs)
                for name in place.stolen_from(os.pread(fd, NBYTES, 0)):
                    report.wrong.append(f"blocks of {name} were read by uid {os.getuid()}")


async def offer_descriptors_of_others(place: Place, chance: random.Random, report: Report) -> None:
    """Offer numbers: of files that are no memory, closed ones, and numbers that only another process has."""
    numbers = [0, 1, 2, os.open("/etc/passwd", os.O_RDONLY), os.open("/dev/zero", os.O_RDWR), *range(3, 40)]
    data = {"nbytes": NBYTES, "segments": [[0, PAGE]], "owner": as_data(this_process())}
    async with engine(place) as thief:
        for number in chance.sample(numbers, 12):
            try:
                await thief.offer(0, DeviceHandle("shm", data | {"fd": number}))
            except TransferError as error:
                report.told.append(f"{number}: {error.reason}")
            else:
                report.wrong.append(f"descriptor {number} was accepted as memory")
                return


async def offer_twice(place: Place, chance: random.Random, report: Report) -> None:
    """Two engines over the same memory, over parts that overlap, and over one file by two of its names."""
    with memory(2 * NBYTES) as (name, _):
        second = fresh_name()
        os.link(SHARED / name, SHARED / second)
        try:
            async with engine(place) as one, engine(place) as two:
                await one.offer(0, handle(name))
                for again in (handle(name), handle(second), handle(name, 2 * NBYTES, NBYTES - PAGE)):
                    try:
                        await two.offer(0, again)
                    except TransferError as error:
                        report.told.append(error.reason)
                    else:
                        report.wrong.append(f"one memory was accepted from two engines ({again.data['name'] == name})")
                        break
        finally:
            os.unlink(SHARED / second)


async def take_memory_away(place: Place, chance: random.Random, report: Report) -> None:
    """Shrink, punch and truncate memory that the daemon has mapped, and let it copy."""
    for deed in chance.sample(["to nothing", "to a page", "a hole"], 3):
        with memory() as (name, fd):
            async with engine(place) as client:
                try:
                    await client.offer(0, handle(name))
                except TransferError as error:
                    report.told.append(error.reason)
                    return
                keys = [f"{name} {number}" for number in range(BLOCKS)]
                stored = await _wrote(client, keys)
                if deed == "a hole":
                    ctypes.CDLL(None).fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(NBYTES))
                else:
                    os.ftruncate(fd, 0 if deed == "to nothing" else PAGE)
                told = [await _read(client, keys), await _wrote(client, [f"{key} again" for key in keys])]
                report.told.append(f"{deed}: stored {stored}, then {told}")
                if deed != "a hole" and any(told):
                    report.wrong.append(f"a task was ok over memory that was truncated {deed}")


async def offer_what_cannot_be_filled(place: Place, chance: random.Random, report: Report) -> None:
    """A sparse file, and no room in /dev/shm for its pages. (The campaign's /dev/shm is its own, and small.)"""
    with memory(filled=False) as (sparse, _), memory(0, filled=False) as (_, filler):
        found = os.statvfs(SHARED)
        if found.f_blocks * found.f_frsize > 2**30:
            report.told.append("/dev/shm is not the campaign's own")
            return
        async with engine(place) as client:
            late = chance.random() < 0.5  # filled after the offer, or before
            if late:
                with contextlib.suppress(TransferError):
                    await client.offer(0, handle(sparse))
            _fill(filler)
            if not late:
                with contextlib.suppress(TransferError):
                    await client.offer(0, handle(sparse))
            keys = [f"{sparse} {number}" for number in range(BLOCKS)]
            told = [await _wrote(client, keys), await _read(client, keys)]
            report.told.append(f"{'late' if late else 'early'}: {told}")


def _fill(fd: int) -> None:
    size = 0
    for step in (2**24, 2**20, PAGE):
        with contextlib.suppress(OSError):
            while True:
                os.posix_fallocate(fd, size, step)
                size += step


async def renew_memory_under_its_name(place: Place, chance: random.Random, report: Report) -> None:
    """Make the memory anew and offer it under the same name or number: the daemon must not go on with the old one."""
    by_number = chance.random() < 0.5
    with memory() as (name, _):
        number = os.memfd_create("old", os.MFD_ALLOW_SEALING)
        os.ftruncate(number, NBYTES)
        old = shm_pages(number, [(0, PAGE)]) if by_number else handle(name)
        async with engine(place) as client:
            await client.offer(0, old)
            if by_number:
                new = os.memfd_create("new", os.MFD_ALLOW_SEALING)
                os.ftruncate(new, NBYTES)
                os.dup2(new, number)
            else:
                os.unlink(SHARED / name)
                new = os.open(SHARED / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(new, 0o666)
                os.posix_fallocate(new, 0, NBYTES)
            os.pwrite(new, MINE, 0)
            try:
                await client.offer(0, shm_pages(number, [(0, PAGE)]) if by_number else handle(name))
            except TransferError as error:
                report.told.append(error.reason)
                return
            moved = await _wrote(client, [name]) and await _read(client, [name], first=1)
            if moved and os.pread(new, PAGE, PAGE) != MINE:
                report.wrong.append("new memory was accepted under an old name, and the old one was used")


async def die_with_work_under_way(place: Place, chance: random.Random, report: Report) -> None:
    """An engine that is killed or stopped with tasks under way, its memory truncated, its name taken at once."""
    name, stop = fresh_name(), chance.random() < 0.4
    with memory() as (shared, fd):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                asyncio.run(_work_for_ever(place, name, shared))
            os._exit(0)
        await asyncio.sleep(0.3 + chance.random() / 2)
        os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
        os.ftruncate(fd, chance.choice([0, PAGE, NBYTES]))
        if stop:
            await asyncio.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # noqa: ASYNC222 - it is dead
    refused, give_up = "", asyncio.get_running_loop().time() + FREE_S
    while asyncio.get_running_loop().time() < give_up:
        try:
            async with engine(place, name):
                return
        except TransferError as error:
            refused = error.reason
        await asyncio.sleep(0.1)
    if refused == "engine_exists":  # and not `busy`, because of what this user's other attacks have waiting
        report.wrong.append(f"the name of an engine that was killed was not free after {FREE_S:g} seconds")


async def _work_for_ever(place: Place, name: str, shared: str) -> None:
    async with engine(place, name) as client:
        await client.offer(0, handle(shared))
        for turn in range(10**6):
            keys = [f"{shared} {turn} {number}" for number in range(BLOCKS)]
            blocks = list(range(BLOCKS))
            await client.push(WriteStorageTask(task_id=f"{turn} w", keys=keys, gpu_block_ids=blocks))
            await client.submit(ReadStorageTask(task_id=f"{turn} r", keys=keys, gpu_block_ids=blocks))


async def come_from_a_namespace(place: Place, chance: random.Random, report: Report) -> None:
    """Root of a namespace of one's own, with a /dev/shm of one's own, is nobody else outside."""
    flags = 0x10000000 | 0x00020000  # CLONE_NEWUSER, CLONE_NEWNS
    uid, gid = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        report.told.append(f"no namespaces for this user: {os.strerror(ctypes.get_errno())}")
        return
    be_visible()  # or /proc/self belongs to root now
    for kind, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        file = os.open(f"/proc/self/{kind}", os.O_WRONLY)
        os.write(file, text.encode())
        os.close(file)
    names = [entry.name for entry in os.scandir(SHARED) if stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)]
    libc = ctypes.CDLL(None)
    libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m") != 0:
        report.told.append("no tmpfs")
        return
    for name in [one for one in names if one.startswith("kv-of-")][:3]:
        # Here it is ours; where the daemon looks, it is another's. By name it is refused, by descriptor it is ours.
        (SHARED / name).write_bytes(b"\x5a" * PAGE + bytes(NBYTES - PAGE))
        async with engine(place) as thief:
            try:
                with mock.patch.object(offers, "own_descriptors", return_value=contextlib.nullcontext([])):
                    await thief.offer(0, shm_pages(name, [(0, PAGE)]))
            except TransferError as error:
                report.told.append(f"{name}: {error.reason}")
            else:
                report.wrong.append(f"{name} of another user was accepted from inside a namespace")
            await thief.offer(0, shm_pages(name, [(0, PAGE)]))
            key = [f"{os.getpid()} {name}"]
            await thief.submit(WriteStorageTask(task_id=f"w {name}", keys=key, gpu_block_ids=[0]))
            await thief.submit(ReadStorageTask(task_id=f"r {name}", keys=key, gpu_block_ids=[1]))
            if (SHARED / name).read_bytes()[: 2 * PAGE] not in (b"\x5a" * 2 * PAGE, b"\x5a" * PAGE + bytes(PAGE)):
                report.wrong.append(f"a descriptor of our own {name} led to other memory")


async def map_nothing_at_all(place: Place, chance: random.Random, report: Report) -> None:
    """Handles with nonsense: lengths, offsets, strides and names that lead out of the memory or the directory."""
    with memory() as (name, fd), mmap.mmap(fd, NBYTES):
        good = handle(name).data
        bad: list[dict[str, Any]] = [
            *({"nbytes": value} for value in (-1, 0, 2**62, 2**63 - 1)),
            *(
                {"segments": value}
                for value in ([[2**62, PAGE]], [[-1, PAGE]], [[0, 0]], [[0, 2**61]], [], [[0, PAGE]] * 9)
            ),
            *({"name": value} for value in ("../etc/passwd", "", ".", "/", "a\0b", "x" * 300)),
        ]
        async with engine(place) as client:
            for change in chance.sample(bad, 8):
                with contextlib.suppress(TransferError):
                    await client.offer(0, DeviceHandle("shm", good | change))
                    report.wrong.append(f"accepted: {change}")
                    return
