"""Bounds what all engines of a daemon have admitted together.

Beyond a bound, only an engine below its equal share is admitted. So a flooding engine keeps no other engine out, and
the total never exceeds twice the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from transferd.control.admission import Prepared
from transferd.tasks import ErrorInfo, Lane


class Load(Protocol):
    """What one engine has admitted."""

    @property
    def queued(self) -> int: ...

    @property
    def argument_bytes(self) -> int: ...

    def bytes_under_way(self, lane: Lane) -> int: ...


@dataclass(slots=True)
class Total:
    """The bounds of [server], for all engines together. engines: those that exist now; the daemon keeps the list."""

    max_queued: int
    max_queued_bytes: int
    max_bytes: int
    engines: list[Load] = field(default_factory=list)

    def refusal(self, asks: Load, prepared: Prepared) -> ErrorInfo | None:
        """Why the asking engine may not admit this task now; None if it may."""
        engines, lane = self.engines, prepared.lane
        share = len(engines)
        if share < 2:
            return None
        queued, mine = sum(one.queued for one in engines), asks.queued
        if queued >= self.max_queued and mine >= self.max_queued // share:
            return ErrorInfo("queue_full", f"the queue is full: {queued} tasks of all engines, {mine} of this one")
        held, mine = sum(one.argument_bytes for one in engines), asks.argument_bytes
        if mine and held + prepared.arguments > self.max_queued_bytes and mine >= self.max_queued_bytes // share:
            told = f"admitted tasks hold {held} bytes of keys, ids and token_ids, {mine} of them this engine's"
            return ErrorInfo("queue_full", told)
        moving, mine = sum(one.bytes_under_way(lane) for one in engines), asks.bytes_under_way(lane)
        if mine and moving + prepared.nbytes > self.max_bytes and mine >= self.max_bytes // share:
            told = f"all engines have {moving} bytes in flight in this lane, this one has {mine}"
            return ErrorInfo("bytes_in_flight", told)
        return None
