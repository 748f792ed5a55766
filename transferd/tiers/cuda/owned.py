"""What has to be given back, in the order it was taken, backwards."""

from __future__ import annotations

from collections.abc import Callable

from transferd.errors import DeviceLost, StillRunning, TierError


class Stuck(StillRunning, TierError):
    """Something is still at work and does not end: what it works on cannot be given back."""

    code = "device_stuck"


class Owned:
    """A list of things to undo. `release` undoes each once, the last one first, whatever fails in between."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def release(self) -> None:
        """Raises the first error, after all the rest is done. Idempotent.

        A lost device has nothing left that could be freed: the driver took everything when it lost the
        context, so that is no error here.
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
