"""Objects of one size as an engine of slots, and which sizes a store has.

Mooncake's objects have any size, and lie in any memory of the process. So they are copied (common/copied.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.copied import CopiedObjects
from transferd.adapters.common.slots import Slots
from transferd.adapters.mooncake_store.settings import MOONCAKE, StoreSettings


class AttachedSize(CopiedObjects):
    """Objects of `nbytes` bytes at the daemon. Thread-safe. Raises TierError without memory for slots."""

    def __init__(self, nbytes: int, engine: str, model: str, chosen: StoreSettings, finder: DaemonFinder) -> None:
        weights = f"{chosen.weights} (asserted)" if chosen.weights else "as the engine's keys say"
        super().__init__(
            nbytes,
            Slots.within(nbytes, chosen.buffer_bytes),
            finder,
            timeout=chosen.timeout,
            load_timeout=chosen.load_timeout,
            name=engine,
            model=model,
            generation=chosen.generation,
            identity="mooncake store",
            fingerprint={"interface": "Mooncake's store", "bytes of an object": nbytes, "weights": weights},
        )

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return self.link.exists(keys) if keys and self.ready() else [False] * len(keys)


class KnownSizes:
    """The sizes of objects that this user's processes have stored, in a file: a key alone does not show a size.

    Thread-safe. Each line is a size; another process may add one at any time.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = -1
        self._sizes: list[int] = []
        self._lock = threading.Lock()

    def all(self) -> list[int]:
        with self._lock:
            try:
                if (length := self._file.stat().st_size) != self._seen:
                    lines = self._file.read_text(encoding="ascii", errors="replace").splitlines()
                    found = [int(line) for line in lines if line.isdigit() and int(line)]
                    self._sizes, self._seen = list(dict.fromkeys([*self._sizes, *found])), length
            except OSError:
                pass
            return list(self._sizes)

    def add(self, nbytes: int) -> None:
        if nbytes in self.all():
            return
        with self._lock:
            self._sizes.append(nbytes)
            try:
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self._file.open("a", encoding="ascii") as file:
                    file.write(f"{nbytes}\n")
            except OSError as error:
                MOONCAKE.log.warning("transferd: other processes will not find objects of %d bytes: %s", nbytes, error)
