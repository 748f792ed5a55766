"""Further copies of objects: of those that only this node has, before it leaves, and of those that have lost a copy.

    look ─ all objects of the pool, by the master's pages (master_pages.py): those that need a copy, the last used first
    make ─ for each, a segment with room ─ the library's copy task, made by a node that has the object ─ look again

A copy is only ever added: nothing is removed, so a process that dies in the middle costs no earlier object. A second
look decides what was copied, because the tasks' answers do not prove it.

The library begins 16 copy tasks a second on each node (a poll of a second for 16, in the library): so a drain of many
small objects takes long, and the last used objects go first. peers.py deals with a target that falls silent.

No copy makes another object leave: a segment counts as full at FILL, below the mark at which the master evicts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import structlog

from transferd.config import MooncakeStorageSection
from transferd.errors import RequestError, StorageError, StorageUnavailable, TransferError
from transferd.runtime.aio import Background
from transferd.runtime.clock import Clock
from transferd.storage.mooncake.client import CopyTask, PoolClient
from transferd.storage.mooncake.error_codes import NOT_THERE, OK, describe
from transferd.storage.mooncake.layout_records import PREFIX as RECORDS
from transferd.storage.mooncake.master_pages import (
    LentMemory,
    PoolObject,
    pages_address,
    read_all,
    read_named,
    read_segments,
)
from transferd.storage.mooncake.peers import Call, Peers
from transferd.storage.selection import Selection, parts_of
from transferd.tasks import CopiesMade
from transferd.wire.answers import Purged

log = structlog.get_logger(__name__)

T = TypeVar("T")

EACH = 16  # objects that are looked up and requested at a time
BEGUN = 16  # tasks that a node begins in a second
UNDER_WAY = 2 * BEGUN  # of a node
FILL = 0.85  # of a segment: the master evicts above 0.9 of the pool
ROUNDED = 9 / 8  # bytes of memory for a byte of an object, at most: the allocator has eight sizes for a power of two
LOOK_S = 0.2  # between two looks at tasks
END_S = 1.0  # of a pass: for what has begun. The library aborts if its client closes while a node has tasks to begin
TASK_S = 90.0  # the library has given up a transfer by then
ROUNDS = 3  # tries of an object, each with another node if one has failed
REFRESH_S = 5.0  # how old the figures of the segments may be
MOST_FOUND = 200_000  # objects of one pass
REST = 100  # after a look, times what it took of a core: the watch takes a hundredth of it
RECENT = 32_768  # keys with a known order of use, at least
SPAN = 2**20  # more numbers than a call has keys


class InThread(Protocol):
    """Runs a function off the loop, with the client. Raises StorageError."""

    def __call__(self, work: Callable[[PoolClient], T]) -> Awaitable[T]: ...


class LastAsked:
    """The keys that were looked up last. A call is one chain, root to leaf: it stays together, its root first.

    A look-up pays for this, so it only sets numbers, which rise. Two generations of them stand in for an order by use:
    between RECENT and twice as many keys have theirs.
    """

    def __init__(self) -> None:
        self._new: dict[str, int] = {}
        self._old: dict[str, int] = {}
        self._call = 0

    def used(self, keys: Sequence[str]) -> None:
        self._call += 1
        last = self._call * SPAN
        self._new.update(zip(keys, range(last, last - SPAN, -1), strict=False))
        if len(self._new) >= RECENT:
            self._old, self._new = self._new, {}

    def first(self, found: Collection[PoolObject]) -> list[PoolObject]:
        """The same objects, the last used first."""
        return sorted(found, key=lambda held: self._number(held.key), reverse=True)

    def chain(self, key: str) -> int:
        return -(-self._number(key) // SPAN)

    def _number(self, key: str) -> int:
        return self._new.get(key) or self._old.get(key, 0)


class FreeMemory:
    """The free room in the segments of other nodes. without: nodes that get nothing."""

    def __init__(self, segments: Iterable[LentMemory], without: Collection[str]) -> None:
        usable = (one for one in segments if one.takes and one.node not in without)
        self._free = {one: int(one.capacity * FILL) - one.used for one in usable}

    def why_none(self, nodes: Collection[str]) -> str:
        """Why an object of these nodes finds no segment."""
        others = any(one.node not in nodes for one in self._free)
        return "the other nodes have no room" if others else "no other node takes copies now"

    def take(self, nbytes: int, but: Collection[str], like: str = "") -> LentMemory | None:
        """A segment for an object, of none of the nodes `but`: the one named `like`, or the one with most room."""
        takes = int(nbytes * ROUNDED)
        fit = [one for one, free in self._free.items() if free >= takes and one.node not in but]
        if not fit:
            return None
        taken = next((one for one in fit if one.name == like), None) or max(fit, key=self._free.__getitem__)
        self._free[taken] -= takes
        return taken


class Copies:
    """Makes copies, one pass at a time. See the module. peers, counts: the store's."""

    def __init__(
        self, section: MooncakeStorageSection, in_thread: InThread, peers: Peers, clock: Clock, counts: Counter[str]
    ) -> None:
        self.recent = LastAsked()
        self._section = section
        self._in_thread = in_thread
        self._peers = peers
        self._now = clock.monotonic
        self._counts = counts
        self._turn = asyncio.Lock()
        self._by = math.inf  # when the running pass has to end
        self._left: Sequence[PoolObject] = ()  # what the running pass has yet to copy
        self._made = 0
        self._missing: int | None = None
        self._watching = Background(awaited=False)
        self._leaving = False
        self._spent = 0.0  # seconds of a core that were spent on pages since the watch's last look

    def statistics(self) -> dict[str, Any]:
        known = {} if self._missing is None else {"copies_missing": self._missing}
        return {"copying_bytes": _bytes(self._left), "copies_made": self._made} | known

    def start(self) -> None:
        """Look for lost copies from now on, if objects have several."""
        if self._section.replica_num > 1:
            self._watching.begin(self._watch())

    async def close(self) -> None:
        """End the pass that runs, and begin no other. Idempotent."""
        await self._leave()
        async with self._turn:
            pass

    async def leave(self, within_s: float) -> CopiesMade:
        """The last drain, before `close`: nothing else is copied any more. Raises like `drain`."""
        await self._leave()
        return await self._pass(_alone, within_s, last=True)

    async def _leave(self) -> None:
        self._leaving, self._by = True, -math.inf
        await self._watching.stop()

    # --- what is asked for ----------------------------------------------------------------------------

    async def drain(self, within_s: float = math.inf) -> CopiesMade:
        """Copy the objects that only this node has to other nodes, for at most so long. Ends a pass, but not the last.

        Raises RequestError, ConfigError, StorageError.
        """
        if not self._leaving:
            self._by = -math.inf
        return await self._pass(_alone, within_s)

    async def mend(self) -> CopiesMade:
        """Make the copies that objects of the pool lack, whichever node has them. Raises like `drain`."""
        if self._section.replica_num == 1:
            what = "objects have one copy each (storage.mooncake.replica_num = 1), so none can be missing"
            raise RequestError(what, code="bad_value")
        return await self._pass(lambda held, _: self._lacks(held), math.inf)

    async def _pass(
        self, wanted: Callable[[PoolObject, frozenset[str]], bool], within_s: float, *, last: bool = False
    ) -> CopiesMade:
        by = self._now() + within_s
        async with self._turn:
            if self._leaving and not last:
                raise StorageUnavailable("the daemon is stopping")
            self._by = by
            own = await self._own()
            found = await self._find(lambda held: wanted(held, own))
            return await self._make(found, lambda held: wanted(held, own))

    # --- purging ------------------------------------------------------------------------------------

    async def purge(self, selection: Selection, key_of: Callable[[str], str], *, dry_run: bool) -> Purged:
        """Remove what fits, for all nodes. key_of: a name's key. Raises StorageError, ConfigError."""
        names, total = selection.names, Purged()
        keys = sorted(map(key_of, filter(selection.fits, names or ())))
        found = read_all(self.pages) if names is None else read_named(self.pages, keys)
        async for some in self._each(found):
            going = (
                some if names is not None else [one for one in some if parts_of(one.key) and selection.fits(one.key)]
            )
            if going and not dry_run:
                codes = await self._in_thread(lambda client, keys=[one.key for one in going]: client.remove(keys))  # type: ignore[misc]
                if stays := [code for code in codes.values() if code not in (OK, *NOT_THERE)]:
                    what = f"{len(stays)} of {len(going)} objects stay in the pool ({describe(stays[0])})"
                    raise StorageError(f"{what}: purge again")
            total += Purged(len(going), sum(one.nbytes for one in going))
        return total

    # --- looking --------------------------------------------------------------------------------------

    @property
    def pages(self) -> str:
        """Where the master's pages are. Raises ConfigError."""
        return pages_address(self._section.master_pages, self._section.master_server_addr)

    async def _own(self) -> frozenset[str]:
        """This node's names among the holders: the daemon's, or that of the process that lends in its place.

        Raises StorageUnavailable if that process lends nothing.
        """
        if not (lender := self._section.lender):
            return await self._in_thread(lambda client: client.own)
        segments = await self._in_thread(lambda _: read_segments(self.pages))
        own = frozenset(one.node for one in segments if one.name == lender)
        if not own:
            raise StorageUnavailable(f"{lender} lends the pool nothing (storage.mooncake.lender): is it running?")
        return own

    async def _each(self, found: Iterator[list[PoolObject]]) -> AsyncIterator[list[PoolObject]]:
        def more(_: PoolClient) -> list[PoolObject] | None:
            began = time.thread_time()
            try:
                return next(found, None)
            finally:
                self._spent += time.thread_time() - began

        while (some := await self._in_thread(more)) is not None:
            yield some

    async def _find(self, wanted: Callable[[PoolObject], bool], share: tuple[int, int] = (0, 1)) -> list[PoolObject]:
        """What is wanted of the pool's objects, or of a share of them. Raises StorageUnavailable if its time is up."""
        found: list[PoolObject] = []
        async for some in self._each(read_all(self.pages, share)):
            if self._now() >= self._by:  # a part is no answer: the rest may be what is alone
                raise StorageUnavailable("the look at the pool was ended: by another drain, a stop, or its time")
            found += filter(wanted, some)
            if len(found) >= MOST_FOUND:
                break
        return self.recent.first(found)

    async def named(self, keys: Sequence[str]) -> list[PoolObject]:
        """Those of these objects that the pool has now. Raises StorageError, ConfigError."""
        return [held async for some in self._each(read_named(self.pages, keys)) for held in some]

    async def _again(self, some: Iterable[PoolObject], wanted: Callable[[PoolObject], bool]) -> list[PoolObject]:
        """Those that need a copy now, in their order."""
        return list(filter(wanted, await self.named([held.key for held in some])))

    async def _watch(self) -> None:
        """Look for objects that lack copies whenever nodes have come or gone, or objects were stored with too few."""
        seen: object = None
        failed = False
        while True:
            await asyncio.sleep(max(self._section.mend_interval, REST * self._spent))
            self._spent = 0.0
            try:
                segments = await self._in_thread(lambda _: read_segments(self.pages))
                now = frozenset(one.name for one in segments), self._counts["under_replicated"]
                if now != seen or self._missing:
                    await self._look(sorted({one.node for one in segments}))
                seen, failed = now, False
            except TransferError as error:
                if self._now() >= self._by:  # a drain has ended the look: the next one is soon
                    continue
                if not failed:
                    log.warning("cannot find out whether objects lack copies", problem=str(error))
                failed = True

    async def alone(self) -> dict[str, int]:
        """The lengths of the objects that only this node has, by key. Raises ConfigError, StorageError."""
        async with self._turn:
            self._by = math.inf
            own = await self._own()
            found = await self._find(lambda held: _alone(held, own))
        return {held.key: held.nbytes for held in found}

    async def _look(self, nodes: Sequence[str]) -> None:
        """Count the objects without enough copies in this node's share of all, and mend them if that is configured.

        nodes: all that lend memory, in the same order on each.
        """
        async with self._turn:
            self._by, missing = math.inf, 0
            own = await self._own()
            for number in (number for number, node in enumerate(nodes) if node in own):
                found = await self._find(self._lacks, (number, len(nodes)))
                made = await self._make(found, self._lacks) if found and self._section.mend else None
                missing += len(found) if made is None else made.left
            self._missing = missing

    def _lacks(self, held: PoolObject) -> bool:
        """Whether an object has too few copies. A record of a layout is stored before there are other nodes."""
        return len(held.nodes) < self._section.replica_num and not held.key.startswith(RECORDS)

    # --- making ---------------------------------------------------------------------------------------

    async def _make(self, found: Sequence[PoolObject], wanted: Callable[[PoolObject], bool]) -> CopiesMade:
        left = list(found)
        run = _Run()
        self._peers.watch(run.call)
        try:
            for _ in range(ROUNDS):
                before = len(left)
                await self._round(run, left, wanted)
                left = await self._again(left, wanted)
                if not left or self._now() >= self._by or (len(left) == before and not run.failed):
                    break
        finally:
            run.call.end()
            self._left = ()
        left_bytes = _bytes(left)
        why = run.why(late=self._now() >= self._by) if left else ""
        return CopiesMade(len(found) - len(left), _bytes(found) - left_bytes, len(left), left_bytes, why)

    async def _round(self, run: _Run, found: Sequence[PoolObject], wanted: Callable[[PoolObject], bool]) -> None:
        """Try to make a copy of each."""
        run.looked_at, run.no_room, run.failed = -math.inf, "", ""
        for start in range(0, len(found), EACH):
            self._left = found[start:]
            while (left_s := self._by - self._now()) > 0 and len(run.under_way) > min(run.most, BEGUN * left_s) - EACH:
                await self._progress(run)
            if left_s <= 0:
                break
            some = await self._again(found[start : start + EACH], wanted)
            if self._now() > run.looked_at + REFRESH_S:
                run.looked_at = self._now()
                run.saw(await self._in_thread(lambda _: read_segments(self.pages)), self._peers.down)
            chosen = run.choose(some, self.recent.chain)
            pairs = [(held.key, segment.name) for held, segment in chosen]
            answers = await self._in_thread(lambda client: client.copy(pairs)) if pairs else []  # noqa: B023
            for (held, segment), answer in zip(chosen, answers, strict=True):
                if isinstance(answer, int):
                    run.failed = describe(answer)
                else:
                    run.under_way[answer] = held, segment, self._now()
            run.call.peers = run.targets()
        while run.under_way and self._now() < self._by + END_S:
            await self._progress(run)

    async def _progress(self, run: _Run) -> None:
        """Wait a moment, and see which copies were made."""
        await asyncio.sleep(LOOK_S)
        tasks = list(run.under_way)
        for task, made in zip(tasks, await self._in_thread(lambda client: client.copied(tasks)), strict=True):
            _, segment, since = run.under_way[task]
            if made is None and self._now() < since + TASK_S:
                continue
            del run.under_way[task]
            self._made += made is True
            if not made:
                run.failed = f"the copy to {segment.name} {'did not end' if made is None else 'failed'}"
        run.call.peers = run.targets()


def _bytes(objects: Iterable[PoolObject]) -> int:
    return sum(held.nbytes for held in objects)


def _alone(held: PoolObject, own: frozenset[str]) -> bool:
    return own.issuperset(held.nodes)


@dataclass(eq=False)
class _Run:
    """The tasks of one pass. call: lets peers.py end tasks that wait for a target that falls silent."""

    call: Call = field(default_factory=Call)
    failed: str = ""  # why, the last time
    no_room: str = ""  # why, the last time
    under_way: dict[CopyTask, tuple[PoolObject, LentMemory, float]] = field(default_factory=dict)
    most: int = UNDER_WAY
    looked_at: float = -math.inf
    _room: FreeMemory = field(default_factory=lambda: FreeMemory([], ()))
    _last: tuple[int, str] = (0, "")  # chain, segment

    def saw(self, segments: Sequence[LentMemory], down: Collection[str]) -> None:
        self._room = FreeMemory(segments, down)
        self.most = UNDER_WAY * max(1, len(segments))
        for held, segment, _ in self.under_way.values():  # the master's figures may not include them yet
            self._room.take(held.nbytes, held.nodes, segment.name)

    def targets(self) -> frozenset[str]:
        """The nodes that copies under way are for."""
        return frozenset(segment.node for _, segment, _ in self.under_way.values())

    def choose(self, some: Iterable[PoolObject], chain_of: Callable[[str], int]) -> list[tuple[PoolObject, LentMemory]]:
        chosen: list[tuple[PoolObject, LentMemory]] = []
        for held in some:
            chain = chain_of(held.key)
            segment = self._room.take(held.nbytes, held.nodes, self._last[1] if chain == self._last[0] else "")
            if segment is None:
                self.no_room = self._room.why_none(held.nodes)
                continue
            self._last = chain, segment.name
            chosen.append((held, segment))
        return chosen

    def why(self, *, late: bool) -> str:
        """Why objects are left."""
        reasons = "the time was up" * late, self.no_room, self.failed
        return "; ".join(filter(None, reasons)) or "they came meanwhile"
