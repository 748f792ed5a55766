"""Loads in place: from storage's memory directly into a block, for blocks that the CPU can address.

A thread copies each object in pieces directly into the segments of its block, and checks them on the way. Compared
with staging this saves a copy, a handover to another thread, and the leases. With the C extension, a piece takes one
call, without the GIL, which reads and writes memory once; large files are mapped for it. The Python version does the
same in more steps.

Objects are only loaded from memory this way (`Storage.get_in_place`), because no thread may wait for a disk while it
may touch a block: when a task ends, its blocks belong to the engine again. The file backend brings a large object into
the page cache first (docs/adr/0061). Past the page cache (`Storage.bounces`), a thread reads an object to a slot of
staging, and then copies it to the block (docs/adr/0065). All others go through staging a chunk at a time (read.py); so
do objects that another task is loading past the page cache right now, because there tasks share one read.

The footer is checked first, so a wrong object never touches a block. A payload that fails its check counts as cold:
staging loads it again, and decides whether the object is damaged or another process wrote to the block. Until then the
block holds undefined bytes, like any block that its task does not report (docs/adr/0051).
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import msgspec

from transferd.blocks.footer import Damage
from transferd.storage.base import Found, Outcome, Place, Storage
from transferd.tasks import ReadStorageTask
from transferd.workers.block_in_place import BlockInPlace
from transferd.workers.block_memory import AddressableBlocks
from transferd.workers.context import Account, RankContext
from transferd.workers.loan import Loan

# The size of one call: enough bytes to hide its fixed cost (waking two threads, and hearing from them), and few enough
# objects that the event loop prepares them within a millisecond or two. A stop waits only for a piece of one object.
CHUNK_BYTES, CHUNK_BLOCKS = 128 * 1024**2, 64
CHUNKS_UNDER_WAY = 2  # so that no thread waits for the event loop
CONSUMER = "read"  # of staging

Bad = Callable[[str, str, Damage], None]


@dataclass(slots=True)
class Tries:
    """How far one task has come with loads in place.

    cold: positions for staging. ended: the first position that cannot be loaded. hopeless: try no further positions in
    place. troubled: nor through staging, because a whole chunk failed.
    """

    cold: list[int] = field(default_factory=list)
    ended: int | None = None
    hopeless: bool = False
    troubled: bool = False


class ChunkInPlace(msgspec.Struct, frozen=True):
    """One call to storage for some blocks of a task. asked: its answer. loan: that of the task's blocks."""

    places: list[Place]
    asked: asyncio.Future[list[Outcome]]
    loan: Loan


class InPlaceReader:
    """Loads blocks of one rank in place, as far as storage has their objects in memory, or by way of a slot each.

    elsewhere: the names of objects that are on their way to staging. bad: called for each object that failed its check,
    with task id, name and damage.
    bounces: how many slots of staging a chunk needs at most; 0: none, and then nothing waits for a medium.
    """

    def __init__(
        self,
        context: RankContext,
        storage: Storage,
        blocks: AddressableBlocks,
        elsewhere: Container[str],
        bad: Bad,
    ) -> None:
        self.bounces = storage.bounces
        self._elsewhere = elsewhere
        self._coming: set[str] = set()  # the names of objects that a thread reads to a slot
        self._context = context
        self._storage = storage
        self._bad = bad
        self._blocks = blocks
        self._chunk_blocks = max(1, min(CHUNK_BYTES // context.layout.block_bytes, CHUNK_BLOCKS))

    @property
    def possible(self) -> bool:
        """Whether the blocks' memory allows loads that bounce."""
        memory = self._blocks.memory()
        return memory is not None and memory.tables is not None

    def load_at_once(self, account: Account, names: Sequence[str]) -> ChunkInPlace | None:
        """Load the first block of a task that names no timeline. None: done. Otherwise pass the chunk on to `load`.

        Not if it `bounces`. Raises TransferError.
        """
        chunk = self._ask(account, names, (0,), Loan())
        if not chunk.asked.done():
            return chunk
        outcomes = chunk.asked.result()
        found, block = outcomes[0].found, chunk.places[0].data
        if found is Found.COLD:
            return chunk
        if found is Found.FOUND and isinstance(block, BlockInPlace) and block.damage is None:
            account.done((0,), self._context.layout.block_bytes)  # the usual case, without `_take`'s lists
        else:
            self._take(account, Tries(), chunk.places, outcomes)
        return None

    async def load(
        self, account: Account, names: Sequence[str], positions: Sequence[int], first: ChunkInPlace | None = None
    ) -> Sequence[int]:
        """Load blocks of a ReadStorageTask. Returns the positions that remain for staging, ascending.

        first: a chunk that `load_at_once` has begun. No positions remain if the task was stopped or its prefix ended.
        Raises TransferError.
        """
        task = account.job.task
        assert isinstance(task, ReadStorageTask)
        if task.after and not await self._context.computed(account.job):
            return ()
        stop, prefix = account.job.stop, task.prefix
        loan, tries, begun = Loan() if first is None else first.loan, Tries(), 0
        under_way: deque[ChunkInPlace] = deque()
        if first is not None:
            under_way.append(first)
            begun = len(first.places)
        try:
            while True:
                useful = stop.reason is None and not tries.hopeless and (tries.ended is None or not prefix)
                while useful and begun < len(positions) and len(under_way) < CHUNKS_UNDER_WAY:
                    wanted = positions[begun : begun + self._chunk_blocks]
                    mine = self._alone(names, wanted) if self.bounces else wanted
                    if mine and not self._begin(account, names, mine, loan, under_way):
                        tries.hopeless = True  # where objects go through staging whole, tasks wait for slots
                        break
                    begun += len(wanted)
                    if len(mine) < len(wanted):
                        tries.cold += set(wanted).difference(mine)
                if not under_way:
                    break
                chunk = under_way[0]
                if not chunk.asked.done() and not await self._answered(account, chunk.asked):
                    return ()
                under_way.popleft()
                self._take(account, tries, chunk.places, chunk.asked.result())
        finally:
            for chunk in under_way:  # the task has stopped, but no one should load a damaged object again
                chunk.asked.add_done_callback(functools.partial(self._note_damage, task.task_id, chunk.places))
            if (returned := loan.end()) is not None:
                await returned
        if tries.troubled or stop.reason is not None:
            return ()
        if prefix and tries.ended is not None:
            return [position for position in sorted(tries.cold) if position < tries.ended]
        return [*sorted(tries.cold), *positions[begun:]]

    def _alone(self, names: Sequence[str], wanted: Sequence[int]) -> list[int]:
        """Those of these positions whose objects are not on their way to any block yet."""
        first: dict[str, int] = {}
        for i in wanted:
            first.setdefault(names[i], i)
        return [i for name, i in first.items() if name not in self._coming and name not in self._elsewhere]

    def _begin(
        self, account: Account, names: Sequence[str], chunk: Sequence[int], loan: Loan, under_way: deque[ChunkInPlace]
    ) -> bool:
        """Have storage load the blocks at these positions. False: no slot of staging is free."""
        if not self.bounces:
            under_way.append(self._ask(account, names, chunk, loan))
            return True
        staging, coming = self._context.staging, [names[i] for i in chunk]
        count = staging.slots_at_once(CONSUMER, min(len(chunk), self.bounces))
        lease = staging.try_acquire(CONSUMER, count, account.job.task.task_id)
        if lease is None:
            return False

        def ended(_: object) -> None:
            lease.release()
            self._coming.difference_update(coming)

        self._coming.update(coming)
        try:
            begun = self._ask(account, names, chunk, loan, staging.views(lease))
        except BaseException:
            ended(None)
            raise
        begun.asked.add_done_callback(ended)
        under_way.append(begun)
        return True

    def _ask(
        self,
        account: Account,
        names: Sequence[str],
        chunk: Sequence[int],
        loan: Loan,
        slots: list[memoryview] | None = None,
    ) -> ChunkInPlace:
        """Have storage load the blocks at these positions. slots: for as many blocks at a time."""
        context, job = self._context, account.job
        task = job.task
        assert isinstance(task, ReadStorageTask)
        context.recorder.step(task.task_id, "load in place", context.rank, len(chunk))
        memory = self._blocks.memory()
        assert memory is not None, "the caller looks"
        inspections = context.format.inspections(job.generation, [job.ids[i] for i in chunk], context.object_rank)
        blocks, use = task.gpu_block_ids, job.use
        places = [
            Place(names[i], BlockInPlace(memory, blocks[i], inspection, loan, slots), use, i)
            for i, inspection in zip(chunk, inspections, strict=True)
        ]
        more = () if slots is None else (len(slots),)
        return ChunkInPlace(places, context.background.begin(self._storage.get_in_place(places, *more)), loan)

    def _note_damage(self, task_id: str, places: Sequence[Place], asked: asyncio.Future[list[Outcome]]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            for place, outcome in zip(places, asked.result(), strict=True):
                if outcome.found is Found.FOUND:
                    self._damage(task_id, place)

    def _damage(self, task_id: str, place: Place) -> Damage | None:
        """What is wrong with an object that was found; tells it."""
        assert isinstance(place.data, BlockInPlace)
        damage = place.data.damage
        if damage is not None:
            self._bad(task_id, place.name, damage)
        return damage

    async def _answered(self, account: Account, asked: asyncio.Future[list[Outcome]]) -> bool:
        """Wait for the answer. False: the task was stopped first."""
        clock = self._context.clock
        before = clock.monotonic()
        answered = await account.job.stop.race(asked)
        account.storage_s += clock.monotonic() - before
        return answered

    def _take(self, account: Account, tries: Tries, places: Sequence[Place], outcomes: Sequence[Outcome]) -> None:
        """Add one chunk's outcomes to the account."""
        good, cold, failed = [], [], 0
        for place, outcome in zip(places, outcomes, strict=True):
            if outcome.found is Found.FOUND and self._damage(account.job.task.task_id, place) is None:
                good.append(place.depth)
                continue
            if outcome.found is Found.COLD:
                cold.append(place.depth)
            elif tries.ended is None:
                tries.ended = place.depth
            lost = place.data.lost if isinstance(place.data, BlockInPlace) else None
            if (error := lost or outcome.error) is not None:
                account.failed(error)
                failed += 1
                tries.troubled = tries.troubled or lost is not None
        account.done(good, len(good) * self._context.layout.block_bytes)
        tries.cold += cold
        tries.troubled = tries.troubled or failed == len(places)
        tries.hopeless = tries.troubled or tries.hopeless or len(cold) == len(places)
