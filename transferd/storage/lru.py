"""An index of all objects: their total size, and the order of their eviction. It only decides, and moves no bytes.

An object is *reserved* while it is being written and *present* from its commit on. Reserved bytes
count, so that objects being written never overfill the store; they cannot be evicted, so the bytes
in `used` may stay above a capacity that was lowered until the current writes have ended.

    (absent) --reserve--> reserved --commit--> present --evict, forget--> (absent)
                          reserved --release--> (absent)

The order of eviction is by *use*, then by depth. A `Use` stands for one task on all its ranks, or one
lookup. An object belongs to the last use that stored it, loaded it or looked it up, at its depth in
that use's chain of blocks. The oldest use is evicted first, and within a use the deepest objects,
whatever their rank. An engine can use a block only together with all blocks before it, on every rank,
so a chain must shrink from its leaf.

A write may evict only what precedes it in this order: earlier uses, and deeper objects of its own use.
So a task never evicts blocks that it stored or found to make room for its own tail. An object that is being
written cannot be evicted yet. If it is deeper than the object that would be evicted instead, a write of the
same use waits for it.

Objects have owners (shares.py): there is one queue of uses for each, and eviction takes from all of them what is
next. It takes nothing from an owner that would fall below its share by that, unless that owner itself writes; and an
owner below its share takes from others first. A *pinned* object is in no group until it is unpinned. If the capacity
is lowered below what is pinned, nothing stays pinned.

Once an object of a use was evicted, or found no room, deeper objects are useless: the chain *ends* there
(`Use.ends_at`). The use writes nothing more from there on, and an object that it is still writing there is
removed as soon as it is stored. So if the store is too small for a chain, all ranks keep the same part of it:
the root. (ADR 28.)

Properties, which the stateful test checks: `used` is the sum of all sizes, reserved and present;
`reserve` never lets it exceed the capacity; eviction follows the order above, and takes no more than
needed.

One owner changes an index, on the event loop. No method awaits, so each is one step.
"""

from __future__ import annotations

import enum
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from transferd.storage.queues import ADOPTED, RESTORED, SLACK, Entry, Queue, Use, UseGroup
from transferd.storage.shares import Account, nobody, space_of

__all__ = ["Entry", "LruIndex", "NoRoom", "Use", "Victim"]


class NoRoom(enum.Enum):
    """Why `reserve` made no room. Nothing has changed."""

    LATER = "running writes hold the room, or what should go first: ask again when one has ended"
    FULL = (
        "all that is there is nearer the root of the write's own chain, or was used after it, or is pinned, or is "
        "within another owner's share; or the chain has ended"
    )


class Victim(NamedTuple):
    """An object that has left the index. The caller removes its bytes."""

    name: str
    nbytes: int


class LruIndex:
    """Names with sizes, in the order of eviction, within `capacity` bytes.

    left: called with the name of every object that stops being present, in the same step. get: the present object of a
    name, or None; that does not count as a use.
    """

    def __init__(self, capacity: int, now: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self._now = now
        self.left: Callable[[str], None] | None = None
        self.used = 0  # bytes, reserved and present
        self.bytes = 0  # bytes, present
        self._present: dict[str, Entry] = {}
        self.get = self._present.get
        self._reserved: dict[str, tuple[int, Use, Queue]] = {}  # nbytes, the use that writes it, whose it will be
        self._coming: dict[Use, dict[str, int]] = {}  # the names that each use is writing, with their depths
        self._queues: dict[Hashable, Queue] = {}  # by owner; of nobody's objects, by space
        self._groups: dict[Use, list[UseGroup]] = {}  # of each use, one for each queue in which it has objects
        self._restored = Use()
        self._number = ADOPTED
        self._shared = False  # whether any owner has a share

    # --- lookups ------------------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return name in self._present

    def __len__(self) -> int:
        return len(self._present)

    def names(self) -> list[str]:
        """The names of all present objects."""
        return list(self._present)

    def accounts(self) -> list[Account]:
        """Whose objects there are, and those of present engines without objects."""
        return [queue.account for queue in self._queues.values()]

    def hottest_first(self) -> Iterator[tuple[str, Entry]]:
        """Every present object, in the reverse order of eviction; pinned ones first."""
        for queue in self._queues.values():
            for entry in queue.pinned.root_first():
                if entry.group is queue.pinned:
                    yield entry.name, entry
        lines = [self._hottest_of(queue) for queue in self._queues.values()]
        for entry in heapq.merge(*lines, key=_heat):
            yield entry.name, entry

    def _hottest_of(self, queue: Queue) -> Iterator[Entry]:
        for group in reversed(queue.groups.values()):
            for entry in group.root_first():
                if entry.group is group:
                    yield entry

    # --- owners -------------------------------------------------------------------------------------

    def claim(self, owner: Hashable, space: str, share: float) -> None:
        """An engine whose objects lie in this space is there: take over what is nobody's there, and keep its share."""
        mine = self._queue(owner)
        account = mine.account
        account.space, account.share, account.present = space, share, True
        for key, queue in list(self._queues.items()):
            other = queue.account
            if other is not account and not other.present and other.space == space and key is not None:
                self._take_over(mine, queue)
                del self._queues[key]
        self._note_shares()

    def disown(self, owner: Hashable) -> None:
        """The engine has left: another engine of its space may take its objects over. Its share stays."""
        if (queue := self._queues.get(owner)) is not None:
            queue.account.present = False

    def keep_no_share(self, owner: Hashable) -> None:
        """The engine has been gone for long: keep nothing for it any more, unless it is back."""
        queue = self._queues.get(owner)
        if queue is not None and not queue.account.present:
            queue.account.share = 0.0
            self._drop_if_empty(queue)
            self._note_shares()

    def _note_shares(self) -> None:
        self._shared = any(queue.account.share for queue in self._queues.values())

    def _queue(self, owner: Hashable, space: str = "") -> Queue:
        queue = self._queues.get(owner)
        if queue is None:
            queue = self._queues[owner] = Queue(Account(owner, space))
        return queue

    def _take_over(self, mine: Queue, theirs: Queue) -> None:
        """Move all objects of a queue to another one, where each keeps its place in the order."""
        account, other = mine.account, theirs.account
        for field in ("used", "pinned", "objects"):
            setattr(account, field, getattr(account, field) + getattr(other, field))
            setattr(other, field, 0)
        for group in [*theirs.groups.values(), theirs.pinned]:
            into = mine.pinned if group is theirs.pinned else mine.groups.get(group.use)
            if into is None:
                group.queue = mine
                mine.groups[group.use] = group
                continue
            for entry in group.root_first():
                if entry.group is group:
                    into.add(entry, entry.depth)
            if group is not theirs.pinned:
                self._forget_group(group)
        theirs.groups = OrderedDict()
        mine.groups = OrderedDict(sorted(mine.groups.items(), key=lambda item: item[1].number))
        for name, (nbytes, use, queue) in self._reserved.items():
            if queue is theirs:
                self._reserved[name] = nbytes, use, mine

    def _drop_if_empty(self, queue: Queue) -> None:
        account = queue.account
        if not (account.used or account.objects or account.present or account.share):
            self._queues.pop(account.owner, None)

    # --- pins ---------------------------------------------------------------------------------------

    def pin(self, entry: Entry) -> None:
        """Never evict this present object until `unpin`."""
        if not entry.pinned:
            assert entry.group is not None
            queue, depth = entry.group.queue, entry.depth
            self._leave_group(entry)
            queue.pinned.add(entry, depth)
            queue.account.pinned += entry.nbytes

    def unpin(self, entry: Entry, use: Use) -> None:
        """From now on it is like any other object that `use` has just used."""
        if entry.pinned:
            depth, queue = entry.depth, self._leave_group(entry)
            self._group(use, queue).add(entry, depth)

    # --- coming -------------------------------------------------------------------------------------

    def reserve(
        self, name: str, nbytes: int, use: Use, depth: int = 0, *, patient: bool = True
    ) -> list[Victim] | NoRoom:
        """Make room for an object that `use` will write. Returns the evicted objects.

        The caller has checked that the name is absent and that nbytes does not exceed the capacity.
        patient: wait for running writes of the same use that are deeper than the objects to evict.
        """
        assert name not in self._present, name
        assert name not in self._reserved, name
        assert nbytes <= self.capacity, (nbytes, self.capacity)
        if depth >= use.ends_at:
            return NoRoom.FULL
        needed = self.used + nbytes - self.capacity
        going = self._next_to_go(needed, use, depth, nbytes)
        if sum(entry.nbytes for entry in going) < needed:
            # Once written, objects of other uses may be evicted for this use, as long as it has none of its own.
            if self._reserved and (use not in self._groups or self._deepest_coming(use) > depth):
                return NoRoom.LATER
            use.end_at(depth)
            return NoRoom.FULL
        last = going[-1] if going else None
        own = last is not None and last.group is not None and last.group.use is use
        if patient and own and last is not None and self._deepest_coming(use) > last.depth:
            return NoRoom.LATER
        queue = self._queue(use.owner, space_of(name))
        self._coming.setdefault(use, {})[name] = depth
        self._reserved[name] = nbytes, use, queue
        self.used += nbytes
        queue.account.used += nbytes
        return self._evict_all(going)

    def commit(self, name: str) -> list[Victim]:
        """The reserved object is stored. Returns what to evict if the capacity shrank or its chain ended meanwhile."""
        nbytes, use, queue, depth = self._came(name)
        entry = Entry(name, nbytes)
        self._add(entry, self._group(use, queue), depth)
        if depth >= use.ends_at:
            return self._evict_all([entry])
        return self.evict(self.used - self.capacity)

    def release(self, name: str) -> None:
        """The reserved object will not be stored."""
        nbytes, _, queue, _ = self._came(name)
        self.used -= nbytes
        queue.account.used -= nbytes
        self._drop_if_empty(queue)

    def adopt(self, objects: Sequence[tuple[str, int]]) -> list[Victim]:
        """Add the objects found at start, in the order of eviction, before any use. Returns what to evict."""
        use = Use()
        for depth, (name, nbytes) in enumerate(reversed(objects)):
            assert name not in self._present, name
            self.used += nbytes
            space = space_of(name)
            queue = self._queue(nobody(space), space)
            queue.account.used += nbytes
            self._add(Entry(name, nbytes), self._group(use, queue, ADOPTED), depth)
        return self.evict(self.used - self.capacity)

    # --- use and leaving ----------------------------------------------------------------------------

    def find(self, names: Sequence[str], use: Use) -> list[bool]:
        """For each name, whether it is present. The names count as used by `use`, as one chain from root to leaf."""
        found = [name in self._present for name in names]
        if use.counts:
            self.touch(names, use)
        return found

    def touch(self, names: Sequence[str], use: Use | None = None) -> None:
        """Note that `use` has just used these (None: a new use), as one chain from root to leaf.

        Absent names are skipped.
        """
        use = Use() if use is None else use
        for depth, name in enumerate(names):
            entry = self._present.get(name)
            if entry is not None:
                self.touch_one(entry, use, depth)

    def touch_one(self, entry: Entry, use: Use, depth: int) -> None:
        """Note that `use` has just used a present object. depth: in its chain. It stays its owner's."""
        group = entry.group
        assert group is not None
        queue = group.queue
        if group is queue.pinned or group.use is use:
            group.raise_to(entry, depth)
        else:
            self._leave_group(entry)
            self._group(use, queue).add(entry, depth)

    def forget(self, name: str, entry: Entry | None = None) -> bool:
        """Drop a present object; with `entry`, only if that is still the present one. False: nothing was dropped."""
        present = self._present.get(name)
        if present is None or (entry is not None and present is not entry):
            return False
        self._drop_all([present])
        return True

    def restore(self, name: str, nbytes: int) -> None:
        """Add an evicted object that could not be removed: it is present again, as the next to evict."""
        assert name not in self._present, name
        assert name not in self._reserved, name
        space = space_of(name)
        queue = self._queue(nobody(space), space)
        self.used += nbytes
        queue.account.used += nbytes
        group = self._group(self._restored, queue, RESTORED)
        self._add(Entry(name, nbytes), group, 0)  # among equal depths, the newest is evicted first

    def evict(self, nbytes: int, use: Use | None = None, depth: int = 0) -> list[Victim]:
        """Evict objects in order until at least nbytes are free, or no more may be evicted.

        use, depth: of the write that needs the room; None: any object may be evicted, unless it is pinned.
        """
        return self._evict_all(self._next_to_go(nbytes, use, depth))

    def set_capacity(self, capacity: int) -> list[Victim]:
        """Change the capacity. Returns the evicted objects."""
        self.capacity = capacity
        if sum(queue.account.pinned for queue in self._queues.values()) > capacity:
            use = Use()
            for queue in self._queues.values():
                for entry in list(queue.pinned.root_first()):
                    self.unpin(entry, use)
        return self.evict(self.used - capacity)

    # --- inside -------------------------------------------------------------------------------------

    def _next_to_go(self, nbytes: int, use: Use | None, depth: int, more: int = 0) -> list[Entry]:
        """The objects to evict to free nbytes, or all that may be evicted for this write if that is less.

        more: the bytes that the write adds.
        """
        if nbytes <= 0:
            return []
        if use is None or not self._shared:
            return self._first([self._line(queue) for queue in self._queues.values()], nbytes, use, depth)
        mine = self._queue(use.owner)
        others = [queue for queue in self._queues.values() if queue is not mine]
        if mine.account.below_with(more, self.capacity):
            going = self._first([self._spare(queue) for queue in others], nbytes, use, depth)
            if sum(entry.nbytes for entry in going) >= nbytes:
                return going
        return self._first([self._line(mine), *(self._spare(queue) for queue in others)], nbytes, use, depth)

    def _first(self, lines: Sequence[Iterator[Entry]], nbytes: int, use: Use | None, depth: int) -> list[Entry]:
        """The first objects of several lines together, up to what `use` may evict."""
        own = None if use is None else self._groups.get(use)
        stop = (own[0].number, -depth) if own else None
        going: list[Entry] = []
        for entry in lines[0] if len(lines) == 1 else heapq.merge(*lines, key=_order):
            if stop is not None and _order(entry) >= stop:
                break
            going.append(entry)
            nbytes -= entry.nbytes
            if nbytes <= 0:
                break
        return going

    def _line(self, queue: Queue) -> Iterator[Entry]:
        """The objects of a queue, in the order of eviction."""
        for group in queue.groups.values():
            for entry in reversed(group.root_first()):
                if entry.group is group:
                    yield entry

    def _spare(self, queue: Queue) -> Iterator[Entry]:
        """The same, as far as others may take them."""
        spare = queue.account.to_spare(self.capacity)
        if spare <= 0:
            return
        for entry in self._line(queue):
            spare -= entry.nbytes
            if spare < 0:
                return
            yield entry

    def _deepest_coming(self, use: Use) -> int:
        """The largest depth of the objects that this use is writing; -1 if there are none."""
        return max(self._coming.get(use, {}).values(), default=-1)

    def _came(self, name: str) -> tuple[int, Use, Queue, int]:
        nbytes, use, queue = self._reserved.pop(name)
        coming = self._coming[use]
        depth = coming.pop(name)
        if not coming:
            del self._coming[use]
        return nbytes, use, queue, depth

    def _group(self, use: Use, queue: Queue, number: int | None = None) -> UseGroup:
        """The group of a use in a queue. A use without objects gets a new place, the last in the order.

        number: another place.
        """
        group = queue.groups.get(use)
        if group is not None:
            return group
        elsewhere = self._groups.setdefault(use, [])
        if elsewhere:
            number = elsewhere[0].number
        elif number is None:
            number = self._number = self._number + 1
        group = queue.groups[use] = UseGroup(use, number, queue, self._now())
        elsewhere.append(group)
        if number < self._number:  # rare: a use touches objects of several owners, or an object could not be removed
            for other in [other for other in queue.groups.values() if other.number > number]:
                queue.groups.move_to_end(other.use)
        return group

    def _add(self, entry: Entry, group: UseGroup, depth: int) -> None:
        self._present[entry.name] = entry
        self.bytes += entry.nbytes
        group.queue.account.objects += 1
        group.add(entry, depth)

    def _leave_group(self, entry: Entry) -> Queue:
        group = entry.group
        assert group is not None
        queue = group.queue
        entry.group = None
        group.live -= 1
        if group is queue.pinned:
            queue.account.pinned -= entry.nbytes
        elif not group.live:
            del queue.groups[group.use]
            self._forget_group(group)
            return queue
        if len(group.entries) > SLACK + 2 * group.live:
            group.tidy()
        return queue

    def _forget_group(self, group: UseGroup) -> None:
        groups = self._groups[group.use]
        groups.remove(group)
        if not groups:
            del self._groups[group.use]

    def _evict_all(self, entries: Sequence[Entry]) -> list[Victim]:
        if not entries:
            return []
        for entry in entries:
            assert entry.group is not None
            entry.group.use.end_at(entry.depth)
        return self._drop_all(entries)

    def _drop_all(self, entries: Iterable[Entry]) -> list[Victim]:
        victims = []
        for entry in entries:
            del self._present[entry.name]
            queue = self._leave_group(entry)
            account = queue.account
            account.used -= entry.nbytes
            account.objects -= 1
            self.bytes -= entry.nbytes
            self.used -= entry.nbytes
            if not account.used:
                self._drop_if_empty(queue)
            victims.append(Victim(entry.name, entry.nbytes))
            if self.left is not None:
                self.left(entry.name)
        return victims

    def __repr__(self) -> str:
        return f"LruIndex({len(self)} objects, {self.used} of {self.capacity} bytes, {len(self._reserved)} reserved)"


def _order(entry: Entry) -> tuple[int, int]:
    """The place of an object in the order of eviction."""
    assert entry.group is not None
    return entry.group.number, -entry.depth


def _heat(entry: Entry) -> tuple[int, int]:
    assert entry.group is not None
    return -entry.group.number, entry.depth
