"""The version of this package. setup.py reads it from here, and writes the build's own name into a wheel.

Two builds never have one name: a commit after a release is `0.4.0.devN+gCOMMIT`, where N counts the commits of its
history. Only the commit that a release is tagged at sets RELEASED. Reading the version from the installed package would
take about 3 % of each start.
"""

from __future__ import annotations

from pathlib import Path

RELEASE = "0.4.0"  # the next release, or, in the commit that is tagged, this one
RELEASED = False

BUILD = "build"  # beside this file in a wheel: the name of the build


def build_name(commits: int, commit: str) -> str:
    """The version of a build of this tree (PEP 440). commits: of its history. commit: 12 hex digits; "" if unknown."""
    version = RELEASE if RELEASED else f"{RELEASE}.dev{commits}"
    return f"{version}+g{commit}" if commit else version


def _here() -> str:
    try:
        return Path(__file__).with_name(BUILD).read_text(encoding="ascii").strip()
    except FileNotFoundError:  # a source tree
        return build_name(0, "")


VERSION = _here()


def commit() -> str:
    """The commit that this package was built from, 12 hex digits; "" in a source tree, or if it is unknown."""
    return VERSION.partition("+g")[2]
