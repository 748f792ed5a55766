"""The version of this package, from its own metadata."""

from __future__ import annotations

from importlib import metadata

VERSION = metadata.version("transferd")
