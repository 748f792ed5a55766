"""The version of this package, which pyproject.toml reads.

It is written here, because reading it from the installed package would take about 3 % of each start.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.3.0"


def commit() -> str:
    """The commit that a wheel was built from, 12 hex digits; "" in a source tree, or if it is unknown."""
    try:
        return Path(__file__).with_name("commit").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""


def full_version() -> str:
    """The version with the commit, as `transferd.__version__` has it (PEP 440): 0.3.0+g0123456789ab."""
    return f"{VERSION}+g{commit()}" if commit() else VERSION
