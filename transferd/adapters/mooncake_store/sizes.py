"""Objects of one size as an engine of slots, and which sizes a store has.

Mooncake's objects have any size, and lie in any memory of the process. So they are copied (common/copied.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.copied import CopiedBlocks, Pieces
from transferd.adapters.common.entry import EngineFacts
from transferd.adapters.common.link import Link
from transferd.adapters.common.slots import Slots
from transferd.adapters.mooncake_store.settings import MOONCAKE, StoreSettings

LEAVE_S = 2.0


class AttachedSize:
    """Objects of `nbytes` bytes at the daemon. Thread-safe. Raises TierError without memory for slots."""

    def __init__(self, nbytes: int, engine: str, model: str, chosen: StoreSettings, finder: DaemonFinder) -> None:
        self.nbytes = nbytes
        self._slots = Slots.within(nbytes, chosen.buffer_bytes)
        weights = f"{chosen.weights} (asserted)" if chosen.weights else "as the engine's keys say"
        self.facts = EngineFacts(
            name=engine,
            model=model,
            generation=chosen.generation,
            identity="mooncake store",
            ranks=1,
            blocks=self._slots.count,
            page_bytes=[nbytes],
            memory=self._slots.offered(),
            fingerprint={"interface": "Mooncake's store", "bytes of an object": nbytes, "weights": weights},
        )
        self.link = Link(finder, engine, self.facts.enter)
        times = {"timeout": chosen.timeout, "load_timeout": chosen.load_timeout}
        self._copies = CopiedBlocks(self.link, finder, self._slots, f"objects of {nbytes} bytes", **times)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return self.link.exists(keys) if keys and self._copies.ready() else [False] * len(keys)

    def store(self, keys: Sequence[str], objects: Sequence[Pieces]) -> list[bool]:
        """Store the objects at these places; for each whether it is stored. Returns by the deadline."""
        return self._copies.store(keys, objects)

    def load(self, keys: Sequence[str], objects: Sequence[Pieces]) -> list[bool]:
        """Load objects to these places; for each whether its bytes are there. Returns by the deadline."""
        return self._copies.load(keys, objects)

    def close(self) -> None:
        self.link.close(LEAVE_S)
        self._slots.close()


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
