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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from transferd.blocks.keys import encode_text
from transferd.storage.pins import KeptPin
from transferd.storage.queues import EngineOwner, space_of
from transferd.storage.selection import Selection

MOST_NAMES = 65_536  # of one order
MOST_ORDERS = 4096  # purges that are remembered for a disk that is away; with more it is emptied when it returns
MANY_ORDERS = 64  # purges that all disks have applied and that are still listed
MOST_BYTES = 4 * 1024**2  # of a list


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


class OrderRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record of a list. kind: `purge`, `pin`, `unpin`, or `applied`: this disk has done the purge of this id."""

    id: str
    kind: str
    at: float = 0.0  # Unix time
    by: By | None = None
    fits: Fits | None = None
    engine: str = ""  # of a pin
    uid: int | None = None
    until: float = 0.0  # Unix time
    names: list[str] = []  # digests of what is pinned

    @property
    def number(self) -> int:
        """Its place among all orders, also those of earlier processes."""
        return int(self.id.rpartition("-")[2])


class Head(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first record of a list. store: names this disk's store. before, last: see `Epoch`."""

    store: str
    epoch: tuple[int, str]
    family: str
    since: float
    before: tuple[int, str] | None = None
    last: int = 0


@dataclass(frozen=True, slots=True)
class Epoch:
    """before, last: the epoch that it follows, and the number of the last purge of that one."""

    number: int
    mark: str
    family: str
    before: tuple[int, str] | None = None
    last: int = 0

    @classmethod
    def first(cls) -> Epoch:
        return cls(1, secrets.token_hex(8), secrets.token_hex(8))

    @classmethod
    def of(cls, head: Head) -> Epoch:
        return cls(*head.epoch, head.family, head.before, head.last)

    def next(self, last: int) -> Epoch:
        return Epoch(self.number + 1, secrets.token_hex(8), self.family, (self.number, self.mark), last)

    def head(self, store: str, since: float) -> Head:
        return Head(store, (self.number, self.mark), self.family, since, self.before, self.last)


def digest(name: str) -> str:
    """An object's name as orders say it."""
    return hashlib.blake2b(encode_text(name)).hexdigest()[:32]


@dataclass(slots=True)
class Listed:
    """What a disk's list says. problem: why it cannot be read; then the disk may have missed any order."""

    head: Head | None = None
    orders: list[OrderRecord] = field(default_factory=list)
    applied: set[str] = field(default_factory=set)
    problem: str = ""

    def add(self, order: OrderRecord) -> None:
        if order.kind == "applied":
            self.applied.add(order.id)
        else:
            self.orders.append(order)

    @property
    def purges(self) -> list[OrderRecord]:
        return [order for order in self.orders if order.kind == "purge"]

    def follows(self, epoch: Epoch) -> str:
        """Why this disk may have missed orders before this epoch; "" if it has not."""
        if self.problem:
            return f"its orders cannot be read: {self.problem}"
        if self.head is None:
            return "it has no list of orders"
        if self.head.epoch == (epoch.number, epoch.mark):
            return ""
        done = all(order.id in self.applied for order in self.purges)
        last = max((order.number for order in self.purges), default=self.head.last)
        if self.head.epoch == epoch.before and done and last >= epoch.last:
            return ""  # the daemon ended while it began the new epoch, and this disk was not yet told
        if self.head.family != epoch.family:
            return "it belongs to another daemon's store"
        return "it was away while orders were given that no disk lists any more"


class Overdue:
    """Purges, for a disk that has not applied them. everything: all of its objects go."""

    def __init__(self, orders: Iterable[OrderRecord], *, everything: bool) -> None:
        self.everything = everything
        each = [(order.at, order.fits) for order in orders if order.fits is not None]
        self._tests = [_test_of(at, fits) for at, fits in each]
        self.removed = 0
        # Whatever is in the quarantine may fit: its files do not say their objects' names.
        self.aside_until = max(
            [math.inf if fits.unused_s is None else at - fits.unused_s for at, fits in each], default=0.0
        )
        if everything:
            self.aside_until = math.inf

    def __bool__(self) -> bool:
        return self.everything or bool(self._tests)

    def fits(self, name: str, written: float) -> bool:
        """written: when the object was stored, in Unix time."""
        fits = self.everything or any(test(name, written) for test in self._tests)
        self.removed += fits
        return fits


def _test_of(at: float, fits: Fits) -> Callable[[str, float], bool]:
    selection = Selection(model=fits.model, generation=fits.generation)
    digests = None if fits.names is None else frozenset(fits.names)

    def test(name: str, written: float) -> bool:
        if fits.unused_s is not None and written > at - fits.unused_s:
            return False  # it was used when it was written, or later
        if fits.space is not None and space_of(name) != fits.space:
            return False
        return selection.fits(name) and (digests is None or digest(name) in digests)

    return test


class OrderBook:
    """All orders of one file backend: the union of its disks' lists. Used on one loop; `digests` from any thread.

    wall: Unix time.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self.epoch: Epoch | None = None
        self.purges: dict[str, OrderRecord] = {}  # of this epoch
        self._wall = wall
        self._boot = secrets.token_hex(4)
        self._number = 0  # of the latest order
        # by object and owner: the number of the latest order about this pin, and its end; 0 if it was ended
        self._pins: dict[str, dict[EngineOwner, tuple[int, float]]] = {}

    # --- the lists of disks -------------------------------------------------------------------------

    def begin(self, lists: Sequence[Listed], holding: Sequence[bool]) -> None:
        """At the start: take up these lists, of the disks that are there. The newest epoch counts.

        holding: of each disk, whether it has objects. A disk without any gives way to those of another family.
        """
        heads = [one.head for one in lists if one.head is not None]
        family = next(iter(families(lists, holding)), None)
        newest = max(
            (head for head in heads if family in (None, head.family)),
            key=lambda head: (head.epoch, head.since),
            default=None,
        )
        self.epoch = Epoch.first() if newest is None else Epoch.of(newest)
        for one in lists:
            self.learn(one)

    def follow(self, listed: Listed) -> None:
        """The only disk has returned. If no purge was given, it has missed none, also if another daemon used it."""
        if listed.head is not None and not self.has_given:
            self.epoch = Epoch.of(listed.head)

    def learn(self, listed: Listed) -> None:
        """Take up a disk's orders, unless it is one that is emptied."""
        assert self.epoch is not None
        for order in listed.orders:
            self._number = max(self._number, order.number)
        self._number = max(self._number, 0 if listed.head is None else listed.head.last)
        if listed.follows(self.epoch) and listed.head is not None:
            return
        current = listed.head is not None and listed.head.epoch == (self.epoch.number, self.epoch.mark)
        for order in listed.orders:
            if order.kind == "purge" and current:
                self.purges.setdefault(order.id, order)
            elif order.kind in ("pin", "unpin"):
                self._take(order)

    def left_for(self, listed: Listed) -> list[OrderRecord]:
        """The purges that a disk has not applied."""
        return [order for order in self.purges.values() if order.id not in listed.applied]

    def everything(self, applied: Iterable[str]) -> list[OrderRecord]:
        """The records of a disk's list, after its head."""
        done = [OrderRecord(one, "applied") for one in dict.fromkeys(applied) if one in self.purges]
        return [*self.purges.values(), *done, *self._pin_orders()]

    def forget(self) -> None:
        """Begin a new epoch: no disk needs the purges of this one any more, or it will be emptied."""
        assert self.epoch is not None
        self.epoch = self.epoch.next(max((one.number for one in self.purges.values()), default=self.epoch.last))
        self.purges.clear()
        now = self._wall()
        for digest_, owners in list(self._pins.items()):
            for owner in [owner for owner, (_, until) in owners.items() if until <= now]:
                del owners[owner]
            if not owners:
                del self._pins[digest_]

    # --- orders -------------------------------------------------------------------------------------

    def purge(self, selection: Selection, by: By, space: str | None) -> list[OrderRecord]:
        """Begin a purge. space: of the objects of `selection.owner`, if that is set; None if it is not known."""
        at, digests = self._wall(), None if selection.names is None else sorted(map(digest, selection.names))
        fits = Fits(selection.model, selection.generation, space, digests, selection.unused_s)
        parts = [fits]
        if digests is not None:
            parts = [
                msgspec.structs.replace(fits, names=digests[start : start + MOST_NAMES])
                for start in range(0, len(digests), MOST_NAMES)
            ]
        orders = [OrderRecord(self._next(), "purge", at, by, part) for part in parts]
        self.purges.update((order.id, order) for order in orders)
        return orders

    def pin(self, owner: EngineOwner, names: Iterable[str], ttl_s: float) -> list[OrderRecord]:
        return self._about("pin", owner, map(digest, names), self._wall() + ttl_s)

    def unpin(self, owner: EngineOwner, names: Iterable[str] | None) -> list[OrderRecord]:
        """End pins of an owner; None: all of them."""
        mine = (one for one, owners in self._pins.items() if owners.get(owner, (0, 0.0))[1])
        return self._about("unpin", owner, list(mine) if names is None else map(digest, names), 0.0)

    def purged(self, names: Iterable[str]) -> list[OrderRecord]:
        """End all pins of objects that a purge has removed."""
        ended, now = defaultdict[EngineOwner, list[str]](list), self._wall()
        for one in map(digest, names) if self._pins else ():
            for owner, (_, until) in self._pins.get(one, {}).items():
                if until > now:
                    ended[owner].append(one)
        return [order for owner, these in ended.items() for order in self._about("unpin", owner, these, 0.0)]

    def pinned(self, name: str) -> Iterator[tuple[EngineOwner, float]]:
        """Who has pinned an object, and for how many seconds from now. Any thread may use this."""
        if self._pins and (owners := self._pins.get(digest(name))):
            now = self._wall()
            yield from [(owner, until - now) for owner, (_, until) in owners.copy().items() if until > now]

    def restore(self, pins: Iterable[KeptPin]) -> None:
        """Take up pins that an earlier release has kept."""
        for pin in pins:
            if isinstance(pin.owner, EngineOwner):
                self._about("pin", pin.owner, [digest(pin.name)], self._wall() + pin.left_s)

    @property
    def has_given(self) -> bool:
        """Whether a purge was given that some disk may not know."""
        return bool(self.purges) or (self.epoch is not None and self.epoch.number > 1)

    @property
    def has_pins(self) -> bool:
        return bool(self._pins)

    # --- inside -------------------------------------------------------------------------------------

    def _next(self) -> str:
        self._number += 1
        return f"{self._boot}-{self._number}"

    def _about(self, kind: str, owner: EngineOwner, digests: Iterable[str], until: float) -> list[OrderRecord]:
        these, at = list(digests), self._wall()
        orders = [
            OrderRecord(
                self._next(),
                kind,
                at,
                engine=owner.engine,
                uid=owner.uid,
                until=until,
                names=these[start : start + MOST_NAMES],
            )
            for start in range(0, len(these), MOST_NAMES)
        ]
        for order in orders:
            self._take(order)
        return orders

    def _take(self, order: OrderRecord) -> None:
        owner, until = EngineOwner(order.engine, order.uid), order.until if order.kind == "pin" else 0.0
        for one in order.names:
            owners = self._pins.setdefault(one, {})
            if owners.get(owner, (0, 0.0))[0] < order.number:
                owners[owner] = order.number, until

    def _pin_orders(self) -> list[OrderRecord]:
        """The pins as they are now: an order for each that was given."""
        given = defaultdict[tuple[int, EngineOwner, float], list[str]](list)
        for one, owners in self._pins.items():
            for owner, (number, until) in owners.items():
                given[number, owner, until].append(one)
        return [
            OrderRecord(
                f"{self._boot}-{number}",
                "pin" if until else "unpin",
                engine=owner.engine,
                uid=owner.uid,
                until=until,
                names=names,
            )
            for (number, owner, until), names in sorted(given.items(), key=lambda item: item[0][0])
        ]


def families(lists: Iterable[Listed], holding: Iterable[bool]) -> dict[str, int]:
    """The families of disks with objects, each with the position of one such disk. More than one cannot go together."""
    heads = [(i, one.head) for i, (one, holds) in enumerate(zip(lists, holding, strict=True)) if holds]
    return {head.family: i for i, head in heads if head is not None}
