"""Numbers of bytes, as people write them: powers of 1024 with `i`, of 1000 without. A reserve may be a percentage."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}

MOST_BYTES = 2**60  # larger sizes do not fit the counters of the kernel and libzmq
MOST_PERCENT = 90


class Size(int):
    """A number of bytes; parsed from an int or from text with a unit."""

    @classmethod
    def parse(cls, value: int | str) -> Size:
        """Parse a size of 0 to 1EiB. Raises ValueError for anything else; its text does not repeat the value."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("expected a size such as 67108864 or '64MiB'")
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
            if match is None or match[2] not in _UNITS:
                raise ValueError("expected a size such as '64MiB'")
            value = int(Fraction(match[1]) * _UNITS[match[2]])  # exact: a float would round beyond 2**53
        if not 0 <= value <= MOST_BYTES:
            raise ValueError("expected a size of at least 0, and at most 1EiB")
        return cls(value)

    def __str__(self) -> str:
        for unit, scale in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
            if self >= scale and self % scale == 0:
                return f"{self // scale}{unit}"
        return str(int(self))


class Reserve(str):
    """A part of something in percent, or a number of bytes, as text; only one of both is not None."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: int | str) -> Reserve:
        """Parse a size or a percentage. Raises ValueError; its text does not repeat the value."""
        percent = re.fullmatch(r"\s*(\d{1,2}(?:\.\d{1,6})?)\s*%\s*", value) if isinstance(value, str) else None
        if percent is None:
            try:
                return cls(Size.parse(value))
            except ValueError:
                raise ValueError("expected a size such as '10GiB', or a percentage such as '5%'") from None
        number = float(percent[1])
        if number > MOST_PERCENT:
            raise ValueError(f"expected a percentage of at most {MOST_PERCENT}%")
        return cls(f"{number:.6f}".rstrip("0").rstrip(".") + "%")

    @property
    def percent(self) -> float | None:
        """0 to 90."""
        return float(self[:-1]) if self.endswith("%") else None

    @property
    def nbytes(self) -> Size | None:
        """A number of bytes."""
        return None if self.endswith("%") else Size.parse(str(self))


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
        """The sizes of the list; for one size, itself."""
        return self._each or (Size(self),)

    def as_plain(self) -> str | list[str]:
        """As it is written in a configuration."""
        return [str(size) for size in self._each] if self._each else str(Size(self))
