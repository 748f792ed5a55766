"""Durations as callers pass them: any real number, of any numeric type."""

from __future__ import annotations

import numbers
from decimal import Decimal

from transferd.errors import ConfigError


def as_seconds(value: object) -> float | None:
    """Return the number as a float, or None if it is not a real number or too large. May be NaN or negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):
        return None


def seconds_to_wait(name: str, value: object) -> float:
    """Like `as_seconds`, but raise ConfigError for NaN and for anything that is not a number."""
    seconds = as_seconds(value)
    if seconds is None or seconds != seconds:
        raise ConfigError(name, "expected a number of seconds", value)
    return seconds
