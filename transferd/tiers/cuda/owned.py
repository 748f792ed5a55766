"""Resources to release in the reverse order of their acquisition."""

from __future__ import annotations

from collections.abc import Callable

from transferd.errors import DeviceLost, StillRunning, TierError


class CopyHung(StillRunning, TierError):
    """A copy hangs, so the memory that it uses cannot be freed."""

    code = "device_stuck"


class Owned:
    """A stack of clean-up functions. `release` calls each once, the last one first, even if some of them fail."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def release(self) -> None:
        """Release everything, then raise the first error. Idempotent.

        DeviceLost does not count as an error: the driver frees everything when it loses the context.
        """
        first: TierError | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except DeviceLost:
                continue
            except TierError as error:
                first = first or error
        if first is not None:
            raise first
