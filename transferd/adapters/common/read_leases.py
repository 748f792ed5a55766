"""Read leases: objects that this process reads itself, from their files, while the daemon keeps them (docs/adr/0121).

The answer to a look-up says in which directory each object lies. A read takes what the page cache has, and never waits
for a disk's bytes; it proves key, model, layout, generation and content by the object's footer, as the daemon does.
What it cannot read or prove is the daemon's to load, which also finds and reports the damage.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transferd.adapters.common.link import ANSWER_S, UNANSWERED, Link
from transferd.blocks.formats import ObjectNamer, Stamp, unsealed_footer
from transferd.storage.file_io import NATIVE, load_warm
from transferd.storage.opening import READ_FLAGS
from transferd.storage.paths import path_of
from transferd.tiers.offered import identity_of
from transferd.wire.answers import BlockPlaces, StoreDirectory

LEASE_S = 10.0  # from a look-up to its load: engines do not say what they will not load
READERS = 4  # threads
ALONE_BYTES = 8 * 1024**2  # of a request, that are worth other threads


if NATIVE:
    from transferd.storage import _files

WarmOrder = tuple[str, Sequence[memoryview], bytes]  # of `load_warm`


class ReadLease(NamedTuple):
    """until: monotonic seconds."""

    until: float
    path: str
    stamp: Stamp


class ReadLeases:
    """Thread-safe. It keeps no file open, so that a disk can be unmounted."""

    def __init__(self) -> None:
        self._held: dict[str, ReadLease] = {}
        self._changes = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._held)

    def take(self, keys: Sequence[str], places: BlockPlaces | None, until: float) -> None:
        """Note where these blocks lie. until: monotonic seconds, when the daemon may let go of them."""
        if places is None:
            return
        namer, there = ObjectNamer(places.model, places.fingerprint), [_is_there(one) for one in places.directories]
        digests = namer.ids(keys)
        names = namer.names(places.generation, digests, places.rank)
        marks = namer.stamps(places.generation, digests, places.rank)
        with self._changes:
            while (key := next(iter(self._held), None)) is not None and self._held[key].until < time.monotonic():
                del self._held[key]  # nobody has given it back
            for key, name, stamp, where in zip(keys, names, marks, places.where, strict=True):
                if where is not None and there[where]:
                    self._held.pop(key, None)  # the oldest come first
                    self._held[key] = ReadLease(until, places.directories[where].path + path_of(name), stamp)

    def end(self, keys: Iterable[str]) -> None:
        with self._changes:
            for key in keys:
                self._held.pop(key, None)

    def orders(self, keys: Sequence[str], pieces: Sequence[Sequence[memoryview]]) -> list[WarmOrder | None]:
        """For each block how it is read to these pieces; None if it is not leased."""
        now, found = time.monotonic(), list(map(self._held.get, keys))
        return [
            None
            if lease is None or now > lease.until
            else (lease.path, some, unsealed_footer(sum([piece.nbytes for piece in some]), lease.stamp))
            for lease, some in zip(found, pieces, strict=True)
        ]


class LeasedBlocks:
    """What one engine's look-ups have leased, and threads that read it. Thread-safe."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._leases = ReadLeases()
        self._readers = WarmReaders(READERS, link.program.log)

    def __bool__(self) -> bool:
        return bool(self._leases)

    def look_up(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether its block can be loaded. All False if the daemon does not answer in time."""
        leases, until = self._leases, time.monotonic() + LEASE_S
        try:
            found = self._link.lease(keys, LEASE_S).result(ANSWER_S)
        except (RuntimeError, *UNANSWERED):  # the link is closed, or closing
            return [False] * len(keys)
        leases.take(keys, found.places, until)
        return found.there

    def forget(self) -> None:
        """From now on nothing is read that was looked up before, nor what is being looked up."""
        self._leases = ReadLeases()

    def begin_reading(
        self, keys: Sequence[str], pieces: Sequence[Sequence[memoryview]], ended: Callable[[list[bool]], None]
    ) -> None:
        """Read what is leased. ended: called once with which blocks have been read, perhaps before this returns."""
        self._readers.begin(self._leases.orders(keys, pieces), ended)

    def read(self, keys: Sequence[str], pieces: Sequence[Sequence[memoryview]]) -> list[bool]:
        """Like `begin_reading`, and wait."""
        if sum(piece.nbytes for one in pieces for piece in one) < ALONE_BYTES:  # other threads would only take time
            return read(self._leases.orders(keys, pieces))
        done: concurrent.futures.Future[list[bool]] = concurrent.futures.Future()
        self.begin_reading(keys, pieces, done.set_result)
        return done.result()

    def close(self) -> None:
        """Wait for the reads that run."""
        self._readers.close()


def read(orders: Sequence[WarmOrder | None]) -> list[bool]:
    """Read blocks. False, with any bytes in the pieces, for one that is not leased, cached and intact."""
    found = iter(load_warm([one for one in orders if one is not None], READ_FLAGS))
    return [one is not None and next(found) for one in orders]


class WarmReaders:
    """Threads that read blocks without the interpreter, also while it prepares the next ones. Thread-safe."""

    def __init__(self, threads: int, log: logging.Logger) -> None:
        self._threads, self._log = threads, log
        self._starting = threading.Lock()
        self._readers: Any = None  # none before they are needed
        self._reporter: threading.Thread | None = None

    def begin(self, orders: Sequence[WarmOrder | None], ended: Callable[[list[bool]], None]) -> None:
        """ended: called once with what `read` would return, in another thread, or before this returns."""

        def report(found: list[bool]) -> None:
            one = iter(found)
            ended([order is not None and next(one) for order in orders])

        begun = False
        if NATIVE and any(orders):
            # there may be no more threads, or memory that nobody may write to, or this is closed
            with contextlib.suppress(BufferError, OSError, RuntimeError):
                leased = [one for one in orders if one is not None]
                _files.begin_warm(self._started(), leased, READ_FLAGS, report)
                begun = True
        if not begun:
            ended([False] * len(orders))

    def close(self) -> None:
        """Wait until all that was begun has ended. Idempotent."""
        if self._reporter is not None:
            _files.end_warm(self._readers)
            self._reporter.join()

    def _started(self) -> Any:
        with self._starting:
            if self._reporter is None:
                self._readers = _files.warm_readers(self._threads)
                reporter = threading.Thread(target=self._report, name="transferd-read", daemon=True)
                try:
                    reporter.start()
                except RuntimeError:
                    _files.end_warm(self._readers)
                    raise
                self._reporter = reporter
            return self._readers

    def _report(self) -> None:
        while done := _files.finished_warm(self._readers):
            for ended, found in done:
                try:
                    ended(found)
                except Exception:  # noqa: BLE001 - the others wait for their ends
                    self._log.exception("transferd: an error of the adapter, not of the daemon")


def _is_there(place: StoreDirectory) -> bool:
    """Whether the path leads to the daemon's directory: in a container it may be another one, or none."""
    try:
        return identity_of(Path(place.path)) == (place.device, place.inode)
    except OSError:
        return False
