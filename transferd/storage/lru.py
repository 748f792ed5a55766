"""An index of all objects: their total size, and the order of their eviction. It only decides, and moves no bytes.

An object is *reserved* while it is being written and *present* from its commit on. Reserved bytes count, so that
objects being written never overfill the store; they cannot be evicted, so the bytes in `used` may stay above a
capacity that was lowered until the current writes have ended.

    (absent) --reserve--> reserved --commit--> present --evict, forget--> (absent)
                          reserved --release--> (absent)

The order of eviction is by *use*, then by depth. A `Use` stands for one task on all its ranks, or one lookup. Each
object belongs to the last use that stored, loaded or looked up the object, at its depth in this use's chain of blocks.
The oldest use is evicted first, and within a use the deepest objects, whatever their rank. An engine can use a block
only together with all blocks before it, on every rank, so a chain must shrink from its leaf.

A write may evict only what precedes it in this order: earlier uses, and deeper objects of its own use.
So a task never evicts blocks that it stored or found to make room for its own tail. An object that is being
written cannot be evicted yet. If it is deeper than the object that would be evicted instead, a write of the
same use waits for it.

Objects have owners (queues.py). Each owner has a queue of uses, and eviction takes the next objects of all queues
together. No owner falls below its share because others write, and an owner below its share takes from others first.
A *pinned* object is in no use's group until it is unpinned. A capacity lowered below the pinned bytes ends all pins.

Once an object of a use was evicted, or found no room, deeper objects are useless: the chain *ends* there
(`Use.ends_at`). The use writes nothing more from there on, and an object that it is still writing there is
removed as soon as it is stored. So if the store is too small for a chain, all ranks keep the same part of it: the root
(ADR 28). A chain may grow over several tasks: chains.py. (ADR 130.)

Properties, which the stateful test checks: `used` is the sum of all sizes, reserved and present; `reserve` never lets
it exceed the capacity; eviction follows the order above, and takes no more than needed.

A size counts in whole `unit`s, because a disk allocates no less. The number of objects has a bound too (`most`):
a file system may run out of inodes.

Each use has a number, in the order of uses. `noted` receives the number and depth of every object that is
reserved or used, so that journal.py can keep the order on the medium; `adopt` restores it.

One owner changes an index, on the event loop. No method awaits, so each is one step.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from transferd.storage.chains import Chains
from transferd.storage.queues import (
    AWAITED,
    DEPTH,
    EVICTED,
    FOUND_AT,
    GONE,
    GUESSED,
    HELD_S,
    MOST_LINES,
    PINNED,
    RESTORED,
    SLACK,
    STORED,
    UNSAVED,
    Adopted,
    Entry,
    Line,
    NoRoom,
    Noted,
    Queue,
    Reserved,
    Use,
    UseGroup,
    Victim,
    nobody,
    order_of,
    space_of,
    spared,
)

__all__ = ["Adopted", "Entry", "LruIndex", "NoRoom", "Use", "Victim"]


class LruIndex:
    """Names with sizes, in the order of eviction, within `capacity` bytes and `most` objects.

    unit: sizes count in multiples of it; set it before the first object comes.
    watchers: each is called with the name of every object that is stored or leaves, in the same step; with what
        happened to it (queues.py); and with the owner that has stored it, or for which it was evicted.
    noted: called with the name, the number of its use and the depth of every object that is reserved or used.
    chains: the groups of its uses.
    get: the present object of a name, or None; does not count as a use.
    place: where uses end by themselves: a level. holds: stored objects stay until `unpin(…, UNSAVED)`.
    """

    def __init__(self, capacity: int, unit: int = 1, *, now: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.most: float = math.inf
        self.unit = unit
        self.place = 0
        self.holds = False
        self._now = now
        self.noted: Callable[[str, int, int], None] = lambda _name, _use, _depth: None
        self.watchers: list[Noted] = []
        self.used = 0  # bytes, reserved and present
        self._present: dict[str, Entry] = {}
        self.get = self._present.get
        self._reserved: dict[str, Reserved] = {}
        self._coming: dict[Use, dict[str, Reserved]] = {}  # the same by use: nothing here may walk all of them
        self._queues: dict[Hashable, Queue] = {}  # by owner, or by space for objects without an owner
        self.chains = Chains(now, self._used_by, self._move)
        self._restored = Use()
        self._shared = False  # whether any owner has a share
        self._filling = False  # between `begin_anew` and `begin_at`

    # --- lookups ------------------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return name in self._present

    def __len__(self) -> int:
        return len(self._present)

    def size(self, nbytes: int) -> int:
        """How many bytes an object of this length counts."""
        return -(-nbytes // self.unit) * self.unit

    @property
    def bytes(self) -> int:
        """Those of all present objects."""
        return self.used - sum([self.size(one.nbytes) for one in self._reserved.values()])

    @property
    def first_use(self) -> int:
        """No present object belongs to a use with a smaller number, except pinned ones."""
        numbers = (groups[0].number for groups in self.chains.of.values() if groups[0].number)
        return min([next(numbers, self.chains.latest + 1), *self.chains.waiting.values()])

    def _used_by(self, name: str) -> Use | None:
        if self._filling:  # a use that continued one now would be numbered before those that are still to come
            return None
        if (entry := self._present.get(name)) is not None:
            return None if entry.kept else entry.use
        return self._reserved[name].use if name in self._reserved else None

    def coldest(self, count: int) -> list[str]:
        """The names of the next objects to evict."""
        return [entry.name for entry in self._next_to_go(math.inf, 0, at_most=count)[0]]

    def names(self) -> list[str]:
        """The names of all present objects, in no order."""
        return list(self._present)

    def queues(self) -> list[Queue]:
        """Those of all owners that have objects or a share, and of all present engines."""
        return [queue for queue in self._queues.values() if not self._is_empty(queue)]

    def hottest_first(self) -> Iterator[Entry]:
        """Every present object, in the reverse order of eviction; pinned ones first.

        It may be read in several steps. Objects that are used, pinned or removed meanwhile may come twice, or never.
        """
        for line in [line for queue in self._queues.values() for line in queue.lines]:
            yield from line.aside.root_first()
        for use in reversed(list(self.chains.of)):
            groups = self.chains.of.get(use, ())[::-1]
            yield from heapq.merge(*map(UseGroup.root_first, groups), key=DEPTH)

    # --- owners -------------------------------------------------------------------------------------

    def claim(self, owner: Hashable, space: str, share: float) -> None:
        """Add an engine: it takes over its space's objects of no present engine, and its share is kept for it."""
        mine = self._queue(owner)
        mine.space, mine.share, mine.share_until, mine.present = space, share, math.inf, True
        for key, queue in list(self._queues.items()):
            if queue is not mine and not queue.present and queue.space == space and key is not None:
                mine.take_over(queue)
                del self._queues[key]
                for one in self._reserved.values():
                    one.queue = mine if one.queue is queue else one.queue
        while len(mine.lines) > MOST_LINES:
            self._merge(*heapq.nsmallest(2, mine.lines[1:], key=lambda line: len(line.groups)))
        self._shared = self._shared or share > 0

    def _merge(self, line: Line, into: Line) -> None:
        """Move all objects of a line to another one of its queue, where each keeps its place in the order."""
        for group in [*line.groups.values(), line.aside]:
            there = into.aside if group is line.aside else into.groups.setdefault(group.use, group)
            if there is group:
                group.line = into
                continue
            for entry in group.root_first():
                there.add(entry, entry.depth)
            if group is not line.aside:
                self.chains.forget(group)
        into.groups = OrderedDict(sorted(into.groups.items(), key=lambda item: item[1].number))
        line.queue.lines.remove(line)

    def disown(self, owner: Hashable) -> None:
        """Note that the engine has left: another one of its space may take over its objects. Its share ends later."""
        if (queue := self._queues.get(owner)) is not None:
            queue.present, queue.share_until = False, self._now() + HELD_S

    def kept(self, queue: Queue) -> int:
        """How many bytes are kept for this owner."""
        return int(queue.share * self.capacity) if self._now() < queue.share_until else 0

    def _queue(self, owner: Hashable, space: str = "") -> Queue:
        if owner not in self._queues:
            self._queues[owner] = Queue(owner, space)
        return self._queues[owner]

    def _is_empty(self, queue: Queue) -> bool:
        if queue.used or queue.objects or queue.present or self.kept(queue):
            return False
        return not any(queue is one.queue for one in self._reserved.values())  # an object may have no bytes

    def _drop_if_empty(self, queue: Queue) -> None:
        if self._is_empty(queue):
            self._queues.pop(queue.owner, None)

    # --- pins ---------------------------------------------------------------------------------------

    def pin(self, entry: Entry, why: int = PINNED) -> None:
        """Never evict this present object until `unpin` for the same reason."""
        assert entry.group is not None
        queue, depth = entry.group.line.queue, entry.depth
        if why & (UNSAVED | AWAITED) and not entry.kept and not entry.touched:
            why |= GUESSED
        if not entry.kept:
            self._leave_group(entry)
            queue.own.aside.add(entry, depth)
        if why == PINNED and not entry.kept & PINNED:
            queue.pinned += self.size(entry.nbytes)
            entry.kept &= ~GUESSED  # it stays with the engine that came first
        entry.kept |= why

    def unpin(self, entry: Entry, use: Use, why: int = PINNED) -> None:
        """End a pin. Unless the object is kept for another reason, it then counts as just used by `use`."""
        if entry.group is None or not entry.kept & why:
            return
        if why == PINNED:
            entry.group.line.queue.pinned -= self.size(entry.nbytes)
        entry.kept &= ~why
        if entry.kept in (0, GUESSED):
            guessed, entry.kept = bool(entry.kept), 0
            self._move(entry, self.chains.leading(use, entry.name), entry.depth, guessed=guessed)

    # --- coming -------------------------------------------------------------------------------------

    def reserve(
        self, name: str, nbytes: int, use: Use, depth: int = 0, *, patient: bool = True
    ) -> list[Victim] | NoRoom:
        """Make room for an object that `use` will write. Returns the evicted objects.

        The caller has checked that the name is absent.
        patient: wait for running writes of the same use that are deeper than the objects to evict.
        """
        assert name not in self._present, name
        assert name not in self._reserved, name
        size = self.size(nbytes)
        if size > self.capacity:
            return NoRoom.NEVER
        if use.parent is None and use.start and self.place not in use.placed and use not in self.chains.of:
            self.chains.guess(use, name, self._queues.get(use.owner), self._coming)
        leading = self.chains.leading(use, name)
        if self.place not in use.placed:
            self.chains.writes(use, name)
        if depth >= use.ends_at(self.place):
            return NoRoom.FULL
        needed, too_many = self.used + size - self.capacity, self._count + 1 - self.most
        going, enough = self._next_to_go(needed, too_many, leading, depth, more=size)
        if not enough:
            # Once written, objects of other uses may be evicted for this use, as long as it has none of its own.
            if self._reserved and (leading not in self.chains.of or self._deepest_coming(use) > depth):
                return NoRoom.LATER
            use.end_at(self.place, depth)
            return NoRoom.FULL
        if patient and going and going[-1].use is use and self._deepest_coming(use) > going[-1].depth:
            return NoRoom.LATER
        queue = self._queues.get(use.owner) or self._queue(use.owner, space_of(name))
        number = self.chains.number_of(leading)
        self._reserved[name] = one = Reserved(nbytes, use, queue, number, depth)
        self._coming.setdefault(use, {})[name] = one
        use.placed |= {self.place}  # its objects may all be held, so in no group
        self.used += size
        queue.used += size
        self.noted(name, number, depth)
        return self._drop_all(going, EVICTED, use.owner) if going else []

    def commit(self, name: str) -> list[Victim]:
        """Make a reserved object present. Returns objects evicted because the capacity shrank or its chain ended."""
        one = self._came(name)
        use, depth = one.use, one.depth
        entry, leading = Entry(name, one.nbytes), self.chains.leading(use, name)
        group = self.chains.group(leading, one.queue, at=one.queue.used_at)
        self._add(entry, group, depth)
        for noted in self.watchers:
            noted(name, STORED, use.owner)
        if one.number != group.number:  # other uses came meanwhile
            self.noted(name, group.number, depth)
        if depth >= use.ends_at(self.place):
            return self._drop_all([entry], EVICTED, use.owner)
        if self.holds:
            self.pin(entry, UNSAVED)
        if self.used <= self.capacity and self._count <= self.most:
            return []
        return self._drop_all(self._next_to_go(self.used - self.capacity, self._count - self.most)[0], EVICTED)

    def release(self, name: str) -> None:
        """Drop a reserved object: it will not be stored."""
        gone = self._came(name)
        self.used -= self.size(gone.nbytes)
        gone.queue.used -= self.size(gone.nbytes)
        for use in (gone.use, self.chains.heir(gone.use)):
            if use not in self._coming:
                self.chains.waiting.pop(use, None)
        self._drop_if_empty(gone.queue)

    def begin_anew(self) -> None:
        """Forget the numbers of uses. Call it when no object is left and the next ones have another index's numbers."""
        assert not self._count, self._count
        self._filling = True
        self.chains.latest = RESTORED

    def adopt(self, objects: Iterable[Adopted]) -> None:
        """Add objects found at start, by ascending numbers of their uses, before any use. Evicts nothing."""
        group, space = None, ""
        for number, depth, name, nbytes in objects:
            assert name not in self._present, name
            latest = self.chains.latest
            assert number >= latest, (number, latest)
            if group is None or number != latest or not (space and name.startswith(space)):
                use = Use() if group is None or number != latest else group.use
                self.chains.latest, part = number, space_of(name)
                group = self.chains.group(use, self._queue(nobody(part), part), number, FOUND_AT)
                space = f"{part}/" if part else ""
            size = -(-nbytes // self.unit) * self.unit
            self.used += size
            group.line.queue.used += size
            self._add(Entry(name, nbytes), group, depth)

    def begin_at(self, number: int) -> None:
        """Number new uses from here on, unless the latest number is higher: an earlier process has used those below."""
        self.chains.latest = max(self.chains.latest, number)
        self._filling = False

    # --- use and leaving ----------------------------------------------------------------------------

    def find(self, names: Sequence[str], use: Use) -> list[bool]:
        """For each name, whether it is present. The names count as used by `use`, as one chain from root to leaf."""
        entries = list(map(self.get, names))
        for depth, entry in enumerate(entries if use.counts else (), use.start):
            if entry is not None:
                self.touch_one(entry, use, depth)
        return [entry is not None for entry in entries]

    def touch_one(self, entry: Entry, use: Use, depth: int) -> None:
        """Note that `use` has just used a present object, at this depth of its chain. It keeps a known owner."""
        group = entry.group
        assert group is not None
        if entry.kept:
            if entry.kept & GUESSED:
                entry.kept &= ~GUESSED
                queue = self._leave_group(entry)
                self._give(entry, queue, use).own.aside.add(entry, depth)
            else:
                group.raise_to(entry, depth)
            return
        if group.use is not use:
            use = self.chains.leading(use, entry.name)
            group = entry.group
            assert group is not None
        if group.use is not use:
            self._move(entry, use, depth)
        elif group.raise_to(entry, depth):
            self.noted(entry.name, group.number, depth)

    def _move(self, entry: Entry, use: Use, depth: int, *, guessed: bool = False) -> None:
        """Take an object out of its group, and give it to a use."""
        known = entry.touched
        queue = self._leave_group(entry)
        if guessed or not known:
            queue = self._give(entry, queue, use)
        group = self.chains.group(use, queue)
        if guessed and not group.live:
            group.at = FOUND_AT
        group.add(entry, depth)
        self.noted(entry.name, group.number, depth)

    def _give(self, entry: Entry, queue: Queue, use: Use) -> Queue:
        """Give an object that was found at start to the engine that is the first to use it. Returns its queue."""
        mine = self._queues.get(use.owner)
        if mine is None or not mine.present or mine.space != space_of(entry.name):
            return queue
        size = self.size(entry.nbytes)
        for one, sign in ((queue, -1), (mine, 1)):
            one.used += sign * size
            one.objects += sign
        self._drop_if_empty(queue)
        return mine

    def forget(self, name: str, entry: Entry | None = None, why: str = GONE) -> bool:
        """Drop a present object; with `entry`, only if that is still the present one. Returns whether it did."""
        present = self._present.get(name)
        if present is None or (entry is not None and present is not entry):
            return False
        self._drop_all([present], why)
        return True

    def restore(self, victim: Victim) -> None:
        """Add an evicted object that could not be removed: it is present again, as the next to evict."""
        name, nbytes = victim.name, victim.nbytes
        assert name not in self._present, name
        assert name not in self._reserved, name
        space = space_of(name)
        queue = self._queue(nobody(space), space)
        self.used += self.size(nbytes)
        queue.used += self.size(nbytes)
        group = self.chains.group(self._restored, queue, RESTORED)
        self._add(Entry(name, nbytes), group, 0)  # among equal depths, the newest is evicted first

    def evict(self, nbytes: int, use: Use | None = None, depth: int = 0) -> list[Victim]:
        """Evict objects in order until at least nbytes are free, or no more may be evicted.

        use, depth: those of the write that needs the room. Without a use, all but pinned objects may be evicted.
        """
        return self._drop_all(self._next_to_go(nbytes, 0, use, depth)[0], EVICTED, None if use is None else use.owner)

    def set_bounds(self, capacity: int, most: float = math.inf, *, at_most: int | None = None) -> list[Victim]:
        """Change the bounds. Returns the evicted objects.

        at_most: evict no more objects than this, and lower the bounds only so far, so that no write has to evict the
            rest. Call it again until the bounds are reached.
        """
        pinned = [queue for queue in self._queues.values() if queue.pinned]
        aside = [line.aside for queue in pinned for line in queue.lines]
        if sum(queue.pinned for queue in pinned) > capacity or sum(group.live for group in aside) > most:
            use = Use()
            for group in aside:
                for entry in list(group.root_first()):
                    self.unpin(entry, use)
        left = self._drop_all(self._next_to_go(self.used - capacity, self._count - most, at_most=at_most)[0], EVICTED)
        partly = at_most is not None and len(left) == at_most
        self.capacity = max(capacity, self.used) if partly else capacity
        self.most = max(most, self._count) if partly else most
        return left

    # --- inside -------------------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        return len(self._present) + len(self._reserved)

    def _next_to_go(
        self,
        nbytes: float,
        count: float,
        use: Use | None = None,
        depth: int = 0,
        *,
        at_most: int | None = None,
        more: int = 0,
    ) -> tuple[list[Entry], bool]:
        """The objects to evict to free nbytes and `count` objects, at most `at_most`; and whether they are enough.

        If the write may not evict so many, all that it may. more: the bytes that the write adds.
        """
        if (nbytes <= 0 and count <= 0) or at_most == 0:
            return [], True
        own = None if use is None else self.chains.of.get(use)
        stop = (own[0].number, -depth) if own else None

        def first(
            uses: Iterable[Sequence[UseGroup]], objects_of: Callable[[UseGroup], Iterator[Entry]] = UseGroup.leaf_first
        ) -> tuple[list[Entry], bool]:
            going: list[Entry] = []
            left_bytes, left_count = nbytes, count
            for groups in uses:
                lines = map(objects_of, groups)
                for entry in next(lines) if len(groups) == 1 else heapq.merge(*lines, key=DEPTH, reverse=True):
                    if stop is not None and order_of(entry) >= stop:
                        return going, False
                    going.append(entry)
                    left_bytes -= self.size(entry.nbytes)
                    left_count -= 1
                    if (left_bytes <= 0 and left_count <= 0) or len(going) == at_most:
                        return going, True
            return going, False

        if use is None or not self._shared:
            return first(self.chains.of.values())
        mine = self._queues.get(use.owner) or Queue(use.owner)
        others = {queue: queue.used - self.kept(queue) for queue in self._queues.values() if queue is not mine}
        if mine.used + more <= self.kept(mine):  # it stays within its share
            going, enough = first(*spared(others, self.size))
            if enough:
                return going, True
        return first(*spared({mine: math.inf, **others}, self.size))

    def _deepest_coming(self, use: Use) -> int:
        """The largest depth of the objects that this use is writing; -1 if there are none."""
        return max((one.depth for one in self._coming.get(use, {}).values()), default=-1)

    def _came(self, name: str) -> Reserved:
        """End a reservation."""
        one = self._reserved.pop(name)
        coming = self._coming[one.use]
        del coming[name]
        if not coming:
            del self._coming[one.use]
        return one

    def _add(self, entry: Entry, group: UseGroup, depth: int) -> None:
        self._present[entry.name] = entry
        group.line.queue.objects += 1
        group.add(entry, depth)

    def _leave_group(self, entry: Entry) -> Queue:
        group = entry.group
        assert group is not None
        line = group.line
        queue = line.queue
        entry.group = None
        group.live -= 1
        if group is line.aside:
            queue.pinned -= self.size(entry.nbytes) if entry.kept & PINNED else 0
        elif not group.live:
            del line.groups[group.use]
            self.chains.forget(group)
        if line is not queue.own and not line.has_objects():
            queue.lines.remove(line)
        if len(group.entries) > SLACK + 2 * group.live:
            group.tidy()
        return queue

    def _drop_all(self, entries: Iterable[Entry], why: str, whose: Hashable = None) -> list[Victim]:
        victims = []
        for entry in entries:
            group, size = entry.group, self.size(entry.nbytes)
            assert group is not None
            del self._present[entry.name]
            queue = self._leave_group(entry)
            queue.used -= size
            queue.objects -= 1
            self.used -= size
            if why == EVICTED:
                group.use.end_at(self.place, entry.depth)
                queue.evicted[whose] += 1
            if not queue.used:
                self._drop_if_empty(queue)
            victims.append(Victim(entry.name, entry.nbytes))
            for noted in self.watchers:
                noted(entry.name, why, whose)
        return victims

    def __repr__(self) -> str:
        return f"LruIndex({len(self)} objects, {self.used} of {self.capacity} bytes, {len(self._reserved)} reserved)"
