"""Orders about stored objects that outlive the process: purges and pins (docs/adr/0106). Pure: it reads no disk.

An order holds on every disk of the file backend, also on one that is away: each disk has a list of them (ledger.py),
and a disk that opens or returns applies those of all lists before it serves. `OrderBook` is their union.

Objects are named by `digest`, because names are long. A purge of what an engine stored, or of what was not used for
long, says less on a disk that was away, where owners and uses are not known: all that may fit goes. Stored blocks can
be computed again.

An *epoch* ends when every disk has applied all purges, which then are forgotten. A disk with another epoch has missed
some of them, and nobody knows which: it is emptied. Epochs of one *family* follow each other; a disk of another family
comes from elsewhere.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from transferd.blocks.keys import encode_text
from transferd.storage.queues import EngineOwner
from transferd.storage.selection import Selection

MOST_NAMES = 65_536  # in all purges that are remembered, and
MOST_ORDERS = 4096  # purges: with more, a disk that is away is emptied when it returns
MANY_ORDERS = 64  # purges that all disks have applied and that are still listed
FEW_PINS = 1024  # objects: with more, those whose pins are over are forgotten


class By(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who has given an order."""

    uid: int | None = None
    pid: int | None = None
    name: str = ""  # of the engine


NOBODY = By()


class Fits(msgspec.Struct, frozen=True, omit_defaults=True):
    """The objects of a purge, as a disk knows them: those that fit every field that is not None."""

    model: str | None = None
    generation: str | None = None
    space: str | None = None
    names: list[str] | None = None  # digests
    unused_s: float | None = None


class PurgeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One purge of a list."""

    id: str
    at: float  # Unix time
    fits: Fits
    by: By = NOBODY

    @property
    def number(self) -> int:
        """Its place among all orders, also those of earlier processes."""
        return int(self.id.rpartition("-")[2])


class PinRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Pins of one owner that were given together, or ended. number: of that order. until: Unix time."""

    number: int
    until: float
    engine: str
    names: list[str]  # digests
    uid: int | None = None
    ended: bool = False


class Epoch(msgspec.Struct, frozen=True, omit_defaults=True):
    """before, last: number and mark of the epoch that it follows, and the number of the last purge of that one."""

    number: int
    mark: str
    family: str
    before: tuple[int, str] | None = None
    last: int = 0

    @classmethod
    def first(cls) -> Epoch:
        return cls(1, secrets.token_hex(8), secrets.token_hex(8))

    def next(self, last: int) -> Epoch:
        return Epoch(self.number + 1, secrets.token_hex(8), self.family, (self.number, self.mark), last)


def digest(name: str) -> str:
    """An object's name as orders say it."""
    return hashlib.blake2b(encode_text(name)).hexdigest()[:32]


class Listed(msgspec.Struct, omit_defaults=True):
    """What a disk's list says. epoch: None if there is none, or none that can be read.

    applied: the ids of purges that this disk has done.
    mounts: of each directory of the store that was on a file system of its own, where that was mounted.
    problem: why the disk may have missed any order: the list cannot be read; or, in the list itself, not all of the
        disk could be read when it was to be emptied.
    """

    epoch: Epoch | None = None
    purges: list[PurgeRecord] = []
    applied: set[str] = set()
    pins: list[PinRecord] = []
    mounts: dict[str, str] = {}
    problem: str = ""

    def follows(self, epoch: Epoch) -> str:
        """Why this disk may have missed orders before this epoch; "" if it has not."""
        if self.problem:
            return f"it may have missed orders: {self.problem}"
        if self.epoch is None:
            return "it has no list of orders"
        own = self.epoch.number, self.epoch.mark
        if own == (epoch.number, epoch.mark):
            return ""
        done = all(order.id in self.applied for order in self.purges)
        last = max((order.number for order in self.purges), default=self.epoch.last)
        if own == epoch.before and done and last >= epoch.last:
            return ""  # the daemon ended while it began the new epoch, and this disk was not yet told
        if self.epoch.family != epoch.family:
            return "it belongs to another daemon's store"
        return "it was away while orders were given that no disk lists any more"


EVERYTHING = PurgeRecord("", 0.0, Fits())  # for a disk of which nobody knows which orders it has missed


class Overdue:
    """Purges, for a disk that has not applied them."""

    def __init__(self, orders: Iterable[PurgeRecord]) -> None:
        each = [(order.at, order.fits) for order in orders]
        self._tests = [_test_of(at, fits) for at, fits in each]
        self.removed = 0
        # Whatever is in the quarantine may fit: its files do not say their objects' names.
        self.aside_until = max(
            [math.inf if fits.unused_s is None else at - fits.unused_s for at, fits in each], default=0.0
        )

    def __bool__(self) -> bool:
        return bool(self._tests)

    def fits(self, name: str, written: float) -> bool:
        """written: when the object was stored, in Unix time."""
        fits = any(test(name, written) for test in self._tests)
        self.removed += fits
        return fits


def _test_of(at: float, fits: Fits) -> Callable[[str, float], bool]:
    selection = Selection(model=fits.model, generation=fits.generation, space=fits.space)
    digests = None if fits.names is None else frozenset(fits.names)

    def test(name: str, written: float) -> bool:
        if fits.unused_s is not None and written > at - fits.unused_s:
            return False  # it was used when it was written, or later
        return selection.fits(name) and (digests is None or digest(name) in digests)

    return test


class _LatestPin(NamedTuple):
    """What the latest order about a pin says."""

    number: int
    until: float  # Unix time, at which no list needs it any more
    ended: bool


class OrderBook:
    """All orders of one file backend: the union of its disks' lists. Changed on one loop.

    wall: Unix time.

    fresh: no disk that was there at the start had a list, so the epoch is one that no absent disk can know.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self.epoch: Epoch | None = None
        self.fresh = False
        self.purges: dict[str, PurgeRecord] = {}  # of this epoch
        self.mounts: dict[str, str] = {}  # see Listed
        self._wall = wall
        self._boot = secrets.token_hex(4)
        self._number = 0  # of the latest order
        self._pins = OrderedDict[str, dict[EngineOwner, _LatestPin]]()  # by object, in the order of the looks at them

    # --- the lists of disks -------------------------------------------------------------------------

    def begin(self, lists: Sequence[Listed], holding: Sequence[bool]) -> None:
        """At the start: take up these lists, of the disks that are there. The newest epoch counts.

        holding: of each disk, whether it has objects. A disk without any gives way to those of another family.
        """
        family = next(iter(families(lists, holding)), None)
        epochs = [one.epoch for one in lists if one.epoch is not None and family in (None, one.epoch.family)]
        self.fresh = not epochs
        self.epoch = max(epochs, key=lambda epoch: (epoch.number, epoch.mark), default=None) or Epoch.first()
        for one in lists:
            self.learn(one)

    def follow(self, listed: Listed) -> None:
        """The only disk, or the first one with a list, has returned. If no purge was given, it has missed none."""
        if listed.epoch is not None and not self.has_given:
            self.fresh = self.fresh and listed.epoch == self.epoch
            self.epoch = listed.epoch

    def learn(self, listed: Listed) -> None:
        """Take up a disk's orders, unless it is one that is emptied."""
        assert self.epoch is not None
        numbers = [order.number for order in listed.purges] + [pin.number for pin in listed.pins]
        self._number = max(self._number, 0 if listed.epoch is None else listed.epoch.last, *numbers)
        if listed.epoch is None or listed.follows(self.epoch):
            return
        if (listed.epoch.number, listed.epoch.mark) == (self.epoch.number, self.epoch.mark):
            self.purges = {order.id: order for order in listed.purges} | self.purges
        for pin in listed.pins:
            owner, held = EngineOwner(pin.engine, pin.uid), _LatestPin(pin.number, pin.until, pin.ended)
            for one in pin.names:
                owners = self._pins.setdefault(one, {})
                owners[owner] = max(held, owners.get(owner, held))

    def left_for(self, listed: Listed) -> list[PurgeRecord]:
        """The purges that a disk has not applied."""
        return [order for order in self.purges.values() if order.id not in listed.applied]

    def unused_s(self, order: PurgeRecord) -> float | None:
        """For how long an object must not have been used until now to fit a purge by age."""
        unused_s = order.fits.unused_s
        return None if unused_s is None else unused_s + self._wall() - order.at

    def listed(self, applied: Iterable[str]) -> Listed:
        """The list of a disk that has applied these. Any thread may use this."""
        given = defaultdict[tuple[EngineOwner, _LatestPin], list[str]](list)
        for one, owners in list(self._pins.items()):
            for pin in list(owners.items()):
                given[pin].append(one)
        pins = [
            PinRecord(held.number, held.until, owner.engine, names, owner.uid, held.ended)
            for (owner, held), names in given.items()
        ]
        purges = self.purges.copy()
        return Listed(self.epoch, list(purges.values()), purges.keys() & applied, pins, self.mounts.copy())

    def tidy(self, *, applied: bool) -> bool:
        """Begin a new epoch if no disk needs the purges of this one, or they are too many. Returns whether it did.

        applied: all disks have applied all purges.
        """
        assert self.epoch is not None
        names = sum(len(one.fits.names or ()) for one in self.purges.values())
        if len(self.purges) <= (MANY_ORDERS - 1 if applied else MOST_ORDERS) and names <= MOST_NAMES:
            return False
        self.epoch = self.epoch.next(max(one.number for one in self.purges.values()))
        self.purges = {}
        return True

    # --- orders -------------------------------------------------------------------------------------

    def purge(self, selection: Selection, by: By, space: str | None, digests: list[str] | None = None) -> PurgeRecord:
        """Begin a purge. space: of the objects of `selection.owner`, if that is set; None if it is not known.

        digests: those of `selection.names`, which take long if they are many.
        """
        if digests is None and selection.names is not None:
            digests = sorted(map(digest, selection.names))
        fits = Fits(selection.model, selection.generation, space, digests, selection.unused_s)
        order = PurgeRecord(f"{self._boot}-{self._next()}", self._wall(), fits, by)
        self.purges[order.id] = order
        return order

    def pin(self, owner: EngineOwner, names: Iterable[str], ttl_s: float) -> None:
        held = _LatestPin(self._next(), self._wall() + ttl_s, False)
        for name in names:
            self._pins.setdefault(digest(name), {})[owner] = held
            for _ in range(2 if len(self._pins) > FEW_PINS else 0):  # a few for each new one: no step looks at all
                self._look_at_next()

    def _look_at_next(self) -> None:
        one, now = next(iter(self._pins)), self._wall()
        if lasting := {owner: held for owner, held in self._pins[one].items() if held.until > now}:
            self._pins[one] = lasting
            self._pins.move_to_end(one)
        else:
            del self._pins[one]

    def unpin(self, names: Iterable[str] | None, owner: EngineOwner | None = None) -> bool:
        """End pins. names, owner: of which objects, and whose; None for all. Returns whether there were any."""
        return self.end(self._pins if names is None else map(digest, names), owner)

    def end(self, digests: Iterable[str], owner: EngineOwner | None) -> bool:
        """The same, of objects by digest."""
        if not self._pins:
            return False
        number, any_ended = self._next(), False
        for one in digests:
            for other, held in self._pins.get(one, {}).items():
                if owner in (None, other) and not held.ended:
                    self._pins[one][other], any_ended = _LatestPin(number, held.until, True), True
        return any_ended

    def pinned(self, name: str) -> Iterator[tuple[EngineOwner, float]]:
        """Who has pinned an object, and for how many seconds from now. Any thread may use this."""
        if self._pins and (owners := self._pins.get(digest(name))):
            now = self._wall()
            yield from [(o, h.until - now) for o, h in list(owners.items()) if h.until > now and not h.ended]

    @property
    def has_given(self) -> bool:
        """Whether a purge was given that some disk may not know."""
        return bool(self.purges) or (self.epoch is not None and self.epoch.number > 1)

    @property
    def has_pins(self) -> bool:
        return bool(self._pins)

    @property
    def digests(self) -> list[str]:
        """All objects with pins."""
        return list(self._pins)

    def _next(self) -> int:
        self._number += 1
        return self._number


def families(lists: Iterable[Listed], holding: Collection[bool]) -> dict[str, int]:
    """The families of disks with objects, each with the position of one such disk. More than one cannot go together."""
    each = enumerate(zip(lists, holding, strict=True))
    return {one.epoch.family: i for i, (one, holds) in each if holds and one.epoch is not None}
