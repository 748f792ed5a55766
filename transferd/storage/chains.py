"""The groups of uses in an index (lru.py), their places in the order, and which use continues which chain.

A chain may grow over several tasks, each of which names only its new blocks, from block `start` of the sequence on.
The new use takes over the objects of the use that leads to them, so that the root is not older than the tail:

    named    the task says which block comes before (`Use.parent`): the use to which that object belongs now, or, if it
             found no room, the one that named it last. If other blocks follow it there, too, the chains part, and the
             new use takes over only the way to the root
    guessed  it does not say: the use that ended at `start`, if exactly one of the latest uses of the same owner, in the
             same space of names, did

A use may be continued while it is still writing. What it writes from then on joins the group of its successor. If its
chain has ended (`Use.ends_at`), so has the successor's: what follows could not be used.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from transferd.storage.queues import RESTORED, Entry, Queue, Use, UseGroup

RETIRED_AT_ONCE = 512  # uses, between two yields
MOST_LAST = 4096  # tasks whose last block is remembered


@dataclass(eq=False)
class Chains:
    """See the module. Used on one event loop.

    now: monotonic seconds.
    of: by use, a group in each queue in which it has objects; in the order of uses, the oldest first.
    latest: the number of the latest use.
    waiting: the numbers of uses that are writing and have no group yet.
    used_by: the use to which the object of a name belongs, or which writes it; None if there is none, or it is pinned.
    move: gives an object to a use.
    renumbered: called with the old and the new number of a use that was continued.
    together: those of all indexes of one store: blocks of a chain may lie in each.
    place: see LruIndex. None for a level above others: these have what it has no room for.
    """

    _now: Callable[[], float]
    _used_by: Callable[[str], Use | None]
    _move: Callable[[Entry, Use, int], None]
    of: OrderedDict[Use, list[UseGroup]] = field(default_factory=OrderedDict)
    latest: int = RESTORED
    waiting: dict[Use, int] = field(default_factory=dict)
    together: Sequence[Chains] = ()
    renumbered: Callable[[int, int], None] = lambda _old, _new: None
    place: int | None = 0
    _last: OrderedDict[str, Use] = field(default_factory=OrderedDict)  # by the last block that a use names
    _successors: WeakKeyDictionary[Use, Use] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.together = [self]

    def leading(self, use: Use, name: str) -> Use:
        """The use to whose group an object that `use` writes or uses belongs: the last that continues its chain."""
        if use.continued:
            use = self.heir(use)
        if use.parent and use not in self.of:
            parent = _beside(name, use.parent)
            before = next((found for one in self.together if (found := one.user_of(parent)) is not None), use)
            for one in self.together:
                one.go_on(use, before)
        return use

    def writes(self, use: Use, name: str) -> None:
        """Note that `use` is about to write this, its first object."""
        if use.last:
            self._last[_without_rank(_beside(name, use.last))] = use
            if len(self._last) > MOST_LAST:
                self._last.popitem(last=False)

    def guess(self, use: Use, name: str, queue: Queue | None, writing: Container[Use]) -> None:
        """Let `use`, which is about to write this name, take over the chain that it continues, if only one can be."""
        ending = None if queue is None else queue.continued_by(name, use.start, writing)
        if ending is not None:
            self._take_over(use, ending.use)

    def number_of(self, use: Use) -> int:
        """The number of a use that is writing, which may have no group yet."""
        if groups := self.of.get(use):
            return groups[0].number
        if use not in self.waiting:
            self.latest += 1
            self.waiting[use] = self.latest
        return self.waiting[use]

    def group(self, use: Use, queue: Queue, number: int | None = None, at: float | None = None) -> UseGroup:
        """The group of a use in a queue. A use without objects gets a new place, the last in the order.

        number, at: its place, if not the last, and the time of the use, if not now.
        """
        if (group := queue.own.groups.get(use)) is not None:
            return group
        elsewhere = self.of.setdefault(use, [])
        for group in elsewhere:
            if group.line.queue is queue:
                return group
        if elsewhere:
            number = elsewhere[0].number
        elif number is None:
            if self.waiting.pop(use, 0) != self.latest:
                self.latest += 1
            number = self.latest
        groups = queue.own.groups
        newer: list[UseGroup] = []
        if number < self.latest:  # rare: a use touches objects of several owners, or an object could not be removed
            newer = list(itertools.takewhile(lambda one: RESTORED < number < one.number, reversed(groups.values())))
        group = groups[use] = UseGroup(use, number, queue.own, self._now() if at is None else at)
        elsewhere.append(group)
        for other in reversed(newer):
            groups.move_to_end(other.use)
        if number == RESTORED < self.latest:
            self.of.move_to_end(use, last=False)
            groups.move_to_end(use, last=False)
        return group

    def retire(self, dead: Callable[[str], bool]) -> Generator[None, None, None]:
        """Let the uses whose objects are dead go next, unless an object is used again. dead: says so of a name."""
        for number, use in enumerate(reversed(list(self.of)), 1):
            if number % RETIRED_AT_ONCE == 0:
                yield
            groups = self.of.get(use)
            if not groups or groups[0].number == RESTORED or not dead(groups[0].entries[0].name):
                continue  # they are of one generation
            self.renumbered(groups[0].number, RESTORED)
            self.of.move_to_end(use, last=False)
            for group in groups:
                group.number = RESTORED
                group.line.groups.move_to_end(use, last=False)

    def forget(self, group: UseGroup) -> None:
        """Note that a group is no more."""
        groups = self.of[group.use]
        groups.remove(group)
        if not groups:
            del self.of[group.use]

    def user_of(self, name: str) -> Use | None:
        """The use that a block of this name, on the same rank, belongs to or is named by last."""
        use = self._used_by(name) or self._last.get(_without_rank(name))
        return None if use is None else self.heir(use)

    def heir(self, use: Use) -> Use:
        """The last use that has taken over its objects; itself if there is none."""
        while use.continued and (successor := self._successors.get(use)) is not None:
            use = successor
        return use

    def go_on(self, use: Use, before: Use) -> None:
        """Let `use` take over what leads to its blocks from `before`."""
        use, before = self.heir(use), self.heir(before)
        groups = self.of.get(before, [])
        if use is before or use in self.of or (groups and groups[0].number == RESTORED):  # what has nothing in common
            return
        if max([group.ends for group in groups], default=before.stop) <= use.start:
            self._take_over(use, before)
            if self.place is not None and before.ends_at(self.place) < use.start:
                use.end_at(self.place, before.ends[self.place])
            return
        for group in list(groups):
            for entry in list(group.root_first()):
                if entry.depth < use.start:
                    self._move(entry, use, entry.depth)

    def _take_over(self, use: Use, before: Use) -> None:
        """Make `before`'s groups those of `use`, as the last in the order."""
        before.continued = True
        self._successors[before] = use
        self.waiting.pop(before, None)
        groups = self.of.pop(before, [])
        if not groups:
            return
        self.waiting.pop(use, None)
        self.latest += 1
        self.renumbered(groups[0].number, self.latest)
        for group in groups:
            del group.line.groups[group.use]
            group.use, group.number, group.at = use, self.latest, self._now()
            group.line.groups[use] = group
        self.of[use] = groups


def _beside(name: str, block: str) -> str:
    """The name of another block's object, on the same rank."""
    parts = name.rsplit("/", 2)
    return f"{parts[0]}/{block}/{parts[2]}" if len(parts) == 3 else block


def _without_rank(name: str) -> str:
    return name.rpartition("/")[0] or name
