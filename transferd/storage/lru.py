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

Once an object of a use was evicted, or found no room, deeper objects are useless: the chain *ends* there
(`Use.ends_at`). The use writes nothing more from there on, and an object that it is still writing there is
removed as soon as it is stored. So if the store is too small for a chain, all ranks keep the same part of it:
the root. (ADR 28.)

A chain may grow over several tasks, each of which names only its new blocks, from block `start` of the sequence on.
Then the new use takes over the objects of the use that ended there, so that the root is not older than the tail. It
does so only if that is clear: of the latest uses in the same space of names, exactly one ends there. (ADR 86.)

Properties, which the stateful test checks: `used` is the sum of all sizes, reserved and present;
`reserve` never lets it exceed the capacity; eviction follows the order above, and takes no more than
needed.

A size counts in whole `unit`s, because a disk allocates no less. Besides bytes, the number of objects has a
bound (`most`), because a file system may run out of inodes.

Each use has a number, in the order of uses. `noted` receives the number and depth of every object that is
reserved or used, so that somebody else can keep the order (journal.py); `adopt` takes it back.

One owner changes an index, on the event loop. No method awaits, so each is one step.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

RECENT = 32  # how many of the latest uses a chain may continue
SLACK = 64  # a group's list may hold twice as many entries as the group has live ones, plus this many


class Use:
    """One task on all its ranks, or one lookup: objects that belong together in the order of eviction. Opaque.

    ends_at: the smallest depth at which one of its objects was evicted or found no room. shrunk: whether that happened.
    counts: False for a lookup that is no use: the order of eviction stays as it is. start: the depth of the first block
    that it names; depths count from the beginning of the sequence.
    """

    ends_at = math.inf
    shrunk = False

    def __init__(self, *, counts: bool = True, start: int = 0) -> None:
        self.counts = counts
        self.start = start

    def end_at(self, depth: int) -> None:
        self.ends_at = min(self.ends_at, depth)
        self.shrunk = True


class NoRoom(enum.Enum):
    """Why `reserve` made no room. Nothing has changed."""

    LATER = "running writes hold the room, or what should go first: ask again when one has ended"
    FULL = "all that is there is nearer the root of the write's own chain, or was used after it, or the chain has ended"


class Victim(NamedTuple):
    """An object that has left the index. The caller removes its bytes."""

    name: str
    nbytes: int


class Adopted(NamedTuple):
    """An object that was found at start. use: the number of its use."""

    use: int
    depth: int
    name: str
    nbytes: int


class Entry:
    """One present object. A name that leaves the index and returns gets a new Entry, so identity tells them apart."""

    __slots__ = ("depth", "group", "name", "nbytes")

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.depth = 0
        self.group: _UseGroup | None = None  # None once it has left

    def __repr__(self) -> str:
        return f"Entry({self.nbytes} bytes)"


_RESTORED = 0  # the number of the group that comes before every use


class _UseGroup:
    """The objects of one use. `number`: its place in the order of uses.

    A use that continues a chain takes over the group. `entries` may contain objects that have moved to another group.
    They are skipped, and dropped before they outnumber the others. The list is sorted only when its order is needed.
    """

    __slots__ = ("ends", "entries", "live", "number", "sorted", "use")

    def __init__(self, use: Use, number: int) -> None:
        self.use = use
        self.number = number
        self.entries: list[Entry] = []
        self.live = 0
        self.sorted = True
        self.ends = 0  # behind the deepest block that it has had, or that found no room

    def add(self, entry: Entry, depth: int) -> None:
        entry.group, entry.depth = self, depth
        self.entries.append(entry)
        self.ends = max(self.ends, depth + 1)
        self.live += 1
        self.sorted = False

    def raise_to(self, entry: Entry, depth: int) -> bool:
        """Note that the same use used an entry again: the smaller depth counts. Returns whether it changed."""
        if depth >= entry.depth:
            return False
        entry.depth = depth
        self.sorted = False
        return True

    def root_first(self) -> list[Entry]:
        """The entries, root first. Some may have moved to another group, but not the last one. Do not change it."""
        if not self.sorted:
            self.tidy()
            self.entries.sort(key=_depth)
            self.sorted = True
        while self.entries and self.entries[-1].group is not self:
            self.entries.pop()
        return self.entries

    def tidy(self) -> None:
        """Drop the entries that have moved to another group."""
        # An entry that left the group and came back is in the list twice.
        self.entries = list(dict.fromkeys(entry for entry in self.entries if entry.group is self))


def _space(name: str) -> str:
    """The part of a name that all blocks of a sequence share."""
    return name.rsplit("/", 2)[0] if "/" in name else ""


def _depth(entry: Entry) -> int:
    return entry.depth


class LruIndex:
    """Names with sizes, in the order of eviction, within `capacity` bytes and `most` objects.

    unit: sizes count in multiples of it; set it before the first object comes. left: called with the name of every
    object that stops being present, in the same step. noted: called with the name, the number of its use and the depth
    of every object that is reserved or used. renumbered: called with the old and the new number of a use that was
    continued. get: the present object of a name, or None; that does not count as a use.
    """

    def __init__(self, capacity: int, unit: int = 1) -> None:
        self.capacity = capacity
        self.most: float = math.inf
        self.unit = unit
        self.left: Callable[[str], None] | None = None
        self.noted: Callable[[str, int, int], None] | None = None
        self.renumbered: Callable[[int, int], None] | None = None
        self.used = 0  # bytes, reserved and present
        self.bytes = 0  # bytes, present
        self._present: dict[str, Entry] = {}
        self.get = self._present.get
        self._reserved: dict[str, tuple[int, Use, int]] = {}  # nbytes, the use that writes it, the number noted for it
        self._coming: dict[Use, dict[str, int]] = {}  # the names that each use is writing, with their depths
        self._groups: OrderedDict[Use, _UseGroup] = OrderedDict()  # in the order of eviction; none is empty
        self._restored = Use()
        self._number = _RESTORED  # of the latest use
        self._numbers: dict[Use, int] = {}  # of uses that have no group yet

    # --- lookups ------------------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return name in self._present

    def __len__(self) -> int:
        return len(self._present)

    def size(self, nbytes: int) -> int:
        """How many bytes an object of this length counts."""
        return -(-nbytes // self.unit) * self.unit

    @property
    def first_use(self) -> int:
        """No present object belongs to a use with a smaller number."""
        first = next((group.number for group in self._groups.values() if group.number), self._number + 1)
        return min([first, *self._numbers.values()])

    def hottest_first(self) -> Iterator[tuple[str, Entry]]:
        """Every present object, in the reverse order of eviction."""
        for group in reversed(self._groups.values()):
            for entry in group.root_first():
                if entry.group is group:
                    yield entry.name, entry

    def coldest(self, count: int) -> list[str]:
        """The names of the next objects to evict."""
        return [entry.name for entry in self._next_to_go(math.inf, 0, at_most=count)]

    def names(self) -> list[str]:
        """The names of all present objects, in no order."""
        return list(self._present)

    # --- coming -------------------------------------------------------------------------------------

    def reserve(
        self, name: str, nbytes: int, use: Use, depth: int = 0, *, patient: bool = True
    ) -> list[Victim] | NoRoom:
        """Make room for an object that `use` will write. Returns the evicted objects.

        The caller has checked that the name is absent and that its size does not exceed the capacity.
        patient: wait for running writes of the same use that are deeper than the objects to evict.
        """
        assert name not in self._present, name
        assert name not in self._reserved, name
        size = self.size(nbytes)
        assert size <= self.capacity, (nbytes, self.capacity)
        if use.start and use not in self._groups and use not in self._numbers:
            self._continue(use, name)
        if depth >= use.ends_at:
            return NoRoom.FULL
        needed, too_many = self.used + size - self.capacity, self._count + 1 - self.most
        going = self._next_to_go(needed, too_many, use, depth)
        if len(going) < too_many or sum(self.size(entry.nbytes) for entry in going) < needed:
            # Once written, objects of other uses may be evicted for this use, as long as it has none of its own.
            if use not in self._groups or self._deepest_coming(use) > depth:
                return NoRoom.LATER
            use.end_at(depth)
            self._groups[use].ends = max(self._groups[use].ends, depth + 1)
            return NoRoom.FULL
        own = self._groups.get(use)
        if patient and going and going[-1].group is own and self._deepest_coming(use) > going[-1].depth:
            return NoRoom.LATER
        self._coming.setdefault(use, {})[name] = depth
        self._reserved[name] = nbytes, use, (number := self._number_of(use))
        self.used += size
        if self.noted is not None:
            self.noted(name, number, depth)
        return self._evict_all(going)

    def commit(self, name: str) -> list[Victim]:
        """The reserved object is stored. Returns what to evict if the capacity shrank or its chain ended meanwhile."""
        nbytes, use, depth, number = self._came(name)
        entry, group = Entry(name, nbytes), self._group(use)
        self._add(entry, group, depth)
        if number != group.number and self.noted is not None:  # other uses came meanwhile
            self.noted(name, group.number, depth)
        if depth >= use.ends_at:
            return self._evict_all([entry])
        return self._evict_all(self._next_to_go(self.used - self.capacity, self._count - self.most))

    def release(self, name: str) -> None:
        """The reserved object will not be stored."""
        nbytes, use, _, _ = self._came(name)
        self.used -= self.size(nbytes)
        if use not in self._coming:
            self._numbers.pop(use, None)

    def adopt(self, objects: Iterable[Adopted]) -> None:
        """Add objects found at start, by ascending numbers of their uses, before any use. Evicts nothing."""
        group: _UseGroup | None = None
        for number, depth, name, nbytes in objects:
            assert name not in self._present, name
            assert number >= self._number, (number, self._number)
            if group is None or group.number != number:
                use = Use()
                self._number = number
                group = self._groups[use] = _UseGroup(use, number)
            self.used += self.size(nbytes)
            self._add(Entry(name, nbytes), group, depth)

    def begin_at(self, number: int) -> None:
        """Number new uses from here on, if that is higher than the latest one: the numbers of a life before this."""
        self._number = max(self._number, number)

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
        group: _UseGroup | None = None
        for depth, name in enumerate(names, 0 if use is None else use.start):
            entry = self._present.get(name)
            if entry is not None:
                group = group or self._group(Use() if use is None else use)
                self._join_group(entry, group, depth)

    def touch_one(self, entry: Entry, use: Use, depth: int) -> None:
        """Note that `use` has just used a present object. depth: in its chain."""
        self._join_group(entry, self._group(use), depth)

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
        group = self._groups.get(self._restored)
        if group is None:
            group = self._groups[self._restored] = _UseGroup(self._restored, _RESTORED)
            self._groups.move_to_end(self._restored, last=False)
        self.used += self.size(nbytes)
        self._add(Entry(name, nbytes), group, 0)  # among equal depths, the newest is evicted first

    def evict(self, nbytes: int, use: Use | None = None, depth: int = 0) -> list[Victim]:
        """Evict objects in order until at least nbytes are free, or no more may be evicted.

        use, depth: of the write that needs the room; None: any object may be evicted.
        """
        return self._evict_all(self._next_to_go(nbytes, 0, use, depth))

    def set_bounds(self, capacity: int, most: float = math.inf, *, at_most: int | None = None) -> list[Victim]:
        """Change the bounds. Returns the evicted objects.

        at_most: evict no more objects than this; then the bounds come down only that far, so that a write need not
        evict the rest. Call it again until they are there.
        """
        going = self._next_to_go(self.used - capacity, self._count - most, at_most=at_most)
        left = self._evict_all(going)
        partly = at_most is not None and len(going) == at_most
        self.capacity = max(capacity, self.used) if partly else capacity
        self.most = max(most, self._count) if partly else most
        return left

    # --- inside -------------------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        return len(self._present) + len(self._reserved)

    def _next_to_go(
        self, nbytes: float, count: float, use: Use | None = None, depth: int = 0, *, at_most: int | None = None
    ) -> list[Entry]:
        """The objects to evict to free nbytes and `count` objects, but no more than `at_most`.

        If that is more than may be evicted for this write, all that may.
        """
        going: list[Entry] = []
        if (nbytes <= 0 and count <= 0) or at_most == 0:
            return going
        own = None if use is None else self._groups.get(use)
        for group in self._groups.values():
            for entry in reversed(group.root_first()):
                if entry.group is not group:
                    continue
                if group is own and entry.depth <= depth:
                    break
                going.append(entry)
                nbytes -= self.size(entry.nbytes)
                count -= 1
                if (nbytes <= 0 and count <= 0) or len(going) == at_most:
                    return going
            if group is own:
                break
        return going

    def _deepest_coming(self, use: Use) -> int:
        """The largest depth of the objects that this use is writing; -1 if there are none."""
        return max(self._coming.get(use, {}).values(), default=-1)

    def _came(self, name: str) -> tuple[int, Use, int, int]:
        nbytes, use, number = self._reserved.pop(name)
        coming = self._coming[use]
        depth = coming.pop(name)
        if not coming:
            del self._coming[use]
        return nbytes, use, depth, number

    def _number_of(self, use: Use) -> int:
        """The number of a use that is writing."""
        group = self._groups.get(use)
        if group is not None:
            return group.number
        if use not in self._numbers:
            self._number += 1
            self._numbers[use] = self._number
        return self._numbers[use]

    def _group(self, use: Use) -> _UseGroup:
        """The group of a use. A use without objects gets a new group, the last in the order."""
        group = self._groups.get(use)
        if group is None:
            if self._numbers.pop(use, 0) != self._number:
                self._number += 1
            group = self._groups[use] = _UseGroup(use, self._number)
        return group

    def _continue(self, use: Use, name: str) -> None:
        """Let a use that is about to write this name take over the chain that it continues, if that is clear."""
        space, latest = _space(name), itertools.islice(reversed(self._groups.values()), RECENT)
        ending = [
            group
            for group in latest
            if group.ends == use.start and group.use not in self._coming and _space(group.entries[0].name) == space
        ]
        if len(ending) != 1 or not ending[0].number:
            return
        [group] = ending
        del self._groups[group.use]
        self._number += 1
        if self.renumbered is not None:
            self.renumbered(group.number, self._number)
        group.use, group.number = use, self._number
        self._groups[use] = group

    def _add(self, entry: Entry, group: _UseGroup, depth: int) -> None:
        self._present[entry.name] = entry
        self.bytes += self.size(entry.nbytes)
        group.add(entry, depth)

    def _join_group(self, entry: Entry, group: _UseGroup, depth: int) -> None:
        if entry.group is group:
            if not group.raise_to(entry, depth):
                return
        else:
            self._leave_group(entry)
            group.add(entry, depth)
        if self.noted is not None:
            self.noted(entry.name, group.number, depth)

    def _leave_group(self, entry: Entry) -> None:
        group = entry.group
        assert group is not None
        entry.group = None
        group.live -= 1
        if not group.live:
            del self._groups[group.use]
        elif len(group.entries) > SLACK + 2 * group.live:
            group.tidy()

    def _evict_all(self, entries: Sequence[Entry]) -> list[Victim]:
        if not entries:
            return []
        for entry in entries:
            assert entry.group is not None
            entry.group.use.end_at(entry.depth)
        return self._drop_all(entries)

    def _drop_all(self, entries: Sequence[Entry]) -> list[Victim]:
        for entry in entries:
            del self._present[entry.name]
            self._leave_group(entry)
            self.bytes -= self.size(entry.nbytes)
            self.used -= self.size(entry.nbytes)
            if self.left is not None:
                self.left(entry.name)
        return [Victim(entry.name, entry.nbytes) for entry in entries]

    def __repr__(self) -> str:
        return f"LruIndex({len(self)} objects, {self.used} of {self.capacity} bytes, {len(self._reserved)} reserved)"
