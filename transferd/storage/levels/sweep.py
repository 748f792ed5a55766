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

import functools
from collections.abc import Iterable

from transferd.runtime.aio import Background, Paced, in_turns
from transferd.storage.base import Item
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.write_back import BATCH, GIVE_WAY_S, WriteBack
from transferd.storage.lru import Use

EVERY_S = 60.0
RECHECKS_A_SECOND = 10.0  # of a level that others change: each is a request that a bucket's owner pays for


class Sweep:
    """See the module. Used on one loop, from `open` to `close`."""

    def __init__(self, parts: StackParts) -> None:
        self._parts = parts
        self._starting = Background(awaited=False)
        self._rechecks, self._counted_at = 0.0, 0.0

    def open(self) -> None:
        """Call it when all levels are open."""
        self._counted_at = self._parts.now()
        for back in self._parts.write_backs:
            back.sweep = Paced(functools.partial(self._sweep, back), EVERY_S)
            back.sweep.soon()  # of nothing: the next one comes an interval later
            if back.level.known:
                back.level.index.observe(back.noted)
            else:
                self._starting.begin(self._compare(back))

    async def close(self) -> None:
        """Call it when write-backs close."""
        await self._starting.settled()
        for back in self._parts.write_backs:
            await back.sweep.close()

    def used(self, items: Iterable[Item]) -> None:
        """After uses: queue what lower levels lack, as far as little waits there."""
        parts, now = self._parts, self._parts.now()
        self._rechecks = min(float(BATCH), self._rechecks + (now - self._counted_at) * RECHECKS_A_SECOND)
        self._counted_at = now
        for item in items:
            if item.use is None or item.name in parts.unsaved:
                continue
            for back in parts.write_backs:
                if back.has_leisure:
                    self._doubt_old(back.level, item.name)
                    back.offer(item.name, item.use, item.depth)

    def open_anew(self, level: StoreLevel) -> None:
        """Note that a level was put back, perhaps with another medium. While it was out, levels below lost objects."""
        for back in self._parts.write_backs:
            lost_some = back.level.known and back.level.number > level.number
            is_asked = back.level is level and not level.known
            if lost_some or is_asked:
                self._starting.begin(self._compare(back))

    # --- inside -------------------------------------------------------------------------------------

    def _doubt_old(self, level: StoreLevel, name: str) -> None:
        """Have a level asked again that has said long ago that it has an object."""
        hint, recheck = level.hint(name), level.section.recheck
        if hint is not None and not level.leaving and 0 < recheck < self._counted_at - hint.at and self._rechecks >= 1:
            self._rechecks -= 1
            level.doubt(name)

    async def _sweep(self, back: WriteBack) -> None:
        use, depth = Use(), 0
        todo = list(back.lacking)
        while todo and not back.level.out_for_stores and await back.emptied():
            await self._parts.traffic.quiet(GIVE_WAY_S)
            some = [todo.pop() for _ in range(min(BATCH, len(todo)))]
            for name in some:
                depth += 1
                back.lacking.pop(name, None)
                back.offer(name, use, depth)
        if back.lacking:
            back.sweep.soon()
        back.wake()

    async def _compare(self, back: WriteBack) -> None:
        """Remember what the level lacks of each level above; of the last used objects, if it must be asked."""
        names: dict[str, None] = {}
        for source in self._parts.levels[: back.level.number]:
            room = int(back.level.section.write_back_bytes)
            async for name, nbytes in in_turns(source.index.hottest_first()):
                if back.closing or (not back.level.known and (room := room - nbytes) < 0):
                    break
                if back.level.has([name]) != [True]:  # also while it is away: a sweep waits for it
                    names[name] = None
        async for name in in_turns(reversed(names)):
            back.remember(name)
        back.sweep.soon(at_once=True)
