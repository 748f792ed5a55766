"""A duration as a caller may give it: any real number, whatever its type."""

from __future__ import annotations

import numbers
from decimal import Decimal

from transferd.errors import ConfigError


def as_seconds(value: object) -> float | None:
    """The number as a float; None for what is no real number, or too large for a float. May be NaN or negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):
        return None


def seconds_to_wait(name: str, value: object) -> float:
    """The same, for a wait here: NaN and what is no number raise ConfigError."""
    seconds = as_seconds(value)
    if seconds is None or seconds != seconds:
        raise ConfigError(name, "expected a number of seconds", value)
    return seconds
