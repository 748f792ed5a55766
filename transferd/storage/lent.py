"""Blocks that a task lends to the C extensions for a call of a storage, or for a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

from transferd.storage.base import Drainer, Fill

S = TypeVar("S")
C = TypeVar("C", Fill, Drainer)


class Lent(NamedTuple):
    """Blocks for the C extensions (workers/_lent.h), which make and take their objects without the GIL.

    A Fill or a Drainer that has it as `lent` may be passed over: it is called only for an object that the extension
    could not make or take.

    numbers: for each item of the call, the number of its block.
    busy: by number, whether the Drainer must be called for the object in any case; empty if for none.
    """

    blocks: Any
    numbers: Sequence[int]
    busy: bytearray = bytearray()

    def chosen(self, which: Sequence[int]) -> Lent:
        return self._replace(numbers=[self.numbers[i] for i in which])


def lent_by(call: object) -> Lent | None:
    """The blocks that a Fill or a Drainer lends to the extensions; None if it lends none."""
    return getattr(call, "lent", None)


def chosen(each: Sequence[S], which: Sequence[int]) -> list[S]:
    """Some of a call's items, or of its slots, for a call of their own."""
    return [each[i] for i in which]


def chosen_call(call: C | None, which: Sequence[int]) -> C | None:
    """The Fill or the Drainer of a call for `chosen` items."""
    return call and cast("C", _ChosenCall(call, which))


class _ChosenCall:
    """call: a Fill or a Drainer."""

    def __init__(self, call: Any, which: Sequence[int]) -> None:
        self._call, self._which = call, which
        lent = lent_by(call)
        self.lent = lent and lent.chosen(which)

    @property
    def wanted(self) -> bool:
        return bool(self._call.wanted)

    def __call__(self, i: int, /, *arguments: Any) -> bool:
        return bool(self._call(self._which[i], *arguments))
