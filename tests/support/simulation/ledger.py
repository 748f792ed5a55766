"""What storage may hold, as the engines of a simulation know it."""

from __future__ import annotations

from collections import Counter


class Ledger:
    """Which keys may have been stored under which generation.

    A task is bound to the generation at its admission, which its engine learns from the result. So a
    write that has not been answered, or was answered by somebody else than the daemon, may have
    stored under any; one that was answered has stored under the generation it was answered with.
    """

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._anywhere: set[str] = set()
        self._stored: set[tuple[str, str]] = set()

    def begin(self, keys: list[str]) -> None:
        self._under_way.update(keys)

    def end(self, keys: list[str], generation: str | None) -> None:
        """The write was answered under `generation`; None: nobody knows what became of it."""
        self._under_way.subtract(keys)
        if generation is None:
            self._anywhere.update(keys)
        else:
            self._stored.update((generation, key) for key in keys)

    def may_hold(self, generation: str, key: str) -> bool:
        return (generation, key) in self._stored or self._under_way[key] > 0 or key in self._anywhere
