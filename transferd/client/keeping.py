"""What a client may do about stored blocks: purge them, and pin them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transferd.client.pending import as_seconds
from transferd.errors import RequestError
from transferd.tasks import Purged
from transferd.wire import protocol as wire

PURGE_TIMEOUT_S = 3600.0  # to remove the files of a large store


class Keeping:
    """Purges and pins. `_ask` sends one request and waits for its answer. A mixin of Client."""

    async def _ask(self, body: wire.Control, timeout: float = 0.0) -> Any:
        raise NotImplementedError

    async def purge(
        self,
        keys: Sequence[str] | None = None,
        model: str | None = None,
        generation: str | None = None,
        engine: str | None = None,
        older_than: float | None = None,
        dry_run: bool = False,
    ) -> Purged:
        """Remove the stored objects that fit everything that is given; without any argument, all of them.

        keys: blocks of `engine` (default: this client's), in its present generation or in `generation`. engine: only
            what this engine has stored. older_than: only what nobody has stored or used for so many seconds.
        dry_run: remove nothing, and say what would be.

        Returns the objects and bytes that were removed; an object is one rank's block. Returns once their bytes are
        gone; no load finds them from an earlier moment on. Loads that run finish first; what is being stored goes, too,
        and what is stored after this returns stays. Pinned objects go, too.

        Needs the right to it: a client of a registered engine, or one of the same user, may purge what that engine
        stored (its default without `engine`); the daemon's user and root may purge everything. Raises RequestError
        (`not_yours`, `unknown_engine`, `backend_cannot`), and StorageError if objects could not be removed.
        """
        age = None if older_than is None else _seconds("older_than", older_than)
        named = None if keys is None else list(keys)
        asked = wire.Purge(named, model, generation, engine or "", age, dry_run)
        return Purged(**await self._ask(asked, PURGE_TIMEOUT_S))

    async def pin(self, keys: Sequence[str], ttl: float) -> int:
        """Keep these blocks from being evicted for `ttl` seconds. Returns how many of them every rank has.

        Blocks that are not stored are left out; pin them once they are. A further pin of a block replaces this
        engine's earlier one, so repeat it to go on. A pin ends with its time, with `unpin` or with a purge; a restart
        of the daemon ends it only if the objects are in its memory. An engine may pin `engines.pin_share` of the
        store. Raises RequestError (`share_exceeded`, which pins
        nothing; `backend_cannot`).
        """
        return int(await self._ask(wire.Pin(list(keys), _seconds("ttl", ttl)), PURGE_TIMEOUT_S))

    async def unpin(self, keys: Sequence[str] | None = None) -> None:
        """End this engine's pins of these blocks; None: all of its pins."""
        await self._ask(wire.Unpin(None if keys is None else list(keys)), PURGE_TIMEOUT_S)


def _seconds(name: str, value: object) -> float:
    seconds = as_seconds(value)
    if seconds is None or seconds != seconds:
        raise RequestError(f"{name} must be a number of seconds, not {value!r}", code="bad_value")
    return seconds
