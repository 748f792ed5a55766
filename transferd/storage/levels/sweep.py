"""Brings lower levels what they lack: whatever left them, was given up, or waited when the daemon ended.

Levels are inclusive both ways. An object that leaves a lower level while a level above has it is to be copied again,
unless the lower level evicted it for room: levels would copy in circles. Such an object is queued at its next use.

    left       removed from outside, damaged, or its medium replaced: queued at once, if little waits
    given up   (write_back.py) queued at the next sweep
    a restart  the queue of copies does not outlive the process. At most `write_back_bytes` waited in it, and those
               objects were stored last. So a level without an index is asked for as many bytes of the last used ones
    used       what a load found above is queued if the level below seems to lack it, or said so long ago
               (`recheck`) that others may have removed it since: so a bucket gets again what its rules have removed

A sweep queues a batch at a time, each when nothing else waits.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any

from transferd.runtime.aio import Paced, in_turns
from transferd.storage.base import Item
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.storing import Storing
from transferd.storage.levels.write_back import BATCH, GIVE_WAY_S, WriteBack
from transferd.storage.lru import Use
from transferd.storage.queues import EVICTED, STORED

EVERY_S = 60.0
MOST = 2**17  # names that are remembered for each level; beyond, the oldest are forgotten
RECHECKS_A_SECOND = 10.0  # of a level that others change: each is a request that a bucket's owner pays for


class Sweep:
    """See the module. Used on one loop, from `open` to `close`."""

    def __init__(self, parts: StackParts, storing: Storing) -> None:
        self._parts = parts
        self._storing = storing
        self._lacking: dict[WriteBack, OrderedDict[str, None]] = {}
        self._sweeps: dict[WriteBack, Paced] = {}
        self._starting: set[asyncio.Task[Any]] = set()
        self._rechecks, self._counted_at = 0.0, 0.0

    def open(self) -> None:
        """Call it when all levels are open."""
        self._counted_at = self._parts.now()
        for back in self._parts.write_backs:
            self._lacking[back] = OrderedDict()
            self._sweeps[back] = sweep = Paced(functools.partial(self._sweep, back), EVERY_S)
            sweep.soon()  # of nothing: the next one comes an interval later
            if back.level.known:
                back.level.index.observe(functools.partial(self._noted, back))
            else:
                self._start(back)

    async def close(self) -> None:
        for task in self._starting:
            task.cancel()
        if self._starting:
            await asyncio.wait(set(self._starting))
        for sweep in self._sweeps.values():
            await sweep.close()

    def ended(self, name: str, level: StoreLevel, why: str) -> None:
        """Note that a copy to this level was given up, for this reason."""
        if why != "close" and self._parts.source(level, name) is not None:  # also if another owner's purge forbade it
            self._remember(self._parts.write_backs[level.number - 1], name)

    def used(self, items: Iterable[Item]) -> None:
        """After uses: queue what lower levels lack, as far as little waits there."""
        parts = self._parts
        now = parts.now()
        self._rechecks = min(float(BATCH), self._rechecks + (now - self._counted_at) * RECHECKS_A_SECOND)
        self._counted_at = now
        for item in items:
            if item.use is None or item.name in parts.unsaved:
                continue
            for back in self._lacking:
                if back.has_leisure and self._asks(back, item.name, now):
                    self._queue(back, item.name, item.use, item.depth)

    def open_anew(self, level: StoreLevel) -> None:
        """Note that a level was put back, perhaps with another medium. While it was out, levels below lost objects."""
        for back in self._lacking:
            lost_some = back.level.known and back.level.number > level.number
            is_asked = back.level is level and not level.known
            if lost_some or is_asked:
                self._start(back)

    # --- inside -------------------------------------------------------------------------------------

    def _asks(self, back: WriteBack, name: str, now: float) -> bool:
        """Whether to queue a copy of what was used: the level lacks it, or said long ago that it has it."""
        level = back.level
        if level.known or (hint := level.hint(name)) is None:
            return self._storing.lacks(level, name)
        recheck = level.section.recheck
        if level.leaving or not recheck or now - hint.at <= recheck or self._rechecks < 1:
            return False
        self._rechecks -= 1
        return True

    def _queue(self, back: WriteBack, name: str, use: Use, depth: int) -> None:
        """Queue a copy, if a level above has the object."""
        source = self._parts.source(back.level, name)
        if source is not None:
            self._storing.save(source, name, use, depth, lacking=[back])

    def _remember(self, back: WriteBack, name: str) -> None:
        lacking = self._lacking[back]
        lacking[name] = None
        if len(lacking) > MOST:
            lacking.popitem(last=False)
        self._sweeps[back].soon()

    def _noted(self, back: WriteBack, name: str, what: str, _: Hashable) -> None:
        """An object has come to, or left, a level that knows its objects."""
        if what in (STORED, EVICTED) or self._parts.source(back.level, name) is None:
            return
        purging = self._parts.fences.purging(name)  # perhaps of the copies above, too
        if back.has_leisure and not back.level.out_for_stores and not purging:
            self._queue(back, name, Use(), 0)
        else:
            self._remember(back, name)

    async def _sweep(self, back: WriteBack) -> None:
        lacking, use, depth = self._lacking[back], Use(), 0
        todo = list(lacking)
        lacking.clear()
        while todo and not back.level.out_for_stores and await back.emptied():
            await self._parts.traffic.quiet(GIVE_WAY_S)
            some = [todo.pop() for _ in range(min(BATCH, len(todo)))]
            for name in some:
                depth += 1
                if name not in self._parts.unsaved and self._storing.lacks(back.level, name):
                    self._queue(back, name, use, depth)
        for name in todo:
            lacking[name] = None
        if lacking:
            self._sweeps[back].soon()

    def _start(self, back: WriteBack) -> None:
        task = asyncio.get_running_loop().create_task(self._compare(back))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _compare(self, back: WriteBack) -> None:
        """Remember what the level lacks of each level above; of the last used objects, if it must be asked."""
        names: dict[str, None] = {}
        for source in self._parts.levels[: back.level.number]:
            room = int(back.level.section.write_back_bytes)
            async for name, nbytes in in_turns(source.index.hottest_first()):
                if not back.level.known and (room := room - nbytes) < 0:
                    break
                if back.level.has([name]) != [True]:  # also while it is away: a sweep waits for it
                    names[name] = None
        for name in reversed(names):
            self._remember(back, name)
        self._sweeps[back].soon(at_once=True)
