"""One level of a stack: its storage, its usual latency, and its counts."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from transferd.blocks.formats import quote_part
from transferd.config import LevelSection
from transferd.errors import Closed, StorageError
from transferd.storage.base import FOUND, Found, Item, Outcome, Storage
from transferd.storage.levels.base import Hint
from transferd.storage.lru import Use
from transferd.storage.queues import space_of
from transferd.storage.selection import Selection, parts_of

T = TypeVar("T")

MIB = 1024**2
SAMPLES = 64
FEWEST_SAMPLES = 8
TIMES = 4  # a call is too slow if it takes so many times as long as the slowest of the latest calls
FLOOR_S = 0.5  # but not before
SLOW_CALLS = 3  # after so many calls in a row that were too slow, a level is left out
OUT_S = 5.0  # for so long, and until its calls have ended; then the next call tries it again
UNKNOWN_S = 5.0  # how long a call may take before any call was measured
ABSENT_S = 1.0  # how long a remote level's answer "not there" counts
MOST_PURGES = (
    256  # that a level without removal remembers; with more, all is hidden that this node has not stored since
)
MOST_DROPPED = 1024  # names that one call forgets
MOST_NAMES = 2**17  # names that are remembered of a level without an index

REASONS = ("queue_full", "failed", "full", "down", "gone", "quarantined", "purged", "drained", "close")


class Patience:
    """How long to wait for a level, relative to the duration of its latest calls. now: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._samples: deque[float] = deque(maxlen=SAMPLES)  # seconds a MiB, or a call of less
        self._slow = 0  # calls in a row
        self._out_until = 0.0
        self.slow_calls = 0  # usually there are none, and so nothing else need be looked at
        self.hanging = 0  # calls that were too slow, and have not ended

    def limit(self, nbytes: int = 0) -> float | None:
        """How many seconds a call of so many bytes may take; None if no call was measured yet."""
        if len(self._samples) < FEWEST_SAMPLES:
            return None
        return max(FLOOR_S, TIMES * max(self._samples) * max(1.0, nbytes / MIB))

    def limit_within(self, nbytes: int, until: float | None) -> float:
        """The same, but about half of the time until then at the most, so that another level can still answer."""
        known = self.limit(nbytes)
        limit = UNKNOWN_S if known is None else known
        return limit if until is None else min(limit, max(FLOOR_S, (until - self._now()) / 2))

    @property
    def p99_s(self) -> float | None:
        """Seconds a MiB, or a call of less, that 99 of 100 of the latest calls took at most; None without any."""
        samples = sorted(self._samples)
        return samples[len(samples) * 99 // 100] if samples else None

    async def wait(
        self, call: Awaitable[T], limit: float | None, nbytes: int = 0, *, measured: bool = True
    ) -> asyncio.Future[T]:
        """Begin a call, and wait for it for so many seconds. If it has not ended then, it is too slow, and goes on.

        measured: False for a call that is like no other: how long it takes says nothing of them.
        """
        began, running = self._now(), asyncio.ensure_future(call)
        if not running.done():
            await asyncio.wait([running], timeout=limit)
        if not running.done():
            self.late()
            running.add_done_callback(
                lambda done: self.returned(self._now() - began if measured and not done.exception() else None, nbytes)
            )
        elif measured and running.exception() is None:
            self.ended(self._now() - began, nbytes)
        return running

    def ended(self, seconds: float, nbytes: int = 0) -> None:
        """Note that a call was answered in time."""
        self._samples.append(seconds / max(1.0, nbytes / MIB))
        self._slow, self._out_until = 0, 0.0

    def returned(self, seconds: float | None, nbytes: int = 0) -> None:
        """Note that a call that was too slow has ended. seconds: how long it took; None if it failed."""
        self.hanging -= 1
        if seconds is not None:
            self._samples.append(seconds / max(1.0, nbytes / MIB))

    def late(self) -> None:
        """Note that a call was not answered in time."""
        self.slow_calls += 1
        self.hanging += 1
        self._slow += 1
        if self._slow >= SLOW_CALLS:
            self._out_until = self._now() + OUT_S

    @property
    def out(self) -> bool:
        """Whether the level is left out, because it was too slow again and again."""
        return self._out_until > self._now() or self.hanging >= SLOW_CALLS


class Names:
    """A bounded set of names, as hashes. Two names with one hash cost at most a missed copy, never a wrong byte."""

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._names: OrderedDict[int, float] = OrderedDict()

    def add(self, name: str, value: float = 0.0) -> None:
        key = hash(name)
        self._names[key] = value
        self._names.move_to_end(key)
        if len(self._names) > self._most:
            self._names.popitem(last=False)

    def get(self, name: str) -> float | None:
        return self._names.get(hash(name))

    def used(self, name: str) -> float | None:
        """Like `get`, and the name stays as long as one that was just added."""
        if (key := hash(name)) in self._names:
            self._names.move_to_end(key)
        return self._names.get(key)

    def discard(self, name: str) -> None:
        self._names.pop(hash(name), None)

    def count(self, name: str) -> int:
        """Note a name once more. Returns how often it was noted."""
        number = int(self.get(name) or 0) + 1
        self.add(name, number)
        return number

    def set_most(self, most: int) -> None:
        self._most = most
        for _ in range(min(MOST_DROPPED, len(self._names) - most)):
            self._names.popitem(last=False)

    def __contains__(self, name: str) -> bool:
        return hash(name) in self._names


class Hidden:
    """What purges have named, in a level that keeps it because others use it too.

    This node uses none of it there until it has stored the object again. Hashes of names that collide show a hidden
    object at most, until the daemon restarts. After a purge that names no objects, those that were used the longest ago
    of more than MOST_NAMES that were stored since are hidden again, and count as missing.
    """

    def __init__(self) -> None:
        # The number of the latest purge by model and generation, as names say them, and space; and of each name.
        self._purges: dict[tuple[str | None, str | None, str | None], int] = {}
        self._named: dict[str, int] = {}
        self._removed: dict[tuple[str | None, str | None, str | None], int] = {}  # the latest purge before a removal
        self.number = 0  # of the latest purge
        self._anew = Names()

    def purge(self, selection: Selection) -> None:
        """Hide what fits."""
        self.number += 1
        if selection.names is None:
            self._purges[_said(selection)] = self.number
        else:
            self._named.update(dict.fromkeys(filter(selection.fits, selection.names), self.number))
        if len(self._purges) > MOST_PURGES or len(self._named) > MOST_NAMES:
            self._purges = {(None, None, None): self.number}
            self._named.clear()

    def removed(self, selection: Selection, number: int) -> None:
        """Note that what fits was removed there: whatever is there now is new. number: as it was when that began."""
        if selection.names is None:
            if len(self._removed) >= MOST_PURGES:
                self._removed.clear()
            said = _said(selection)
            self._removed[said] = max(number, self._removed.get(said, 0))
        else:
            for name in filter(selection.fits, selection.names):
                self._anew.add(name, max(number, self._anew.get(name) or 0))

    def stored(self, name: str) -> None:
        """Note that this node has stored an object there."""
        self._named.pop(name, None)
        if self._purges:
            self._anew.add(name, self.number)

    def __contains__(self, name: str) -> bool:
        since = self._anew.used(name) or 0
        if since == self.number:
            return False
        model, generation = parts_of(name) or (None, None)
        fitting = list(itertools.product({None, model}, {None, generation}, {None, space_of(name)}))
        since = max(since, *(self._removed.get(one, 0) for one in fitting))
        return self._named.get(name, 0) > since or any(self._purges.get(one, 0) > since for one in fitting)


def _said(selection: Selection) -> tuple[str | None, str | None, str | None]:
    model, generation = (None if one is None else quote_part(one) for one in (selection.model, selection.generation))
    return model, generation, selection.space


class StoreLevel:
    """See the module.

    number: 0 for the first.
    known: whether it has an index, which answers without I/O. in_memory: whether its calls only copy memory.

    Used on one loop.
    """

    def __init__(
        self, number: int, name: str, storage: Storage, section: LevelSection, now: Callable[[], float]
    ) -> None:
        self.number = number
        self.name = name
        self.storage = storage  # perhaps behind others, which have its index
        self.index, self.shared = storage.index, storage.shared
        self.configure(section)
        self.loads, self.stores, self.lookups = Patience(now), Patience(now), Patience(now)
        self.counts: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()  # objects that were not copied here, by reason
        self.found = Outcome(Found.FOUND, level=number) if number else FOUND
        self.stuck: Counter[str] = Counter()  # how many calls that were too slow still use a name
        self._hints = Names()  # when a level that is not `known` said that it has a name
        self._absent = Names()
        self.hidden = Hidden()
        self._now = now
        self.known = self.in_memory = False
        self.leaving = self.drained = False  # taken out: nothing is stored here; nor loaded
        self.draining_bytes = 0  # that have yet to be looked at, and copied if only this level has them
        self.changed: Callable[[str], None] | None = None  # called in the step in which it gets or loses an object

    def configure(self, section: LevelSection) -> None:
        self.section = section
        self.through = section.write == "through"
        self.promote = self.storage.promotes_at if section.promote is None else section.promote

    def opened(self) -> None:
        find = self.index.find
        self.known = find([], None) is not None and find([], Use(counts=False)) is not None
        self.in_memory = self.known and not self.storage.slots_at_once

    @property
    def out(self) -> str:
        """Why it is left out now; "" if it is not."""
        if self.drained:
            return "it was taken out"
        return self.storage.unusable() or ("it is too slow" if self.loads.slow_calls and self.loads.out else "")

    @property
    def away(self) -> bool:
        """Whether nothing is to be copied to it now. What a remote level does not take waits until it answers again."""
        return self.leaving or (self.known and bool(self.storage.unusable()))

    @property
    def state(self) -> str:
        return "drained" if self.drained else "draining" if self.leaving else "used"

    @property
    def out_for_stores(self) -> str:
        """Why no store goes here now; "" if stores do."""
        if out := self.out:
            return out
        hang = self.stores.slow_calls and (self.stores.hanging or self.stores.out)
        return "it is being taken out" if self.leaving else "stores to it do not end" if hang else ""

    def stick(self, names: Sequence[str], call: asyncio.Future[Any]) -> None:
        """Note that a call with these is too slow: nobody else asks for them here until it has ended."""
        self.stuck.update(names)

        def ended(_: object) -> None:
            self.stuck -= Counter(names)  # which keeps no zeros

        call.add_done_callback(ended)

    def find(self, names: Sequence[str], use: Use | None = None) -> list[bool] | None:
        """The answer of its index (`Index.find`). A level that cannot be read has nothing."""
        try:
            return self.index.find(names, use)
        except StorageError:
            return [False] * len(names)

    def has(self, names: Sequence[str]) -> list[bool | None]:
        """For each name, whether it is here; None if only `Storage.exists` can find out."""
        try:
            found = self.index.find(names, None)
        except (StorageError, Closed):  # another level loses objects after this one was closed
            found = [False] * len(names)
        return [None] * len(names) if found is None else list(found)

    def owner_of(self, name: str) -> Hashable | None:
        return self.index.owner_of(name)

    def handed_on(self, item: Item) -> Item:
        """This level's object as another level gets a copy of it: an object has one owner in all levels."""
        assert item.use is not None
        return Item(item.name, item.nbytes, item.use.of(self.index.owner_of(item.name)), item.depth)

    def absent(self, name: str) -> bool:
        """Whether a level that is not `known` has just answered that it is not there."""
        until = self._absent.get(name)
        return until is not None and until > self._now()

    def missed(self, name: str) -> None:
        if not self.known:
            self._absent.add(name, self._now() + ABSENT_S)
            self.unsettle(name)

    def overwrite_hidden(self, items: Iterable[Item]) -> None:
        """Call it before these are stored: what a purge has hidden must not show again as if it were new."""
        if (pool := self.storage.pool) is not None:
            for item in items:
                if item.name in self.hidden:
                    pool.overwrite(item.name)

    def wrote(self, name: str) -> None:
        """Note that this node has stored it there."""
        if self.hidden.number:
            self.hidden.stored(name)
        self.stored(name)

    def stored(self, name: str, at: float | None = None) -> None:
        """Note that it has the object. at: when it said so, if not now."""
        if not self.known:
            self._absent.discard(name)
            self._hints.add(name, self._now() if at is None else at)
        if self.changed is not None:
            self.changed(name)

    def said(self, names: Sequence[str], found: Sequence[bool], asked: float | None = None) -> list[bool]:
        """Take up what it answers when it is asked for these. Returns which of them this node may use there.

        asked: when it was asked, if not now.
        """
        there = [one and name not in self.hidden for name, one in zip(names, found, strict=True)]
        for name, one in zip(names, there, strict=True):
            self.stored(name, asked) if one else self.missed(name)
        return there

    def unsettle(self, name: str) -> None:
        """Note that a level that is not `known` may not have it any more."""
        self._hints.discard(name)
        if self.changed is not None:
            self.changed(name)

    def doubt(self, name: str) -> None:
        """Forget that a level that is not `known` has said that it has an object, though nothing says otherwise."""
        self._hints.discard(name)

    def hint(self, name: str) -> Hint | None:
        """What a level that is not `known` has said of an object last."""
        at = self._hints.get(name)
        return None if at is None or name in self.hidden else Hint(at)

    def forget_hints(self) -> None:
        """Note that its medium may be another one now."""
        self._hints, self._absent = Names(), Names()

    def seems_to_have(self, name: str) -> bool:
        """Whether it has the object, without I/O; answers also while it is left out."""
        return self.has([name]) == [True] if self.known else self.hint(name) is not None

    def statistics(self, found: Mapping[str, Any], pending_bytes: int, kept_bytes: int, refuses: str) -> dict[str, Any]:
        """Its own figures beside `found`, those of its storage."""
        calls = (self.loads, self.stores, self.lookups)
        return {
            "objects": None,
            "bytes": None,
            **found,
            **{name: self.counts[name] for name in ("copied", "promoted", "prefetched")},
            "name": self.name,
            "backend": self.storage.backend,
            "pending_bytes": pending_bytes,
            "lost": self.lost.total(),
            "lost_for": {reason: self.lost[reason] for reason in REASONS},
            "kept_bytes": kept_bytes,
            "slow_calls": sum(one.slow_calls for one in calls),
            "hanging": sum(one.hanging for one in calls),
            "load_p99_s": self.loads.p99_s,
            "store_p99_s": self.stores.p99_s,
            "refuses": refuses,
            "state": self.state,
            "draining_bytes": self.draining_bytes,
            "available": not self.out_for_stores and found.get("breaker", "closed") == "closed",
        }
