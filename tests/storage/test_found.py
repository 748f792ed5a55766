"""The order of what a start finds: from the journal, or by age."""

from __future__ import annotations

from pathlib import Path

from transferd.storage.found import FoundObjects, UseOrder
from transferd.storage.journal import RECORD, UseJournal


def test_objects_without_a_record_are_the_most_recent_ordered_by_age(tmp_path: Path) -> None:
    one = UseJournal(str(tmp_path / "order"), syncs=False)
    one.note("old", 7, 3)
    one.note("older", 5, 0)
    one.flush()
    found = FoundObjects()
    for name, mtime in (("young", 30), ("old", 99), ("younger", 40), ("older", 1)):
        found.add(name, 10, mtime)
    order = UseOrder.of(found, one.read())
    adopted = list(order.adopted(0, 4))
    assert [(entry.name, entry.use, entry.depth) for entry in adopted] == [
        ("older", 5, 0), ("old", 7, 3), ("young", 8, 1), ("younger", 8, 0)
    ]  # fmt: skip
    assert order.last_use == 8
    assert UseOrder.of(FoundObjects(), one.read()).last_use == 0
    assert RECORD.itemsize == 20
