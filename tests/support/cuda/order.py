"""Happens-before: which pieces of work on a device are in an order, and which only happen to have one.

Streams, events and the host each have a vector clock. Work on a stream knows what came before it: what
was on the stream, what the stream waited for, what the host had seen the end of. Two pieces of work on
the same bytes, one of them writing, of which neither knows of the other, are a race, whatever order they
ran in this time. (Lamport's order with vector clocks, as race detectors for threads use it.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Clock = dict[int, int]  # stream → how many pieces of its work are known to have happened


class Spans:
    """Ranges of addresses, merged and sorted."""

    def __init__(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
        keep = sizes > 0
        starts, ends = starts[keep], starts[keep] + sizes[keep]
        order = np.argsort(starts)
        starts, ends = starts[order], np.maximum.accumulate(ends[order]) if len(ends) else ends
        first = np.concatenate(([True], starts[1:] > ends[:-1])) if len(starts) else np.zeros(0, dtype=bool)
        self.starts = starts[first]
        self.ends = np.append(ends[:-1][first[1:]], ends[-1:]) if len(starts) else ends

    @classmethod
    def one(cls, start: int, nbytes: int) -> Spans:
        return cls(np.array([start], dtype=np.int64), np.array([nbytes], dtype=np.int64))

    def meets(self, other: Spans) -> bool:
        """They have a byte in common."""
        if not len(self.starts) or not len(other.starts):
            return False
        behind = np.searchsorted(other.ends, self.starts, side="right")
        inside = behind < len(other.ends)
        return bool((other.starts[behind[inside]] < self.ends[inside]).any())


NOTHING = Spans(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(eq=False, slots=True)
class Work:
    """One piece of work, as the host submitted it. tick: its number on its stream."""

    what: str
    stream: int
    tick: int
    reads: Spans
    writes: Spans

    def meets(self, other: Work) -> bool:
        return self.writes.meets(other.writes) or self.writes.meets(other.reads) or self.reads.meets(other.writes)


class Order:
    """The clocks, and all work whose end the host has not seen."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self._streams: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._host: Clock = {}
        self._unseen: list[Work] = []

    def begin(self, what: str, stream: int, reads: Spans = NOTHING, writes: Spans = NOTHING) -> Work:
        """Work that is put on a stream now. Races with earlier work are written down."""
        clock = self._clock(stream)
        tick = clock.get(stream, 0) + 1
        clock[stream] = tick
        work = Work(what, stream, tick, reads, writes)
        self.races.extend(
            f"{other.what} on stream {other.stream:#x} and {what} on stream {stream:#x} share bytes, in no order"
            for other in self._unseen
            if other.tick > clock.get(other.stream, 0) and work.meets(other)
        )
        self._unseen.append(work)
        return work

    def _clock(self, stream: int) -> Clock:
        clock = self._streams.setdefault(stream, {})
        _join(clock, self._host)
        return clock

    def record(self, event: int, stream: int) -> None:
        self._events[event] = dict(self._clock(stream))

    def wait(self, stream: int, event: int) -> None:
        _join(self._clock(stream), self._events.get(event, {}))

    def host_saw_event(self, event: int) -> None:
        self._saw(self._events.get(event, {}))

    def host_saw_stream(self, stream: int) -> None:
        self._saw(self._clock(stream))

    def _saw(self, clock: Clock) -> None:
        _join(self._host, clock)
        self._unseen = [work for work in self._unseen if work.tick > self._host.get(work.stream, 0)]

    def unseen(self, span: Spans) -> list[Work]:
        """Work on these bytes whose end the host has not waited for."""
        return [work for work in self._unseen if work.reads.meets(span) or work.writes.meets(span)]

    @property
    def pending(self) -> Iterable[Work]:
        return list(self._unseen)


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
