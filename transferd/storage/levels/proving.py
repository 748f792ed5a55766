"""What a store owes to lower levels: the levels that its use must reach have each object, as they say within the task.

That is so for a hand-over (the first level that other nodes see), and for levels with `write = "through"`. What a level
once said is a Hint (levels/base.py): others remove objects from a bucket, a pool evicts, files are removed from
outside. So what a level has not said since the task began is asked of it, all at once. What is missing is copied from
the level above that has it, before all other copies. No slots of the task are in use meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transferd.errors import StorageError, StorageFull, StorageUnavailable
from transferd.storage.levels.base import Proof
from transferd.storage.levels.level import TIMES, StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.write_back import WriteBack
from transferd.storage.lru import Use

ROOM_S = 600.0  # how long an object waits until its copy may wait, at most
HANGS_S = 5.0  # a level that has answered nothing for so long hangs
TRIES = 3  # an object that a level has lost again as soon as it was copied there

Object = tuple[str, int, int]
Answer = Proof | StorageError


class Proving:
    """See the module. Used on one loop."""

    def __init__(self, parts: StackParts) -> None:
        self._parts = parts

    async def prove(self, objects: Sequence[Object], use: Use, since: float) -> list[Answer]:
        """See `Levels.prove`."""
        answers: dict[str, Answer] = {}
        for number in sorted(self._parts.urgent(use)):
            todo = [one for one in objects if not isinstance(answers.get(one[0]), StorageError)]
            answers |= await self.prove_in(self._parts.levels[number], todo, use, since)
        return [answers[name] for name, _, _ in objects]

    async def ask(self, level: StoreLevel, names: Sequence[str]) -> list[Proof | None]:
        """For each name, a proof that the level has it; None if it says no. Raises StorageError."""
        parts = self._parts
        if why := level.out:
            raise StorageUnavailable(f"the level {level.name} cannot be used now: {why}")
        asked = parts.now()
        if level.known:
            there = [one is True for one in level.has(names)]
            look = level.index.look([name for name, one in zip(names, there, strict=True) if one])
            if look is not None:
                held = iter(await self._watched(look))
                there = [one and next(held) for one in there]
        else:
            there = level.said(names, await self._watched(level.storage.exists(names)), asked)
        return [Proof(level.name, asked) if one else None for one in there]

    async def _watched(self, call: Any) -> list[bool]:
        """Await a call that goes on if this is cancelled, and that the close of the levels waits for."""
        asking: asyncio.Future[list[bool]] = self._parts.late.begin(call)
        await asyncio.wait([asking], timeout=HANGS_S)
        if not asking.done():
            raise StorageUnavailable(f"a level of storage has not said for {HANGS_S:.0f} s what it has")
        return asking.result()

    async def prove_in(self, level: StoreLevel, objects: Sequence[Object], use: Use, since: float) -> dict[str, Answer]:
        """The answers for one level below the first."""
        answers, back = dict[str, Answer](), self._parts.write_backs[level.number - 1]
        for _ in range(TRIES):
            todo = [one for one in objects if one[0] not in answers]
            if level.leaving:
                out = StorageUnavailable(f"the level {level.name} is taken out")
                answers |= dict.fromkeys((name for name, _, _ in todo), out)
            elif todo:
                coming = await self._coming(back, todo, use, since, answers)
                await self._ended(back, [name for name, _, _ in todo if name in coming], since, answers)
        lost = StorageError(f"the level {level.name} has lost it again")
        return dict.fromkeys((name for name, _, _ in objects), lost) | answers

    async def _coming(
        self, back: WriteBack, todo: Sequence[Object], use: Use, since: float, answers: dict[str, Answer]
    ) -> set[str]:
        """Ask for what is not proven, and queue copies of what is missing. Returns what is copied; fills answers."""
        level, unsaved = back.level, self._parts.unsaved
        coming = {name for name, _, _ in todo if level.number in unsaved.get(name, {})}
        asked = [one for one in todo if one[0] not in coming and not self._said(level, one[0], since, answers)]
        try:
            said = await self.ask(level, [name for name, _, _ in asked]) if asked else []
        except StorageError as error:
            answers |= dict.fromkeys((name for name, _, _ in asked), error)
            asked, said = [], []
        for one, proof in zip(asked, said, strict=True):
            if (answer := proof or await self._queue(back, one, use)) is None:
                coming.add(one[0])
            else:
                answers[one[0]] = answer
        return coming

    async def _ended(self, back: WriteBack, names: Sequence[str], since: float, answers: dict[str, Answer]) -> None:
        """Wait for the ends of copies, the root's first, as long as the level answers some. Fills answers."""
        level = back.level
        # Others wait for them too.
        ends = {name: asyncio.shield(end) for name in names if (end := back.end_of(name)) is not None}
        waiting = set(ends.values())
        while waiting:
            before = back.answered
            _, waiting = await asyncio.wait(waiting, timeout=max(HANGS_S, TIMES * back.longest_s))
            if waiting and back.answered == before:
                break
        for name, end in ends.items():
            if not end.done():
                answers[name] = StorageUnavailable(f"the level {level.name} has not answered a copy for some time")
            elif (error := end.result()) is not None:
                answers[name] = error
            elif level.known:  # it has just been stored there
                answers[name] = Proof(level.name, self._parts.now())
            else:
                self._said(level, name, since, answers)

    def _said(self, level: StoreLevel, name: str, since: float, answers: dict[str, Answer]) -> bool:
        """Answer with what a level that others change too has said within the task. Returns whether it has."""
        hint = None if level.known else level.hint(name)
        if hint is None or hint.at < since:
            return False
        answers[name] = Proof(level.name, hint.at)
        return True

    async def _queue(self, back: WriteBack, one: Object, use: Use) -> StorageError | None:
        """Queue a copy. Returns why that cannot be."""
        level, (name, nbytes, depth) = back.level, one
        source = self._parts.first_with(name, level.number)
        if source is None:
            return StorageError(f"{name} has left the levels above {level.name} before it could be copied there")
        if why := level.out_for_stores:
            return StorageUnavailable(f"the level {level.name} cannot be used now: {why}")
        if not await back.room(nbytes, min(ROOM_S, max(0.0, use.until - self._parts.now()))):
            return back.refusal or StorageFull(f"no more copies may wait for the level {level.name}")
        try:
            back.offer(name, use, depth, source, has_room=True)
        finally:
            back.came(nbytes)
        return None
