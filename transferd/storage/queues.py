"""The order in which objects leave a store: a queue for each owner, in it a group for each use, in it objects by depth.

lru.py merges the queues and decides about their objects (docs/adr/0130).

An *owner* is an engine. An object belongs to the engine that stored it. Objects that were found at start, or belong to
an engine that has left, are taken over by the next engine with objects in the same *space* (model and layout). One that
was found at start goes on to the engine of that space that is the first to use it.

A *share* is soft. Below it, an owner loses no object to another one; above it, its objects are evicted like all others.
All owners may use its unused part. The share of an engine that has left stays for a while, because engines restart.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import msgspec

SLACK = 64  # a group's list may hold twice as many entries as the group has live ones, plus this many
MOST_LINES = 16  # of a queue
RECENT = 32  # how many of the latest uses a chain may continue
RESTORED = 0  # the number of the group that comes before every use
HELD_S = 600.0  # how long the share of an engine that has left is kept
# What happens to an object in an index, as reports name it.
STORED, EVICTED, PURGED, DAMAGED, GONE = "stored", "evicted", "purged", "damaged", "gone"
_NUMBER, _USE, DEPTH = map(operator.attrgetter, ("number", "use", "depth"))
FOUND_AT = -math.inf  # the time of the uses of objects found at start, which is unknown


Noted = Callable[[str, str, Hashable], None]
"""noted(name, what, whose): an object was stored by, or has left for, this owner. what: STORED … GONE."""


def departures(left: Callable[[str], object]) -> Noted:
    """Calls `left` with the name of each object that leaves."""

    def noted(name: str, what: str, _: Hashable) -> None:
        if what != STORED:
            left(name)

    return noted


class EngineOwner(NamedTuple):
    """An engine, as an owner of objects: its name, and the id of the user who registered it; None on tcp."""

    engine: str
    uid: int | None = None


def space_of(name: str) -> str:
    """The part of an object's name for its model and layout; "" for names of another form."""
    parts = name.split("/", 2)
    return f"{parts[0]}/{parts[1]}" if len(parts) == 3 else ""


def nobody(space: str) -> Hashable:
    """The key that stands for the missing owner of objects in this space."""
    return "", space


class Use:
    """One task on all its ranks, or one lookup: objects that belong together in the order of eviction. Opaque.

    ends: by place (`LruIndex.place`), the smallest depth at which one of its objects was evicted or found no room.
    shrunk: whether that happened.
    placed: the places where it has written an object, after which it continues no other chain.
    counts: False for a lookup that must not change the order of eviction.
    owner: the owner of the task or lookup.
    start: the depth of the first block that it names; depths count from the beginning of the sequence.
    parent: the part of a name for the block before that; "" if the first one is a root, None if it is not known.
    last: that for the last one, of a task that writes.
    continued: whether another use has taken over its objects (chains.py).
    others: by owner, the uses of the same task or lookup whose objects belong to others (`of`).
    stop: the depth behind the last block that a storing task names, whether that found room or not; 0 for other uses.
    """

    counts = True
    until = math.inf  # when its task ends at the latest, in monotonic seconds
    shared = False  # whether its objects must be where other nodes see them
    placed: AbstractSet[int] = frozenset()
    ends: Mapping[int, int] = MappingProxyType({})
    shrunk = False
    parent: str | None = None
    last = ""
    continued = False
    others: Mapping[Hashable, Use] = MappingProxyType({})

    def __init__(self, *, counts: bool = True, start: int = 0, stop: int = 0, owner: Hashable = None) -> None:
        self.counts = counts
        self.start = start
        self.stop = stop
        self.owner = owner

    def of(self, owner: Hashable) -> Use:
        """The use for copies of this owner's objects. They stay its own, whoever has them copied to another level."""
        if owner in (None, self.owner):
            return self
        if owner not in self.others:
            other = Use(counts=self.counts, start=self.start, stop=self.stop, owner=owner)
            self.others = {**self.others, owner: other}
        return self.others[owner]

    def ends_at(self, place: int) -> float:
        return self.ends.get(place, math.inf)

    def end_at(self, place: int, depth: int) -> None:
        self.ends = {**self.ends, place: min(self.ends.get(place, depth), depth)}
        self.shrunk = True


# Why an object is not evicted: an owner pins it; no other level of storage has it yet; a prefetch waits for its use;
# its removal has failed. GUESSED beside UNSAVED or AWAITED: it was found at a start, and nobody has used it since.
PINNED, UNSAVED, AWAITED, STUCK, GUESSED = 1, 2, 4, 8, 16


class Entry(msgspec.Struct, eq=False):
    """One present object. A name that leaves the index and returns gets a new Entry: compare entries by identity.

    kept: why it is not evicted, a sum of PINNED, UNSAVED, AWAITED, STUCK and GUESSED.
    """

    name: str
    nbytes: int
    depth: int = 0
    kept: int = 0
    group: UseGroup | None = None  # None once it has left

    @property
    def touched(self) -> bool:
        """Whether the object was used, or pinned, since the index was created."""
        return self.group is not None and self.group.number != RESTORED and self.group.at != FOUND_AT

    @property
    def use(self) -> Use | None:
        """The one that it belongs to; None once it has left."""
        return None if self.group is None else self.group.use

    @property
    def pinned(self) -> bool:
        return self.group is not None and bool(self.kept & PINNED)

    @property
    def owner(self) -> Hashable | None:
        """Whose it is; None once it has left."""
        return None if self.group is None else self.group.line.queue.owner

    def __repr__(self) -> str:
        return f"Entry({self.nbytes} bytes)"


class Victim(msgspec.Struct, frozen=True):
    """An object that has left the index. The caller removes its bytes."""

    name: str
    nbytes: int


class NoRoom(enum.Enum):
    """Why `reserve` made no room. Nothing has changed."""

    NEVER = "it is larger than the capacity"
    LATER = "running writes hold the room, or what should go first: ask again when one has ended"
    FULL = (
        "all that is there is nearer the root of the write's own chain, or was used after it, or is pinned, or is "
        "within another owner's share; or the chain has ended"
    )


class Adopted(NamedTuple):
    """An object that was found at start. use: the number of its use."""

    use: int
    depth: int
    name: str
    nbytes: int


@dataclass(slots=True, eq=False, repr=False)
class Queue:
    """One owner's objects in one index, in the order of eviction, and how many bytes they have.

    space: "" until it is known.
    used_at: FOUND_AT for objects without an owner, which go to the engine that is the first to use them; else None.
    share: of the capacity, 0 to 1. share_until: in monotonic seconds.
    present: its engine is registered now, so no other one takes its objects over.
    used: reserved and present.
    pinned: of these, how many cannot be evicted because somebody has pinned them.
    evicted: how many of its objects were, since it came, by the owner whose objects needed the room.
    own: where its next groups come, and what is not to be evicted from now on.
    lines: its own, and those of queues that it has taken over, as they were: there may be a million objects.
    """

    owner: Hashable
    space: str = ""
    share: float = 0.0
    share_until: float = math.inf
    present: bool = False
    used: int = 0
    pinned: int = 0
    objects: int = 0
    evicted: Counter[Hashable] = field(default_factory=Counter)
    used_at: float | None = field(init=False)
    own: Line = field(init=False)
    lines: list[Line] = field(init=False)

    def __post_init__(self) -> None:
        self.used_at = FOUND_AT if self.owner == nobody(self.space) else None
        self.own = Line(self)
        self.lines = [self.own]

    def take_over(self, other: Queue) -> None:
        """Take all objects of another queue, each at its place in the order."""
        for figure in ("used", "pinned", "objects"):
            setattr(self, figure, getattr(self, figure) + getattr(other, figure))
        for line in filter(Line.has_objects, other.lines):
            line.queue = self
            self.lines.append(line)

    def continued_by(self, name: str, start: int, writing: Container[Use]) -> UseGroup | None:
        """The chain that an object of a use with this `start` continues; None if there is none, or several.

        writing: uses that are still writing; these are not continued.
        """
        newest_first = heapq.merge(*(reversed(line.groups.values()) for line in self.lines), key=_NUMBER, reverse=True)
        space, latest = _space(name), itertools.islice(newest_first, RECENT)
        ends = (group for group in latest if group.ends == start and group.use not in writing)
        ending = {group.use: group for group in ends if _space(group.entries[0].name) == space}
        return next((one for one in ending.values() if one.number), None) if len(ending) == 1 else None


class Reserved(msgspec.Struct):
    """An object that is being written. number: what was noted as that of its use."""

    nbytes: int
    use: Use
    queue: Queue
    number: int
    depth: int


@dataclass(slots=True, eq=False)
class Line:
    """Objects of a queue in the order of eviction.

    groups: by use, the next to go first; none is empty.
    aside: the objects that are in none of these, because they are not to be evicted.
    """

    queue: Queue
    groups: OrderedDict[Use, UseGroup] = field(default_factory=OrderedDict)
    aside: UseGroup = field(init=False)

    def __post_init__(self) -> None:
        self.aside = UseGroup(Use(), -1, self)

    def has_objects(self) -> bool:
        return bool(self.groups or self.aside.live)


@dataclass(slots=True, eq=False, repr=False)
class UseGroup:
    """The objects of one use in one line. `number`: its place in the order of uses. `at`: monotonic seconds.

    A use that continues a chain takes over the group. `entries` may contain objects that have moved to another group.
    They are skipped, and dropped before they outnumber the others. The list is sorted only when its order is needed.
    """

    use: Use
    number: int
    line: Line
    at: float = 0.0
    entries: list[Entry] = field(default_factory=list)
    live: int = 0
    sorted: bool = True
    _behind: int = 0  # the depth behind its deepest block so far

    @property
    def ends(self) -> int:
        """The depth at which its chain goes on: behind all blocks that the use stores or, without any, has found."""
        return self.use.stop or self._behind

    def add(self, entry: Entry, depth: int) -> None:
        entry.group, entry.depth = self, depth
        self.entries.append(entry)
        self._behind = max(self._behind, depth + 1)
        self.live += 1
        self.sorted = False

    def raise_to(self, entry: Entry, depth: int) -> bool:
        """Note that the same use used an entry again: the smaller depth counts. Returns whether it changed."""
        if depth >= entry.depth:
            return False
        entry.depth = depth
        self.sorted = False
        return True

    def root_first(self) -> Iterator[Entry]:
        """Its objects. Read in several steps, those that move meanwhile may come twice, or not."""
        for entry in self._in_order():
            if entry.group is self:
                yield entry

    def leaf_first(self) -> Iterator[Entry]:
        """The same in the order of eviction."""
        for entry in reversed(self._in_order()):
            if entry.group is self:
                yield entry

    def _in_order(self) -> list[Entry]:
        """The entries, root first. Some may have moved to another group, but not the last one."""
        if not self.sorted:
            if len(self.entries) > self.live:
                self.tidy()
            self.entries.sort(key=DEPTH)
            self.sorted = True
        while self.entries and self.entries[-1].group is not self:
            self.entries.pop()
        return self.entries

    def tidy(self) -> None:
        """Drop the entries that have moved to another group."""
        # An entry that left the group and came back is in the list twice.
        self.entries = list(dict.fromkeys(entry for entry in self.entries if entry.group is self))


def spared(
    spare: Mapping[Queue, float], size: Callable[[int], int]
) -> tuple[Iterator[list[UseGroup]], Callable[[UseGroup], Iterator[Entry]]]:
    """The uses that have objects in these queues, in the order of eviction, and what may go of the objects of a group.

    spare: how many bytes of each queue may go.
    """
    left = dict(spare)

    def objects_of(group: UseGroup) -> Iterator[Entry]:
        for entry in group.leaf_first():
            left[group.line.queue] -= size(entry.nbytes)
            if left[group.line.queue] < 0:
                return
            yield entry

    def can_spare(group: UseGroup) -> bool:
        return left[group.line.queue] >= 0

    lines = [itertools.takewhile(can_spare, line.groups.values()) for queue in left for line in queue.lines]
    by_use = itertools.groupby(heapq.merge(*lines, key=_NUMBER), key=_USE)
    return (list(groups) for _, groups in by_use), objects_of


def order_of(entry: Entry) -> tuple[int, int]:
    """The place of an object in the order of eviction."""
    assert entry.group is not None
    return entry.group.number, -entry.depth


def _space(name: str) -> str:
    """The part of a name that all blocks of a sequence share."""
    return name.rsplit("/", 2)[0] if "/" in name else ""
