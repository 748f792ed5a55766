"""How numbers are written for people: sizes, times, shares, and small pictures of them."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def size(nbytes: float) -> str:
    """A number of bytes in at most eight characters: 512 B, 1.5 KiB, 213 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def count(number: float) -> str:
    """A count in at most six characters: 999, 12.3k, 4.0M."""
    if number < 10_000:
        return f"{number:.0f}"
    return f"{number / 1e3:.1f}k" if number < 1e6 else f"{number / 1e6:.1f}M"


def span(seconds: float | None) -> str:
    """A duration in at most two units; "-" for a time that is not known."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{days} d {hours % 24} h"


def share(part: float, whole: float) -> str:
    """part of whole in percent; "-" if whole is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def named_ranks(numbers: Sequence[int]) -> str:
    """Ranks by their numbers: "rank 2", "ranks 0, 1"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def bar(used: float, capacity: float, width: int = 20) -> str:
    """A bar of `width` characters, filled in proportion to `used`. Even a tiny use shows."""
    if capacity <= 0:
        return "·" * width
    filled = min(width, round(width * used / capacity)) or (1 if used > 0 else 0)
    return "█" * filled + "░" * (width - filled)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as one character each, scaled to the largest of them."""
    shown = list(values)[-width:]
    top = max(shown, default=0)
    steps = len(_BLOCKS) - 1
    line = "".join(_BLOCKS[max(1, round(steps * value / top)) if top and value > 0 else 0] for value in shown)
    return line.rjust(width)
