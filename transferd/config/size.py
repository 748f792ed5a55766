"""Numbers of bytes, as people write them: powers of 1024 with `i`, of 1000 without. A reserve may be a percentage."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}

MOST_PERCENT = 90


class Size(int):
    """A number of bytes; parsed from an int or from text with a unit."""

    @classmethod
    def parse(cls, value: int | str) -> Size:
        """Parse a size of at least 0. Raises ValueError for anything else; its text does not repeat the value."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("expected a size such as 67108864 or '64MiB'")
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
            if match is None or match[2] not in _UNITS:
                raise ValueError("expected a size such as '64MiB'")
            value = int(Fraction(match[1]) * _UNITS[match[2]])  # exact: a float would round beyond 2**53
        if value < 0:
            raise ValueError("expected a size of at least 0")
        return cls(value)

    @property
    def each(self) -> tuple[Size, ...]:
        """The sizes of a list; for one size, itself."""
        return (self,)

    def __str__(self) -> str:
        for unit, scale in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
            if self >= scale and self % scale == 0:
                return f"{self // scale}{unit}"
        return str(int(self))


class Reserve(str):
    """A part of something in percent, or a number of bytes, as text. One of these is set:

    percent: 0 to 90.
    nbytes: a size.
    """

    __slots__ = ("nbytes", "percent")

    percent: float | None
    nbytes: Size | None

    @classmethod
    def parse(cls, value: int | str) -> Reserve:
        """Parse a size or a percentage. Raises ValueError; its text does not repeat the value."""
        percent = re.fullmatch(r"\s*(\d{1,2}(?:\.\d{1,6})?)\s*%\s*", value) if isinstance(value, str) else None
        if percent is None:
            try:
                nbytes = Size.parse(value)
            except ValueError:
                raise ValueError("expected a size such as '10GiB', or a percentage such as '5%'") from None
            made = cls(nbytes)
            made.percent, made.nbytes = None, nbytes
            return made
        if float(percent[1]) > MOST_PERCENT:
            raise ValueError(f"expected a percentage of at most {MOST_PERCENT}%")
        number = float(percent[1])
        made = cls(f"{number:.6f}".rstrip("0").rstrip(".") + "%")
        made.percent, made.nbytes = number, None
        return made


class Capacities(Size):
    """One size for each of several things; a single one stands for all of them. As a number: the sum of the list."""

    _each: tuple[Size, ...] = ()

    @classmethod
    def parse(cls, value: int | str | list[int | str]) -> Capacities:
        if not isinstance(value, list):
            return cls(Size.parse(value))
        if not value:
            raise ValueError("expected a size, or a list of sizes")
        each = tuple(map(Size.parse, value))
        sizes = cls(sum(each))
        sizes._each = each
        return sizes

    @property
    def each(self) -> tuple[Size, ...]:
        return self._each or (Size(self),)

    def as_plain(self) -> str | list[str]:
        """As it is written in a configuration."""
        return [str(size) for size in self._each] if self._each else str(Size(self))
