"""How a field of the report (report.py) is a metric as well, or holds sections with fields that are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Literal, NamedTuple


class Figure(NamedTuple):
    """A field that is a metric as well. `metrics.py` reads these, and docs/metrics.md is made of them.

    name: the metric's, after the beginning that its section gives (Sections); "": the field's own.
    label: that of the keys of a map, or of the places in a list. zero: keys that are always there.
    none: the value in place of null; without it the metric is absent then.
    """

    kind: Literal["gauge", "counter"]
    help: str
    name: str = ""
    label: str = ""
    zero: Collection[str] = ()
    none: float | None = None


Gauge, Count = partial(Figure, "gauge"), partial(Figure, "counter")


class Sections(NamedTuple):
    """A field with a section, or with several: how its metrics' names begin, and their labels with their attributes.

    "" is the key in a map. The labels of a section around it come first, unless it is `apart`.
    """

    begins: str
    labels: Mapping[str, str] = {}
    apart: bool = False
