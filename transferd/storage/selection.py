"""Which objects a purge removes. Pure: it reads names only.

Names are those of blocks/formats.py: `<model>/<fingerprint>/<generation>/<digest>/<rank>`. Names of another form, such
as FastDeploy's, contain neither model nor generation, so no such object fits a selection by one of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from transferd.blocks.formats import quote_part


@dataclass(frozen=True, slots=True)
class Selection:
    """Objects that fit every field that is not None."""

    names: frozenset[str] | None = None  # of objects
    owner: Hashable | None = None
    model: str | None = None
    generation: str | None = None
    unused_s: float | None = None  # it was neither stored nor used for at least so many seconds

    def fits(self, name: str) -> bool:
        """Whether the name fits. Ignores owner and age."""
        if self.names is not None and name not in self.names:
            return False
        if self.model is None and self.generation is None:
            return True
        said = parts_of(name)
        return (
            said is not None
            and (self.model is None or said[0] == quote_part(self.model))
            and (self.generation is None or said[1] == quote_part(self.generation))
        )


def parts_of(name: str) -> tuple[str, str] | None:
    """The model and the generation that a name says, quoted; None for a name of another form."""
    parts = name.split("/")
    return (parts[0], parts[2]) if len(parts) == 5 else None
