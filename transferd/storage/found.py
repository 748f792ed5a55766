"""The objects in a store's directory when it is opened, and the order of their eviction: from the journal, or by age.

As arrays, because a store may hold millions of objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from transferd.errors import StorageError
from transferd.storage.journal import RECORD, Records, hash_of
from transferd.storage.lru import Adopted


@dataclass(slots=True)
class FoundObjects:
    """The objects of a scan, in the directory's own order: name, length, time of modification.

    refused: why a directory or file was left alone, with its path.
    """

    names: list[str] = field(default_factory=list)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    mtimes: array[int] = field(default_factory=lambda: array("q"))
    refused: list[str] = field(default_factory=list)

    def add(self, name: str, nbytes: int, mtime_ns: int) -> None:
        self.names.append(name)
        self.sizes.append(nbytes)
        self.mtimes.append(mtime_ns)

    def without(
        self, goes: Callable[[str, float], bool], remove: Callable[[str], None]
    ) -> tuple[FoundObjects, list[str]]:
        """Remove the objects that `goes` says, by name and Unix time of modification.

        Returns the others, and the names of those that could not be removed.
        """
        kept, stuck = FoundObjects(refused=self.refused), list[str]()
        for name, nbytes, mtime_ns in zip(self.names, self.sizes, self.mtimes, strict=True):
            if not goes(name, mtime_ns / 1e9):
                kept.add(name, nbytes, mtime_ns)
                continue
            try:
                remove(name)
            except StorageError:
                stuck.append(name)
        return kept, stuck


@dataclass(slots=True)
class UseOrder:
    """The objects of a scan in the order of their uses. records: for a new journal.

    An object without a record in the journal was stored by something that keeps no journal (a release before 0.4), or
    its record was lost with the power. It counts as more recent than all others; of such objects, the older goes first.
    """

    found: FoundObjects
    records: Records
    order: npt.NDArray[np.intp]  # positions in `found`, by ascending use

    @classmethod
    def of(cls, found: FoundObjects, known: Records) -> UseOrder:
        """known: sorted by name."""
        count = len(found.names)
        records = np.zeros(count, RECORD)
        records["name"] = np.fromiter(map(hash_of, found.names), np.uint64, count)
        new = np.ones(count, bool)
        if len(known) and count:
            at = np.minimum(np.searchsorted(known["name"], records["name"]), len(known) - 1)
            new = known["name"][at] != records["name"]
            for part in ("use", "depth"):
                records[part] = known[part][at]
        by_age = np.argsort(np.frombuffer(found.mtimes, np.int64), kind="stable") if count else np.empty(0, np.int64)
        unknown = by_age[new[by_age]]
        records["use"][unknown] = 1 + (known["use"].max() if len(known) else 0)
        records["depth"][unknown] = np.arange(len(unknown) - 1, -1, -1)
        return cls(found, records, np.argsort(records["use"], kind="stable"))

    @property
    def last_use(self) -> int:
        return int(self.records["use"].max()) if len(self.records) else 0

    def adopted(self, start: int, stop: int) -> Iterator[Adopted]:
        """Objects start to stop of the order, for the index."""
        same: dict[int, int] = {}  # one int object for each value: there are few, and an int takes as much as an entry
        names, sizes = self.found.names, self.found.sizes
        part = self.order[start:stop].tolist()
        for i, use, depth in zip(
            part, self.records["use"][part].tolist(), self.records["depth"][part].tolist(), strict=True
        ):
            nbytes = sizes[i]
            yield Adopted(use, same.setdefault(depth, depth), names[i], same.setdefault(nbytes, nbytes))
