"""One node's storage, all features at once: `python -m tests.support.simulation.store_world --seeds 2000`.

A real daemon and real clients of two engines in virtual time, over levels of memory, disks and a bucket in every
shape. A plan draws from stores, hand-overs, loads, prefetches, pins, purges, drains, reloads, restarts and kills; disks
go away and return (the same, empty, or as an older image), answer EIO, hang or turn read-only; the bucket is silent,
hangs or refuses, its lifecycle and other nodes remove objects, and its link spoils bytes; files vanish and rot.

What a judge expects of it is in store_judge.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from tests.support.simulation.bucket import REFUSALS, simulated
from tests.support.simulation.campaign import command
from tests.support.simulation.faults import ThreadFaults
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.medium import Medium, section_of
from tests.support.simulation.store_judge import Reading
from tests.support.simulation.store_node import CALM, EACH, ENGINES, LATE, OBJECT, PACE, ROOMY, Node
from transferd.config.size import Size
from transferd.daemon import health
from transferd.errors import Closed, TransferError
from transferd.runtime.aio import every
from transferd.storage import orders
from transferd.tasks import ReadStorageTask, Status, TaskResult, WriteStorageTask

MEDIA = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a seed waits for no disk
STORE_S, SHARED_S, HURRY_S = 20.0, 30.0, 0.03
LOOK_S = 20.0  # between the daemon's looks at its health, which cost a third of a seed each second
CALM_S = 100.0  # after which every copy has been made, or was given up for good
USED_S = 1.0  # after which each level knows of a use
REST_S = 30.0  # for which nothing is written then
ACTIONS = {
    "store": 30, "hand_over": 9, "read": 18, "prefetch": 3, "pin": 5, "unpin": 1, "purge": 7, "drain": 2, "use": 3,
    "kill": 3, "away": 2, "ill": 2, "come_back": 5, "image": 2, "lifecycle": 3, "fault": 4, "heal": 5, "link": 2,
    "flip": 6, "remove": 5, "reload": 1, "clock": 1,
}  # fmt: skip
OF_DISKS = {"store": 30, "read": 25, "purge": 12, "away": 6, "ill": 6, "come_back": 8, "heal": 6, "flip": 2, "kill": 2}


class Story(Node):
    """One seed: what happens to the node."""

    def __init__(self, loop: SimLoop, directory: Path) -> None:
        super().__init__(loop, directory)
        self.seen = Counter[str]()
        self.tasks = self.harm = 0
        self.spoils = self.held = False
        self.drained, self.using, self.pinned, self.rotten = set(), set(), set(), set()
        self.calm = loop.time()  # since when the first level is well; while it is not, the time of the last look
        self.bucket_calm = -math.inf  # since when the bucket is
        self.kept, self.purged_at, self.durable, self.started, self.own = {}, {}, {}, {}, {}
        self.asked: dict[str, float] = {}  # when a pin of each was asked for the last time
        self.reading = []
        self.latest: Sequence[str] = ()  # the keys of the latest store
        self.removed: Sequence[str] = ()  # the keys of objects that were removed from outside at last
        self.purged: set[str] = set()
        self.purged_in_part: set[str] = set()  # of these, while a disk was away: a kill may forget it
        self.storing: Counter[str] = Counter()
        self.users: dict[str, set[str]] = {key: set() for key in self.keys}  # which engines have asked for each
        self.loaded: dict[str, float] = {}  # when each was read the last time
        self.working: set[asyncio.Task[None]] = set()
        self.resting = False  # at the end: no engine is in a hurry, so each use is one

    async def run(self) -> Counter[str]:
        try:
            return await self._run()
        finally:
            for task in self.working:
                task.cancel()
            await asyncio.gather(*self.working, return_exceptions=True)
            for client in self.clients.values():
                await client.close()

    async def _run(self) -> Counter[str]:
        few = mock.patch.multiple(orders, MANY_ORDERS=2, MOST_ORDERS=3)
        with simulated(), mock.patch.object(health, "EVERY_S", LOOK_S), few:
            await self.begin()
            for _ in range(self.chance.randint(20, 70)):
                await asyncio.sleep(self.chance.choice([0.0, 0.01, 0.1, 0.5, 2.0, 15.0]))
                await self.act()
            await self.well_again()
            written = self.written
            await asyncio.sleep(REST_S)
            self.check_rest(self.context.run(self.daemon.stats), self.written - written)
            for clean in (False, True):
                await self.check_reads()
                await self.again(clean=clean)
            await self.check_reads()
            await self.purge(None)
            self.check_empty()
            await self.end(clean=True)
        return self.seen

    async def act(self) -> None:
        actions = OF_DISKS if self.plain else ACTIONS
        what = self.chance.choices(list(actions), list(actions.values()))[0]
        self.loop.note(f"act {what}")
        self.seen[what] += 1
        self.check_durable(self.loop.time())
        self.check_refused()
        self.check_held(self.loop.time())
        self.check_lost()
        self._note_calm()
        work = getattr(self, f"_{what}")()
        if work is not None:
            if what == "purge":  # beside what reads at one time and commits at another
                for other in (self._read(), self._prefetch(), self._store()):
                    if other is not None and self.chance.random() < 0.5:
                        self._begin("read", other)
                await asyncio.sleep(self.chance.choice([0.0, 0.005, 0.02, 0.05]))
            if what == "kill":
                await work()
            else:
                self._begin(what, work)
                await asyncio.sleep(0)  # it begins
                if what == "drain" and self.chance.random() < 0.5:
                    for _ in range(self.chance.randint(1, 4)):
                        await asyncio.sleep(0.003)  # the level is leaving
                        self._begin("store", self._store())
        if what == "remove" and self.removed and self.chance.random() < 0.7:  # a read may notice it late
            self.pace(LATE)
            for key in self.removed:
                self._begin("read", functools.partial(self.read, [key]))
            await asyncio.sleep(self.chance.choice([0.01, 0.1, 0.3]))
            self.pace(PACE)
            self._begin("store", functools.partial(self.store, self.removed, shared=False))
        for task in [task for task in self.working if task.done()]:
            self.working.discard(task)
            task.result()
        self._note_calm()

    def _note_calm(self) -> None:
        if not self.first_is_well:
            self.calm = self.loop.time()
        if self.bucket.fault or self.bucket.link:
            self.bucket_calm = self.loop.time()

    def pace(self, faults: ThreadFaults) -> None:
        """How fast threads are from now on."""
        for crew in self.crews:
            crew.faults = faults

    def _begin(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        self.working.add(self.loop.create_task(self._may_fail(what, work)))

    async def _may_fail(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        """Its daemon may be killed, and what it asks for may be refused."""
        try:
            await work()
        except (TransferError, Closed) as error:
            self.seen[f"{what} {error.reason}"] += 1

    @property
    def first_is_well(self) -> bool:
        hangs = any(medium.hangs for medium in self.media)
        self.held = hangs and (self.held or bool(self.drained))  # staging, by stores that a disk was the first level of
        well = self.shape[0] == "m" or not any(medium.unwell for medium in self.media)
        return not self.drained and not self.held and well

    def draw(self, most: int) -> list[str]:
        """Some keys of one engine: a chain from its root on, or a piece of one."""
        name = self.chance.choice(ENGINES)
        first = self.chance.randrange(EACH)
        return [f"{name}{number}" for number in range(first, min(EACH, first + self.chance.randint(1, most)))]

    def _store(self) -> Any:
        return functools.partial(self.store, self.draw(3), shared=False)

    def _hand_over(self) -> Any:
        return functools.partial(self.store, self.draw(3), shared=True)

    async def store(self, keys: Sequence[str], *, shared: bool) -> None:
        shared = shared and "b" in self.shape and len(self.shape) > 1
        engine, began = keys[0][0], self.loop.time()
        blocks, own = self.blocks[engine], self._take(engine, len(keys))
        if own is None:
            return
        life, before, unlisted = self.lives, self.turns(), self.lists_unread
        self.present.update(self.names[key] for key in keys)  # it may leave before the answer
        for key, block in zip(keys, own, strict=True):
            blocks.fill(block, key)
            self.users[key].add(engine)
            self.purged.discard(key)
            self.started[key] = began
            self.storing[key] += 1
        self.tasks += 1
        self.latest = keys
        timeout = SHARED_S if shared else STORE_S
        task = WriteStorageTask(task_id=f"w{self.tasks}", keys=list(keys), gpu_block_ids=own, timeout=timeout)
        if shared:
            task = msgspec.structs.replace(task, shared=True)
        result, given_up = await self.submit(engine, task)
        if life != self.lives:
            return
        self._give(engine, own)
        for key in keys:
            self.storing[key] -= 1
        self.seen[f"{'hand over' if shared else 'store'} {result.status}"] += 1
        stored = {key for key, block in zip(keys, own, strict=True) if block in result.block_ids}
        self.check_stored(stored, began, shared=shared)
        self.note_answer(keys)
        if not given_up:
            self.check_taken(keys, stored, before, unlisted, began)
        self.own.update(dict.fromkeys(stored, began))
        if (
            result.status is Status.EXPIRED
            and not given_up
            and not shared
            and not self.through
            and self.shape[0] == "m"
        ):
            assert began <= self.calm, f"buffers: a store to a healthy first level expired: {result}"
        late = result.status is Status.EXPIRED or any("not answered a copy" in str(rank.error) for rank in result.ranks)
        if late and not given_up and shared and self.shape[0] == "m":
            calm = max(self.calm, self.bucket_calm + CALM_S)
            assert began <= calm, f"copies: a hand-over from memory to a healthy bucket is late: {result}"

    def _read(self) -> Any:
        keys = self.latest if self.latest and self.chance.random() < 0.3 else self.draw(4)
        return functools.partial(self.read, keys)

    async def read(self, keys: Sequence[str]) -> None:
        engine = keys[0][0] if self.chance.random() < 0.8 else self.chance.choice(ENGINES)
        began, forbidden = self.loop.time(), {key for key in keys if key in self.purged}
        blocks, own = self.blocks[engine], self._take(engine, len(keys))
        if own is None:
            return
        life, reading = self.lives, Reading(keys, engine, self)
        for key in keys:
            self.users[key].add(engine)
        self.tasks += 1
        task = ReadStorageTask(
            task_id=f"r{self.tasks}", keys=list(keys), gpu_block_ids=own, prefix=False, timeout=SHARED_S
        )
        self.reading.append(reading)
        result, given_up = await self.submit(engine, task)
        if life != self.lives:
            return
        self.note_starved()
        self.reading.remove(reading)
        self.seen[f"read {result.status}"] += 1
        if not given_up:
            expired = result.error is not None and result.error.code == "expired"
            loaded = {key for key, block in zip(keys, own, strict=True) if block in result.block_ids}
            self.check_loaded(reading, loaded, expired=expired)
        for key, block in zip(keys, own, strict=True):
            if block in result.block_ids:
                self.loaded[key] = self.loop.time()
                assert blocks.holds(block, key), f"bytes: {key} has others"
                gone = key in forbidden and key in self.purged and self.started.get(key, -1.0) < began
                assert not gone, f"purge: {key} was purged, never stored again, and is read"
        self._give(engine, own)

    async def submit(self, engine: str, task: ReadStorageTask | WriteStorageTask) -> tuple[TaskResult, bool]:
        """The result, and whether the engine has given the task up: it was in a hurry, or cancelled it."""
        drawn, client = 0.5 if self.resting else self.chance.random(), self.clients[engine]
        if drawn < 0.05:
            task = msgspec.structs.replace(task, timeout=HURRY_S)
        pushed = self.loop.create_task(client.submit(task))
        if drawn > 0.95:
            await asyncio.sleep(self.chance.uniform(0.0, 2 * HURRY_S))
            with contextlib.suppress(TransferError):  # its daemon may have been killed meanwhile, as `pushed` says
                await client.cancel(task.task_id)
        return await pushed, not 0.05 <= drawn <= 0.95

    def _take(self, engine: str, count: int) -> list[int] | None:
        free = self.free[engine]
        if len(free) < count:
            return None
        self.free[engine] = free[count:]
        return free[:count]

    def _give(self, engine: str, blocks: Sequence[int]) -> None:
        self.free[engine] += blocks

    def _prefetch(self) -> Any:
        if self.shape[0] == "m" and len(self.shape) > 1:
            return functools.partial(self.prefetch, self.draw(3))
        return None

    async def prefetch(self, keys: Sequence[str]) -> None:
        engine = self.chance.choice(ENGINES)
        for key in keys:
            self.users[key].add(engine)
        result = await self.clients[engine].prefetch(keys, to="memory", timeout=SHARED_S)
        self.seen["prefetched"] += len(result.block_ids)

    def harmed(self) -> None:
        """From now on no pin so far need be durable."""
        self.harm += 1
        self.durable.clear()

    def _pin(self) -> Any:
        keys = self.latest if self.latest and self.chance.random() < 0.6 else self.draw(2)
        return functools.partial(self.pin, keys, self.chance.choice([60.0, 2000.0]))

    async def pin(self, keys: Sequence[str], ttl: float) -> None:
        began, harm = self.loop.time(), self.harm
        self.pinned |= set(keys)
        for key in keys:
            self.durable.pop(key, None)  # a pin replaces the engine's earlier one,
            self.asked[key] = began  # also one that has yet to be answered
        pinned = await self.clients[keys[0][0]].pin(keys, ttl)
        self.check_pinned(keys, pinned.durable, began)
        if pinned.durable == len(keys) and harm == self.harm:
            self.seen["pinned durably"] += len(keys)
            latest = [key for key in keys if self.asked[key] == began]
            lasting = [key for key in latest if key not in self.rotten and not self.left(key, began)]
            self.durable.update(dict.fromkeys(lasting, began + ttl))

    def _unpin(self) -> Any:
        self.harmed()
        return self.clients[self.chance.choice(ENGINES)].unpin

    def _purge(self) -> Any:
        return functools.partial(self.purge, self.chance.choice([None, *ENGINES]))

    async def purge(self, engine: str | None) -> None:
        began, life = self.loop.time(), self.lives
        fits = [key for key in self.keys if engine in (None, key[0]) and not self.storing[key]]
        aside = {medium: medium.set_aside() for medium in self.media}
        self.harmed()
        self.purges(engine, math.inf)  # until it has ended
        try:
            purged = await self.clients[engine or "a"].purge(engine=engine)
        finally:
            self.harmed()
            # After a kill nobody knows whose an object was: all that may be the engine's goes (orders.py).
            self.purges(engine if life == self.lives else None, self.loop.time())
        if life != self.lives:
            return
        self.seen["purge ended"] += 1
        gone = {key for key in fits if self.started.get(key, -1.0) < began}
        if engine is not None:  # what is found on a medium belongs to whichever engine of its space uses it first
            away = self.drained | self.using  # a level that is put back is found anew, too
            known = {key for key in gone if self.own.get(key, -1.0) > self.found_at and not away}
            # What comes up from a bucket, too, belongs to who loads it first, also if another engine had stored it.
            comes = self.came.union(self.keys if "b" in self.shape else ())
            known = {key for key in known if key not in comes or self.users[key] == {engine}}
            used = {key for key in gone if self.found_at < self.loaded.get(key, -1.0) < began - USED_S}
            known |= {key for key in used if self.users[key] == {engine} and not away}
            gone = known - self.pinned  # one that is found pinned stays with the engine that came first
        missed = set(getattr(purged, "not_reached", ()))
        self.check_purged(gone, aside, missed)
        self.purged |= gone  # what a disk that was away brings back goes before it serves
        if missed:
            self.purged_in_part |= gone

    def _drain(self) -> Any:
        names = self.levels
        if len(names) < 2 or self.drained:
            return None
        return functools.partial(self.drain, self.chance.choice(names))

    async def drain(self, name: str) -> None:
        began, life = self.loop.time(), self.lives
        there = self.where(name).union(key for key, count in self.storing.items() if count)
        in_memory = self.where("memory")
        self.harmed()
        self.drained.add(name)
        try:
            change = await self.clients["a"].drain_level(name)
        except TransferError:
            self.drained.discard(name)
            raise
        if life == self.lives and change.state == "drained":
            self.drained.add(name)  # a `use` that was sent after it may have begun before it
        returned = name == "file" and math.isinf(self.found_at)  # what a disk has brought back, it may not know yet
        if life == self.lives and name in self.drained and name != "object" and not returned:
            evicted = in_memory - self.where("memory")  # the answer takes its time to get here
            self.check_alone(name, began, self.loop.time(), change.objects, evicted)
            self.check_leaving(name, began, there)

    def _use(self) -> Any:
        return functools.partial(self.use, sorted(self.drained))

    async def use(self, names: Sequence[str]) -> None:
        for name in names:
            self.harmed()
            if self.chance.random() < 0.5 and name == "object":  # the medium was replaced by an empty one
                for one in list(self.bucket.objects):
                    self.bucket.forget(one)
            self.drained.discard(name)
            self.using.add(name)
            began = self.loop.time()
            try:
                await self.clients["a"].use_level(name)
            finally:
                self.using.discard(name)
            self.check_forgotten(name, began)
            self.found_at = max(self.found_at, self.loop.time())
            self.came |= self.where(name)

    def _kill(self) -> Any:
        return self.again

    async def again(self, *, clean: bool | None = None) -> None:
        self.check_held(self.loop.time())
        await self.end(clean=self.chance.random() < 0.4 if clean is None else clean)
        await every(self.working)
        for one in (self.working, self.storing, self.reading, self.drained):
            one.clear()
        for users in self.users.values():
            users.clear()
        self.purged -= self.purged_in_part
        self.purged_in_part.clear()
        if "b" in self.shape:  # what a bucket keeps of purges is hidden for a life
            self.purged.clear()
        await self.begin()
        self.check_pinned_again(self.loop.time())

    def medium(self) -> Medium | None:
        return self.chance.choice(self.media) if self.media else None

    def _away(self) -> None:
        if (medium := self.medium()) is not None and not medium.unwell:
            self.harmed()
            medium.go()

    def _ill(self) -> None:
        if (medium := self.medium()) is not None and not medium.unwell:
            self.harmed()
            how = self.chance.choice([errno.EIO, errno.EROFS, 0])
            self.spoils |= how == errno.EIO  # what cannot be read counts as damaged
            medium.fail(how) if how else medium.hang(only_calls=self.chance.random() < 0.5)

    def _come_back(self) -> None:
        if (medium := self.medium()) is not None and medium.unwell:
            self.harmed()
            self.note_starved()
            self.found_at = math.inf
            held = [name for name in self.names.values() if medium.has(name)]
            medium.come_back(self.chance.choice(["same", "same", "empty", "image"]))
            for name in held:
                if not medium.has(name):
                    medium.left(name)

    def _image(self) -> None:
        if (medium := self.medium()) is not None and not medium.unwell:
            medium.take_image()

    def _lifecycle(self) -> None:
        for key in self.chance.sample(self.keys, 5):
            self.bucket.forget(self.names[key])

    def _fault(self) -> None:
        if "b" in self.shape:
            self.bucket.fail(self.chance.choice(["silent", "hang", *REFUSALS]))

    def _link(self) -> None:
        self.spoils = True
        self.bucket.link = not self.bucket.link

    def _heal(self) -> None:
        self.bucket.fail("")
        self.note_starved()
        for medium in self.media:
            if medium.fault or medium.hangs:
                self.found_at = math.inf  # until it is found again, which nobody says
            medium.heal()

    def _flip(self) -> None:
        key = self.chance.choice(self.latest or self.keys)
        name, self.spoils = self.names[key], True
        self.rotten.add(key)
        self.forget(key)
        for medium in self.media:
            medium.flip(name, self.chance)
        if (data := self.bucket.objects.get(name)) is not None:
            self.bucket.objects[name] = bytes([data[0] ^ 1]) + data[1:]
            self.bucket.gone[name] = self.loop.time()

    def _remove(self) -> None:
        self.removed = ()
        if (medium := self.medium()) is not None:
            self.removed = self.latest or [self.chance.choice(self.keys)]
            for key in self.removed:
                self.forget(key)
                medium.remove(self.names[key])

    def _reload(self) -> None:
        self.harmed()
        for kind, objects in self.objects.items():
            self.objects[kind] = self.chance.randint(4, 12) if objects < ROOMY else ROOMY
        capacity = {kind: Size(count * OBJECT[kind]) for kind, count in self.objects.items()}
        replace = msgspec.structs.replace
        self.config = replace(
            self.config,
            memory=replace(self.config.memory, capacity=capacity["m"]),
            file=section_of(self.media, capacity["d"]),
        )
        self.context.run(self.storage.reconfigure, self.config)

    def _clock(self) -> None:
        self.harmed()
        self.clock.jump_wall(self.chance.choice([-86_400.0, -60.0, 60.0, 86_400.0]))

    # --- the end ------------------------------------------------------------------------------------

    async def well_again(self) -> None:
        self.bucket.link = False
        self._heal()
        for medium in self.media:
            if medium.unwell:
                self.found_at = math.inf  # a drain that still runs cannot count what this one brings back
                medium.come_back("same")
        self.pace(CALM)
        self.loop.note("all is well")
        await every(self.working)
        self.working.clear()
        self.resting = True
        await self.use(sorted(self.drained))
        self.context.run(self.storage.reconfigure, self.config)  # a reload tries lost disks at once
        await asyncio.sleep(CALM_S)
        # Nobody else looks at what vanished from a bucket; and what was evicted is copied again at its next use.
        disks = None if self.disks is None else self.context.run(self.disks.storage.statistics)
        if "b" in self.shape or (disks is not None and disks["evictions"]):
            await self.check_reads(apart=USED_S)  # one use at a time: a use queues a copy only if little waits
        await asyncio.sleep(CALM_S)

    async def check_reads(self, *, apart: float = 0.0) -> None:
        for key in self.keys:
            await self.read([key])
            await asyncio.sleep(apart)


def live(seed: int) -> Counter[str]:
    """Live one seed. Raises what it finds."""
    with tempfile.TemporaryDirectory(prefix="td-store-", dir=MEDIA) as directory:
        return simulate(lambda loop: Story(loop, Path(directory)).run(), seed)


if __name__ == "__main__":
    sys.exit(command("tests.support.simulation.store_world", __doc__, live))
