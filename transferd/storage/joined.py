"""A Storage in front of another that joins several engines' simultaneous calls for one object into one.

A rank joins the reads of its own tasks before they get here (workers/flights.py), and object names contain the rank.
So only calls of engines that share objects meet here.

    get   the first call leads and fetches the object. Later ones follow: the bytes are copied to their own buffers,
          and only then does the leader's call return, because its buffer may then be reused
    put   the first call writes. Later ones get EXISTS when the object is stored

A follower gets its leader's answer, even if that is MISSING or FAILED. Every engine checks the bytes that it got.
A call runs to its end even if its caller is cancelled, as in every backend, so a cancellation affects no other caller.

There is no deadlock: the objects that a call leads never wait for those that it follows.

Without a second engine, calls pass through untouched. `Storage.joins_gets` and `joins_puts` say for which backends
this pays (docs/adr/0049).
"""

from __future__ import annotations

import functools
from asyncio import Future, get_running_loop
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transferd.config import StorageSection
from transferd.errors import StorageError, TransferError
from transferd.runtime.aio import answered, every, uncancelled
from transferd.runtime.threads import Direction, Threads
from transferd.storage.base import COLD, EXISTS, Blob, Found, Lent, Outcome, Place, Storage
from transferd.storage.lru import Use
from transferd.tiers.base import INLINE_BYTES, HostMemory

_COUNTED_AS = {Found.FOUND: "hits", Found.MISSING: "misses", Found.FAILED: "errors"}

Call = Callable[[Sequence[Blob]], Awaitable[list[Outcome]]]


@dataclass(slots=True, eq=False)
class Flight:
    """One object in flight. blob: its leader's. followers: the buffers that need the same bytes, and their answers."""

    blob: Blob
    followers: list[tuple[Blob, Future[Outcome]]] = field(default_factory=list)


class FlightBoard:
    """The objects in flight in one direction, by name and length. Changed on the event loop only."""

    def __init__(self) -> None:
        self.joined = 0  # objects that followed another call's
        self._by_object: dict[tuple[str, int], Flight] = {}

    def board(self, blobs: Sequence[Blob]) -> list[Flight | Future[Outcome]]:
        """For each blob: the flight that the caller must lead, or the future answer of the flight that it follows."""
        boarded: list[Flight | Future[Outcome]] = []
        for blob in blobs:
            key = blob.name, blob.data.nbytes
            flight = self._by_object.get(key)
            if flight is None:
                flight = self._by_object[key] = Flight(blob)
                boarded.append(flight)
            else:
                answer: Future[Outcome] = get_running_loop().create_future()
                flight.followers.append((blob, answer))
                boarded.append(answer)
                self.joined += 1
        return boarded

    def land(self, flights: Sequence[Flight]) -> None:
        """Take these flights off the board: no caller can follow them any more, and the next one leads."""
        for flight in flights:
            del self._by_object[flight.blob.name, flight.blob.data.nbytes]

    def __len__(self) -> int:
        return len(self._by_object)


class JoinedStorage(Storage):
    """See the module. All other calls pass through to the storage behind it.

    threads: copy to followers' buffers if there are more than `inline_bytes`; borrowed. several: whether there is a
    second engine now.
    """

    def __init__(
        self, storage: Storage, threads: Threads, several: Callable[[], bool], inline_bytes: int = INLINE_BYTES
    ) -> None:
        self.backend, self.joins_gets, self.joins_puts = storage.backend, storage.joins_gets, storage.joins_puts
        self.loads_in_place, self.bounces = storage.loads_in_place, storage.bounces
        self.collects = 0 if storage.joins_puts else storage.collects
        self.chunk_bytes, self.direct_io = storage.chunk_bytes, storage.direct_io
        self._storage = storage
        self._threads = threads
        self._several = several
        self._inline_bytes = inline_bytes
        self._gets, self._puts = FlightBoard(), FlightBoard()
        self._counts: Counter[str] = Counter()

    def put(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        if not self.joins_puts or not self._several():
            return self._storage.put(blobs)
        return self._to_the_end(self._puts, self._storage.put, blobs)

    def put_lent(self, blocks: Sequence[Lent], at_once: int) -> Awaitable[list[Outcome]]:
        return self._storage.put_lent(blocks, at_once)

    def get(self, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
        if not self.joins_gets or not self._several():
            return self._storage.get(blobs)
        return self._to_the_end(self._gets, self._storage.get, blobs)

    def get_in_place(self, places: Sequence[Place], at_once: int | None = None) -> Awaitable[list[Outcome]]:
        """Not joined: copying from a leader's block would cost as much as copying from the storage's memory.

        If a medium is read, the answer with several engines is COLD, so that each comes with `get`, which is joined.
        """
        if self.bounces and self._several():
            return answered([COLD] * len(places))
        return self._storage.get_in_place(places, at_once)

    async def _to_the_end(self, flights: FlightBoard, call: Call, blobs: Sequence[Blob]) -> list[Outcome]:
        return await uncancelled(self._join(flights, call, blobs))

    async def _join(self, flights: FlightBoard, call: Call, blobs: Sequence[Blob]) -> list[Outcome]:
        boarded = flights.board(blobs)
        led = [flight for flight in boarded if isinstance(flight, Flight)]
        if len(led) == len(boarded):
            return await self._lead(flights, call, led)
        followed = [answer for answer in boarded if not isinstance(answer, Flight)]
        answers = await every([self._lead(flights, call, led), _all(followed)])
        places = {True: iter(answers[0]), False: iter(answers[1])}
        return [next(places[isinstance(flight, Flight)]) for flight in boarded]

    async def _lead(self, flights: FlightBoard, call: Call, led: Sequence[Flight]) -> list[Outcome]:
        """Make the call for these objects, and pass its results on to their followers. Raises what the call raises."""
        if not led:
            return []
        try:
            outcomes = await call([flight.blob for flight in led])
        except BaseException as error:
            flights.land(led)
            for flight in led:
                self._answer(flight, _failed(error))
            raise
        flights.land(led)
        await self._share(flights, led, outcomes)
        return outcomes

    async def _share(self, flights: FlightBoard, led: Sequence[Flight], outcomes: Sequence[Outcome]) -> None:
        pairs = [
            (flight.blob.data, blob.data)
            for flight, outcome in zip(led, outcomes, strict=True)
            if flights is self._gets and outcome.found is Found.FOUND
            for blob, _ in flight.followers
        ]
        problem: Outcome | None = None
        try:
            await self._copy(pairs)
        except BaseException as error:
            problem = _failed(error)
            if not isinstance(error, TransferError):
                raise
        finally:
            for flight, outcome in zip(led, outcomes, strict=True):
                self._answer(flight, problem if problem is not None and outcome.found is Found.FOUND else outcome)

    def _answer(self, flight: Flight, outcome: Outcome) -> None:
        told = EXISTS if outcome.found is Found.STORED else outcome
        self._counts[_COUNTED_AS.get(told.found, "")] += len(flight.followers)
        for _, answer in flight.followers:
            if not answer.done():
                answer.set_result(told)

    async def _copy(self, pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
        if not pairs or sum(source.nbytes for source, _ in pairs) <= self._inline_bytes:
            _copy_each(pairs)
        else:
            await self._threads.run(Direction.IN, functools.partial(_copy_each, pairs), "copies of a shared load")

    # --- the storage behind -------------------------------------------------------------------------

    async def open(self) -> None:
        await self._storage.open()

    async def close(self) -> None:
        await self._storage.close()

    def abandon(self) -> list[str]:
        return self._storage.abandon()

    def register(self, memory: HostMemory) -> None:
        self._storage.register(memory)

    def unregister(self, memory: HostMemory) -> None:
        self._storage.unregister(memory)

    def expect(self, possible: Callable[[str, int], bool]) -> None:
        self._storage.expect(possible)

    def reconfigure(self, storage: StorageSection) -> None:
        self._storage.reconfigure(storage)

    def tell_departures(self, left: Callable[[str], None]) -> bool:
        return self._storage.tell_departures(left)

    def holds(self, name: str) -> bool:
        return self._storage.holds(name)

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return await self._storage.exists(names)

    def look_up(self, names: Sequence[str], use: Use) -> Awaitable[list[bool]]:
        return self._storage.look_up(names, use)

    def quarantine(self, name: str) -> Awaitable[None]:
        return self._storage.quarantine(name)

    def statistics(self) -> dict[str, Any]:
        """The backend's statistics, plus the answers to followers and the number of objects that followed."""
        told, more = self._storage.statistics(), self._counts
        told |= {key: (told.get(key) or 0) + more[key] for key in ("hits", "misses", "errors")}
        return told | {"shared_loads": self._gets.joined, "shared_stores": self._puts.joined}


def joined(
    storage: Storage, threads: Threads, several: Callable[[], bool], inline_bytes: int = INLINE_BYTES
) -> Storage:
    """`storage` for several engines, or `storage` itself if joining calls gains nothing. See JoinedStorage."""
    if storage.joins_gets or storage.joins_puts:
        return JoinedStorage(storage, threads, several, inline_bytes)
    return storage


async def _all(answers: Sequence[Future[Outcome]]) -> list[Outcome]:
    return [await answer for answer in answers]


def _failed(error: BaseException) -> Outcome:
    """A failure as the followers' answer: a new error, without the frames that hold the leader's buffers."""
    code = error.reason if isinstance(error, TransferError) else None
    return Outcome(Found.FAILED, StorageError(f"the load or store that this one joined failed: {error}", code=code))


def _copy_each(pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
    for source, target in pairs:
        np.copyto(np.asarray(target), np.asarray(source))
