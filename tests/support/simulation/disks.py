"""Disks that die and return under stores, loads and purges: `python -m tests.support.simulation.disks --seeds 2000`.

The store is the real one (storage/disks.py) on real files, in virtual time. What is simulated is the medium: a disk
answers EIO, turns read-only, or its directory is unmounted, in the middle of anything. Some of its objects may be gone
when it is well again. Checked: an object may be missing, and never has other bytes; what was answered `ok` is there as
long as its disk lives; a store fails only if no disk lives; what is gone was retracted; nothing is written beneath a
disk that is not mounted; and a disk that is well is used again.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.simulation.campaign import command
from tests.support.simulation.clock import SimClock
from tests.support.simulation.faults import Latency, ThreadFaults
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.threads import SimThreads
from transferd.config import FileStorageSection
from transferd.config.size import Capacities
from transferd.errors import StorageError, StorageFull
from transferd.runtime.aio import every
from transferd.storage.base import EXISTS, Drainer, Fill, Found, Item, Outcome, Take
from transferd.storage.batch import Damaged
from transferd.storage.directory import ObjectDirectory
from transferd.storage.disks import MOST_REST_S, Disk, Disks
from transferd.storage.found import FoundObjects
from transferd.storage.home import Home
from transferd.storage.ledger import Ledger
from transferd.storage.lru import Use
from transferd.storage.orders import Listed
from transferd.storage.paths import path_of
from transferd.storage.room import DiskState
from transferd.storage.selection import Selection

DISKS, NBYTES = 3, 300
NAMES = [f"m/f/g/{block}/0" for block in range(12)]
MOUNTED, BENEATH = 1, 2  # devices
PULLED = ".pulled"  # where the directory of a disk is while the disk is not mounted
DETECT_S = 20.0  # virtual seconds, after which what a call has found out about a disk has had its effects


def content(name: str) -> bytes:
    return random.Random(name).randbytes(NBYTES)


class SimHome(Home):
    """A disk is mounted at its path unless `Disk.kill` has pulled it: all of them lie on one real device."""

    def _device_of(self, fd: int) -> int:
        there = os.readlink(f"/proc/self/fd/{fd}")
        return MOUNTED if there == str(self.root) and not Path(f"{self.root}{PULLED}").exists() else BENEATH

    def opened(self) -> None:
        super().opened()
        self._above = frozenset({BENEATH})


class DyingDirectory(ObjectDirectory):
    """An ObjectDirectory whose medium fails. fault: the errno of its answers; 0: it is well. EROFS: of changes only."""

    fault = 0

    def _answers(self, verb: str, *, changes: bool = True) -> None:
        if self.fault and (changes or self.fault != errno.EROFS):
            raise self._translated(verb, self._error(), NBYTES, str(self._root))

    def _error(self) -> OSError:
        return OSError(self.fault, os.strerror(self.fault))

    def open(self) -> None:
        if self.fault:
            raise self.unusable(error := self._error()) from error
        super().open()

    def scan(self) -> FoundObjects:
        if self.fault == errno.EIO:
            raise self.unusable(self._error())
        return super().scan()

    def state(self) -> DiskState:
        return super().state()._replace(read_only=self.fault == errno.EROFS)

    def try_out(self) -> None:
        self._answers("try")
        super().try_out()

    def write(self, name: str, data: memoryview) -> None:
        self._answers("write")
        super().write(name, data)

    def write_run(self, items: Sequence[Any], fill: Fill | None, near: bool) -> int:
        return 0 if self.fault else super().write_run(items, fill, near)

    def read_run(self, items: Sequence[Any], drain: Drainer | None, span: tuple[int, int] | None) -> list[Any]:
        return [] if self.fault else super().read_run(items, drain, span)

    def read(self, name: str, slot: memoryview, take: Take | None = None) -> bool | Outcome:
        if self.fault == errno.EIO:
            raise Damaged(self._translated("read", self._error(), NBYTES, str(self._root)))
        return super().read(name, slot, take)

    def missing(self, name: str, nbytes: int) -> str:
        self._answers("find", changes=False)
        return super().missing(name, nbytes)

    def remove(self, name: str, *, keep: bool = False) -> None:
        self._answers("remove")
        super().remove(name, keep=keep)

    def set_aside(self, name: str) -> str:
        self._answers("remove")
        return super().set_aside(name)


class DyingLedger(Ledger):
    """The list of orders on such a medium."""

    medium: DyingDirectory

    def write(self, listed: Listed) -> None:
        if self.medium.fault:
            self.listed, self.behind = listed, True
            raise self.medium._error()
        super().write(listed)


class SimDisk(Disk):
    """A disk on a medium that a story kills. deaths, revivals: how often it did so, and brought it back."""

    def __init__(self, section: FileStorageSection, loop: SimLoop, number: int) -> None:
        faults = ThreadFaults(latency=Latency(0.01, 0.2))
        threads = SimThreads(3, faults=faults, rng=loop.stream(f"threads {number}"))
        super().__init__(section, scrub_rate=0, clock=SimClock(loop), threads=threads, unit=1)
        self._drawing = hashlib.blake2b(bytes([number])).digest()  # not from a path that is another one in each run
        self.root = Path(section.paths[0])
        self.deaths = self.revivals = 0
        self._directory.__class__ = DyingDirectory
        self._directory.home.__class__ = SimHome
        self.ledger.__class__ = DyingLedger
        self.ledger.medium = self.medium  # type: ignore[attr-defined]

    @property
    def medium(self) -> DyingDirectory:
        assert isinstance(self._directory, DyingDirectory)
        return self._directory

    @property
    def dead(self) -> bool:
        return self.deaths > self.revivals

    def holds(self, name: str) -> bool:
        """Whether the medium has the object, be it dead or not."""
        pulled = Path(f"{self.root}{PULLED}")
        root = pulled if pulled.exists() else self.root
        return (root / "objects" / path_of(name)).is_file()

    def kill(self, chance: random.Random) -> None:
        self.deaths += 1
        how = chance.choice([errno.EIO, errno.EROFS, 0])
        self.medium.fault = how
        if not how:
            self.root.rename(f"{self.root}{PULLED}")
            if chance.random() < 0.5:
                self.root.mkdir()  # what it was mounted on

    def revive(self, chance: random.Random) -> None:
        """It is well again, perhaps without some of its objects."""
        self.medium.fault = 0
        pulled = Path(f"{self.root}{PULLED}")
        if pulled.exists():
            if self.root.exists():
                left = sorted(str(path) for path in self.root.rglob("*"))
                assert not left, f"written beneath a disk that was not mounted: {left}"
                self.root.rmdir()
            pulled.rename(self.root)
        for file in sorted((self.root / "objects").rglob("*@*")):
            if chance.random() < 0.2:
                file.unlink()
        self.revivals += 1


class Story:
    """One seed. seen: what has happened, and how often."""

    def __init__(self, loop: SimLoop, directory: Path) -> None:
        self.loop = loop
        self.chance = loop.stream("story")
        self.roomy = self.chance.random() < 0.7
        each = NBYTES * (1000 if self.roomy else 6)
        paths = [str(directory / f"disk-{number}") for number in range(DISKS)]
        section = FileStorageSection(path=paths, capacity=Capacities(each))
        self.disks = [SimDisk(one, loop, number) for number, one in enumerate(section.disks)]
        self.storage = Disks(self.disks)
        self.present: set[str] = set()  # as KV events have it: stored, and not retracted since
        self.promised: dict[str, dict[SimDisk, int]] = {}  # where a stored object lies, with the deaths of that disk
        self.purged: Counter[str] = Counter()  # how often a purge of this name began
        self.purging: Counter[str] = Counter()  # how many of these run
        self.begun: Counter[str] = Counter()  # how often a store of this name began
        self.cleared: dict[str, int] = {}  # that number when a purge began which has ended since
        self.seen: Counter[str] = Counter()

    async def run(self) -> Counter[str]:
        await self.storage.open()
        self.storage.tell_departures(self.present.discard)
        hand = asyncio.ensure_future(self.hand())
        try:
            await every([self.actor() for _ in range(4)])
        finally:
            hand.cancel()
            await asyncio.wait({hand})
        if not hand.cancelled():
            hand.result()
        await self.check_one_dead()
        await self.check_all_well()
        await self.storage.keeper.purge(Selection())
        assert not self.present, f"never retracted: {sorted(self.present)}"
        assert not [name for name in NAMES if any(disk.holds(name) for disk in self.disks)], "purged, and on a disk"
        await self.storage.close()
        return self.seen

    async def hand(self) -> None:
        """It kills disks, and brings them back."""
        while True:
            await asyncio.sleep(self.chance.choice([0.05, 0.5, 5.0, 60.0]))
            self.turn(self.chance.choice(self.disks))

    def turn(self, disk: SimDisk) -> None:
        self.seen["returns" if disk.dead else "deaths"] += 1
        (disk.revive if disk.dead else disk.kill)(self.chance)

    async def actor(self) -> None:
        for _ in range(10):
            await asyncio.sleep(self.chance.choice([0.0, 0.01, 0.1, 1.0, 20.0, 90.0]))
            first = self.chance.randrange(len(NAMES))
            names = NAMES[first : first + self.chance.randint(1, 5)]
            act = self.chance.random()
            if act < 0.5:
                await self.store(names)
            elif act < 0.9:
                await self.load(names)
            else:
                await self.purge(names)

    # --- what calls promise -------------------------------------------------------------------------

    async def store(self, names: Sequence[str]) -> None:
        before = [(disk.deaths, disk.revivals) for disk in self.disks]
        unnoticed = [disk for disk in self.disks if disk.dead and not disk.lost]
        purged, purging = self.purged.copy(), +self.purging
        self.present.update(names)  # a retraction may come before the call returns
        outcomes = await self.written(names)
        change = [
            (d.deaths - deaths, d.revivals - lives) for d, (deaths, lives) in zip(self.disks, before, strict=True)
        ]
        lived = [d for d, (died, _) in zip(self.disks, change, strict=True) if not died and not d.dead]
        turned = any(lives for _, lives in change)  # then a trial may have gone well after a write that did not
        for name, outcome in zip(names, outcomes, strict=True):
            self.seen[f"store {outcome.found.name}"] += 1
            if not self.storage.find([name], None)[0]:
                self.present.discard(name)
            if outcome.found is Found.FAILED:
                full = not self.roomy and isinstance(outcome.error, StorageFull)
                idle = [disk for disk in lived if not disk.lost]
                assert turned or full or not idle, f"{name} failed, and a disk lives: {outcome}"
                continue
            died = [d for d, (died, _) in zip(self.disks, change, strict=True) if died]
            excused = died + (unnoticed if outcome.found is Found.EXISTS else [])
            if self.purged[name] != purged[name] or name in purging or not self.roomy:
                continue
            there = {disk: disk.deaths for disk in lived if disk.holds(name) and not disk.lost}
            held = turned or any(disk.holds(name) for disk in excused)  # a disk that returns may have lost it
            assert there or held, f"{name}: {outcome}, and no disk has it"
            self.promised[name] = there

    async def written(self, names: Sequence[str]) -> list[Outcome]:
        """As a worker writes: what the store says that it has is looked at, and the rest is stored."""
        there = [name for name, found in zip(names, self.storage.find(names, Use()), strict=True) if found]
        looked = await self.storage.look(there) if there else []
        outcomes = {name: EXISTS for name, found in zip(there, looked, strict=True) if found}
        rest = [name for name in names if name not in outcomes]
        if rest:
            slots = [memoryview(bytearray(content(name))) for name in rest]
            self.begun.update(rest)
            stored = await self.storage.store([Item(name, NBYTES) for name in rest], None, slots)
            outcomes |= zip(rest, stored, strict=True)
        return [outcomes[name] for name in names]

    async def load(self, names: Sequence[str]) -> Counter[str]:
        slots = [memoryview(bytearray(NBYTES)) for _ in names]
        promised = {name: self.promised.get(name, {}) for name in names}
        found = Counter[str]()
        cleared = self.cleared.copy()
        outcomes = await self.storage.load([Item(name, NBYTES) for name in names], None, slots)
        for name, outcome, slot in zip(names, outcomes, slots, strict=True):
            self.seen[f"load {outcome.found.name}"] += 1
            if outcome.found is Found.FOUND:
                assert bytes(slot) == content(name), f"{name}: other bytes"
                assert cleared.get(name) != self.begun[name], f"{name} was purged, and is back"
                found[name] += 1
                continue
            kept = [d for d, deaths in promised[name].items() if d.deaths == deaths]
            same = self.promised.get(name) == promised[name]
            assert not (kept and same), f"{name} was stored on a disk that lives, and is lost: {outcome}"
        return found

    async def purge(self, names: Sequence[str]) -> None:
        for name in names:
            self.promised.pop(name, None)
            self.purged[name] += 1
        self.purging.update(names)
        begun = self.begun.copy()
        unwell, deaths = any(disk.dead for disk in self.disks), sum(disk.deaths for disk in self.disks)
        try:
            await self.storage.keeper.purge(Selection(names=frozenset(names)))
        except StorageError as error:
            if not unwell and sum(disk.deaths for disk in self.disks) == deaths:
                raise AssertionError("not purged, though no disk died") from error
            self.seen["purge FAILED"] += 1
        else:
            self.cleared.update({name: begun[name] for name in names})
        finally:
            self.purging.subtract(names)
        for name in names:
            self.promised.pop(name, None)

    # --- when nothing else happens ------------------------------------------------------------------

    async def check_one_dead(self) -> None:
        """All disks are well but one, which dies now."""
        await self.all_well()
        await self.store(NAMES)
        victim = self.chance.choice(self.disks)
        self.turn(victim)
        while not victim.lost:
            await self.store([f"m/f/h/{self.chance.randrange(1000)}/0"])
        await asyncio.sleep(DETECT_S)
        await self.check_books([disk for disk in self.disks if disk is not victim])
        await self.store(NAMES)
        if self.roomy:
            assert set(await self.load(NAMES)) == set(NAMES), "stored with one disk dead"

    async def check_all_well(self) -> None:
        await self.all_well()
        await self.check_books(self.disks)
        await self.store(NAMES)
        if self.roomy:
            assert set(await self.load(NAMES)) == set(NAMES)

    async def all_well(self) -> None:
        for disk in self.disks:
            if disk.dead:
                self.turn(disk)
        await asyncio.sleep(2 * MOST_REST_S)
        failed = [disk.lost for disk in self.disks if disk.lost]
        assert not failed, f"every disk is well, and not used: {failed}"

    async def check_books(self, living: Sequence[SimDisk]) -> None:
        """What the store says that it has is what living disks hold, it loads, and the rest was retracted."""
        said = {name for name, there in zip(NAMES, self.storage.find(NAMES, None), strict=True) if there}
        held = {name for name in NAMES if any(disk.holds(name) for disk in living)}
        assert said == held, f"said {sorted(said - held)} too much, and {sorted(held - said)} too little"
        assert not self.present.intersection(NAMES) - said, "what is gone was not retracted"
        assert set(await self.load(NAMES)) == held
        report = self.storage.statistics()
        assert report["disks_failed"] == DISKS - len(living)
        objects = sum(disk.statistics()["objects"] for disk in living)
        assert report["objects"] == objects, "objects of a disk that has failed are counted"


def live(seed: int) -> Counter[str]:
    """Live one seed. Raises what it finds."""
    with tempfile.TemporaryDirectory(prefix="td-disks-") as directory:
        return simulate(lambda loop: Story(loop, Path(directory)).run(), seed)


if __name__ == "__main__":
    sys.exit(command("tests.support.simulation.disks", __doc__, live))
