"""The version of this package. scripts/build_name.py makes the name of a build of it, which a wheel contains.

Reading the version from the installed package would take about 3 % of each start.
"""

from __future__ import annotations

from pathlib import Path

RELEASE = "0.5.0"  # the next release, or, if RELEASED, the last one
RELEASED = False  # the commit "release: X.Y.Z" sets it

BUILD = "build"  # beside this file in a wheel: the name of the build


def _here() -> str:
    try:
        return Path(__file__).with_name(BUILD).read_text(encoding="ascii").strip()
    except FileNotFoundError:  # a source tree
        return f"{RELEASE}.{'post' if RELEASED else 'dev'}0"


VERSION = _here()


def commit() -> str:
    """The commit that this package was built from, 12 hex digits; "" in a source tree, or if it is unknown."""
    return VERSION.partition("+g")[2].partition(".")[0]
