"""Blocks that a task lends to the C extensions for a call of a storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


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
