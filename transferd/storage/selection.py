"""Which objects a purge removes. Pure: it reads names only.

Names are those of blocks/formats.py: `<model>/<fingerprint>/<generation>/<digest>/<rank>`. Names of another form, such
as FastDeploy's, contain neither model nor generation, so no such object fits a selection by one of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from transferd.blocks.formats import quote_part
from transferd.errors import RequestError
from transferd.storage.queues import space_of


@dataclass(frozen=True, slots=True)
class Selection:
    """Objects that fit every field that is not None."""

    names: frozenset[str] | None = None  # of objects
    owner: Hashable | None = None
    model: str | None = None
    generation: str | None = None
    unused_s: float | None = None  # it was neither stored nor used for at least so many seconds
    space: str | None = None  # of model and layout (queues.py)

    def fits(self, name: str) -> bool:
        """Whether the name fits. Ignores owner and age."""
        if self.names is not None and name not in self.names:
            return False
        if self.space is not None and space_of(name) != self.space:
            return False
        if self.model is None and self.generation is None:
            return True
        said = parts_of(name)
        return (
            said is not None
            and (self.model is None or said[0] == quote_part(self.model))
            and (self.generation is None or said[1] == quote_part(self.generation))
        )


def check_shared(selection: Selection) -> None:
    """Raise RequestError if a backend that others use too cannot tell what fits."""
    if selection.unused_s is not None:
        what = "a bucket or pool does not know how long an object was not used"
        raise RequestError(f"{what}: purge without an age, or let its own rules remove old ones", code="backend_cannot")


def parts_of(name: str) -> tuple[str, str] | None:
    """The model and the generation that a name says, quoted; None for a name of another form."""
    parts = name.split("/")
    return (parts[0], parts[2]) if len(parts) == 5 else None
