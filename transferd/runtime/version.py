"""The version of this package, which pyproject.toml reads.

It is not asked of the installed package, because that would take about 3 % of each start.
"""

from __future__ import annotations

VERSION = "0.2.0"
