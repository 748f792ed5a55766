"""Which objects a purge removes. Pure: it reads names only.

Names are those of blocks/formats.py: `<model>/<fingerprint>/<generation>/<digest>/<rank>`. Names of another form, such
as FastDeploy's, say neither model nor generation, so no such object fits a selection that asks for one.
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
    unused_s: float | None = None  # for so many seconds at least, nobody has stored or used it

    def fits(self, name: str) -> bool:
        """Whether the name fits. That says nothing of owner and age."""
        if self.names is not None and name not in self.names:
            return False
        if self.model is None and self.generation is None:
            return True
        model, _, rest = name.partition("/")
        generation = rest.partition("/")[2].partition("/")[0]
        return (
            name.count("/") == 4
            and (self.model is None or model == quote_part(self.model))
            and (self.generation is None or generation == quote_part(self.generation))
        )
