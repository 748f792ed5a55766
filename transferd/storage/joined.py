"""Single flight: simultaneous calls for one object become one call, whatever tasks they are of.

    load   the first call leads and loads the object. Later ones follow as *riders*: the thread that has the bytes also
           gives them to the riders, or this module copies them from the leader's slot. Only then does the leader's call
           return, because its slot may then be reused
    store  the first call writes. Later ones get EXISTS when the object is stored

A rider gets its leader's answer, even if that is MISSING or FAILED. Each call checks the bytes that it got. If the
leader's task has ended before any rider got the bytes, a rider loads the object itself. No call follows a load older
than FOLLOW_S: the load may wait for a node or a disk that does not answer, while a new load is answered. A call runs to
its end even if its caller is cancelled, as in every backend, so a cancellation affects no other caller.

There is no deadlock: within a call, led objects never wait for followed objects, and a leader needs no rider's slot.

Loads are joined where they cost more than a copy in memory, and stores where the backend has no index (docs/adr/0049).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from asyncio import CancelledError, Future, get_running_loop
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from transferd.errors import StorageError, TransferError
from transferd.runtime.aio import Later, uncancelled
from transferd.runtime.threads import Direction, Threads
from transferd.storage.base import (
    EXISTS,
    FOUND,
    LEFT,
    STORED,
    Drainer,
    Fill,
    Found,
    FrontStorage,
    Item,
    Outcome,
    Outcomes,
    Storage,
    added,
)
from transferd.storage.lent import Lent, chosen, chosen_call, lent_by
from transferd.tiers.base import INLINE_BYTES

FOLLOW_S = 2.0  # far longer than a load that moves its bytes

_COUNTED_AS = {Found.FOUND: "hits", Found.MISSING: "misses", Found.FAILED: "errors"}

Load = Callable[[Sequence[Item], Drainer | None, Sequence[memoryview]], Awaitable[list[Outcome]]]


@dataclass(slots=True, eq=False)
class Rider:
    """One object that another call loads. position: in the call that `drain` is of."""

    drain: Drainer
    position: int
    # the outcome; None if the rider must load the object itself
    answer: Future[Outcome | None] = field(default_factory=lambda: get_running_loop().create_future())
    taken: Outcome | None = None  # set by the thread that gave it the bytes

    def take(self, data: memoryview) -> None:
        """Take the bytes, in any thread."""
        self.taken = FOUND if self.drain(self.position, data) else LEFT


@dataclass(slots=True)
class _ToSlots:
    """The drain of a call that wants its objects in its slots."""

    _slots: Sequence[memoryview]
    wanted: bool = True

    def __call__(self, i: int, data: memoryview, /) -> bool:
        np.copyto(np.asarray(self._slots[i]), np.asarray(data))
        return True


@dataclass(slots=True, eq=False)
class Flight:
    """One object in flight, and its riders."""

    item: Item
    position: int  # in its leader's call
    begun: float  # when, in seconds of the event loop
    riders: list[Rider] = field(default_factory=list)
    waiting: list[Rider] = field(default_factory=list)  # those without the bytes yet
    busy: bytearray = field(default_factory=lambda: bytearray(1))  # and `number`: the mark in `Lent.busy`
    number: int = 0

    def board(self, rider: Rider) -> None:
        self.riders.append(rider)
        self.waiting.append(rider)
        self.busy[self.number] = True

    def serve(self, data: memoryview) -> None:
        """Give the bytes to the riders that wait for them, in any thread."""
        while self.waiting:
            self.waiting.pop().take(data)


class SharedDrain:
    """The drain of a call that leads: it also serves the riders."""

    def __init__(self, drain: Drainer, led: Sequence[Flight]) -> None:
        self._drain, self._led = drain, led
        lent = lent_by(drain)
        if lent is not None:
            numbers = [lent.numbers[flight.position] for flight in led]
            lent = Lent(lent.blocks, numbers, bytearray(max(numbers) + 1))
            for flight, number in zip(led, numbers, strict=True):
                flight.busy, flight.number = lent.busy, number
                lent.busy[number] = bool(flight.waiting)
        self.lent = lent

    @property
    def wanted(self) -> bool:
        return self._drain.wanted or any(rider.drain.wanted for flight in self._led for rider in flight.waiting)

    def __call__(self, i: int, data: memoryview, /) -> bool:
        flight = self._led[i]
        taken = self._drain(flight.position, data)
        flight.serve(data)
        return taken


class SingleFlight:
    """Joins the calls of `call` in one direction. Its state changes on the event loop only.

    threads: copy to riders' slots if there are more than `inline_bytes`; borrowed.
    loads: False for stores: their riders need no bytes.
    """

    def __init__(self, call: Load, threads: Threads, inline_bytes: int = INLINE_BYTES, *, loads: bool = True) -> None:
        self.joined = 0  # objects that followed another call's
        self.counts: Counter[str] = Counter()  # the answers to riders
        self._call = call
        self._threads = threads
        self._inline_bytes = inline_bytes
        self._loads = loads
        self._by_object: dict[tuple[str, int, tuple[int, int] | None], Flight] = {}

    def __len__(self) -> int:
        return len(self._by_object)

    async def run(self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        led, followed = self._board(items, drain, slots)
        if not followed:  # the usual case needs no asyncio task
            return await self._lead(led, drain, slots)
        return await uncancelled(self._follow(led, followed, items, drain, slots))

    async def _follow(
        self,
        led: Sequence[Flight],
        followed: Sequence[tuple[int, Rider]],
        items: Sequence[Item],
        drain: Drainer | None,
        slots: Sequence[memoryview],
    ) -> list[Outcome]:
        """A call that follows others, and perhaps leads as well."""
        try:
            own = await self._lead(led, drain, slots)
        finally:  # until then, other calls write to its slots
            await asyncio.wait([rider.answer for _, rider in followed])
        late = [own.returned] if isinstance(own, Outcomes) else []
        outcomes: dict[int, Outcome | None] = {position: rider.answer.result() for position, rider in followed}
        outcomes.update(zip((flight.position for flight in led), own, strict=True))
        again = [position for position, _ in followed if outcomes[position] is None]
        if again:
            free = slots if drain is not None else chosen(slots, again)
            rest = await self.run(chosen(items, again), chosen_call(drain, again), free)
            outcomes.update(zip(again, rest, strict=True))
            if isinstance(rest, Outcomes):
                late.append(rest.returned)
        return Outcomes.after([outcome for i in range(len(items)) if (outcome := outcomes[i]) is not None], late)

    def _board(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> tuple[list[Flight], list[tuple[int, Rider]]]:
        """The flights that the caller must lead, and how it follows others, by position."""
        led, followed = [], []
        now = get_running_loop().time()
        for position, item in enumerate(items):
            key = item.name, item.nbytes, item.span  # a call for other bytes of the object does not follow
            flight = self._by_object.get(key)
            if flight is None or (self._loads and now - flight.begun > FOLLOW_S):
                flight = self._by_object[key] = Flight(item, position, now)
                led.append(flight)
                continue
            rider = Rider(drain or _ToSlots(slots), position)
            flight.board(rider)
            followed.append((position, rider))
            self.joined += 1
        return led, followed

    async def _lead(self, led: Sequence[Flight], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        """Make the call for these objects, and pass its results on to their riders. Raises the call's error."""
        if not led:
            return []
        shared = None if drain is None else SharedDrain(drain, led)
        own = slots[: len(led)] if drain is not None else [slots[flight.position] for flight in led]
        try:
            outcomes = await self._call([flight.item for flight in led], shared, own)
        except BaseException as error:
            self._land(led)
            for flight in led:
                self._answer(flight, _failed(error))
            raise
        self._land(led)
        served = own if drain is None and self._loads else [None] * len(led)
        await self._share(led, outcomes, served)
        return outcomes

    def _land(self, flights: Sequence[Flight]) -> None:
        """Let no further call follow these flights: the next call leads."""
        for flight in flights:
            key = flight.item.name, flight.item.nbytes, flight.item.span
            if self._by_object.get(key) is flight:  # else a later call, which did not follow, leads now
                del self._by_object[key]

    async def _share(
        self, led: Sequence[Flight], outcomes: Sequence[Outcome], slots: Sequence[memoryview | None]
    ) -> None:
        """Give the bytes in the leader's slots to its riders, and to each its answer."""
        late = [
            (flight, slot)
            for flight, outcome, slot in zip(led, outcomes, slots, strict=True)
            if slot is not None and outcome.found is Found.FOUND and flight.waiting
        ]
        nbytes = sum(flight.item.nbytes * len(flight.waiting) for flight, _ in late)
        try:
            if nbytes <= self._inline_bytes:
                _serve(late)
            else:
                with contextlib.suppress(TransferError):  # the riders load their objects themselves
                    await self._threads.run(Direction.IN, functools.partial(_serve, late), "copies of a shared load")
        finally:
            for flight, outcome in zip(led, outcomes, strict=True):
                self._answer(flight, outcome)

    def _answer(self, flight: Flight, outcome: Outcome | None) -> None:
        for rider in flight.riders:
            answer = outcome
            if rider.taken is not None:
                answer = rider.taken
            elif outcome is STORED:
                answer = EXISTS
            elif self._loads and outcome in (FOUND, LEFT):
                answer = None  # it came after the leader's thread had finished, or the leader dropped the bytes
            if answer is not None:
                self.counts[_COUNTED_AS.get(answer.found, "")] += 1
            rider.answer.set_result(answer)


class JoinedStorage(FrontStorage):
    """A Storage that joins simultaneous calls for one object. See the module."""

    def __init__(self, storage: Storage, threads: Threads, inline_bytes: int = INLINE_BYTES) -> None:
        super().__init__(storage)
        self._loads = SingleFlight(storage.load, threads, inline_bytes)
        self._stores = SingleFlight(cast("Load", storage.store), threads, loads=False)  # always without a `fill`

    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]:
        return Later(functools.partial(self._loads.run, items, drain, slots))

    def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
        if self.slots_at_once is not None:  # the backend joins stores of one name itself (indexed.py)
            return self._behind.store(items, fill, slots)
        return Later(functools.partial(self._stores.run, items, None, slots))

    def statistics(self) -> dict[str, Any]:
        """The backend's statistics, plus the answers to riders and the number of objects that followed."""
        joined = {"shared_loads": self._loads.joined, "shared_stores": self._stores.joined}
        return added(self._behind.statistics(), self._loads.counts + self._stores.counts) | joined


def joined(storage: Storage, threads: Threads, inline_bytes: int = INLINE_BYTES) -> Storage:
    """`storage` with simultaneous calls joined, or `storage` itself if its objects lie in memory."""

    def wrap(one: Storage) -> Storage:
        if one.slots_at_once == 0:
            return one
        return JoinedStorage(one, threads, inline_bytes)  # type: ignore[abstract] # FrontStorage has every method

    return storage.join(wrap)


def _failed(error: BaseException) -> Outcome | None:
    """A failure as the riders' answer: a new error, without the frames that hold the leader's buffers.

    None if the leader was cancelled, which does not concern the riders.
    """
    if isinstance(error, CancelledError):
        return None
    code = error.reason if isinstance(error, TransferError) else None
    return Outcome(Found.FAILED, StorageError(f"the load or store that this one joined failed: {error}", code=code))


def _serve(late: Sequence[tuple[Flight, memoryview]]) -> None:
    for flight, slot in late:
        flight.serve(slot)
