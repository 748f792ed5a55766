"""Objects that cannot be removed: each is set aside, so that it costs its own room and no more.

One file may refuse for ever: its directory belongs to another user after a restore as root, it is immutable, its
sectors are bad. Such an object stays in the index and is served, but eviction passes it by (queues.py, STUCK) and takes
the next one. RETRY_S later its removal is tried again, so nobody has to restart anything once the file is mended; but
not if a task has counted on it since, which found it and skipped its store.

An error that is the whole store's (`is_whole`) says nothing about the object: it comes back as the next to evict.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog

from transferd.errors import StorageError
from transferd.storage.batch import Write, is_whole
from transferd.storage.effects import Effects
from transferd.storage.lru import LruIndex, Victim
from transferd.storage.queues import EVICTED, STUCK, Use

log = structlog.get_logger(__name__)

RETRY_S = 60.0
FAILING = 4  # input/output errors that one write bears: the owner of a disk that fails must know soon
AT_ONCE = 256  # objects that are tried again together
ACTION = "give the store's files back to the daemon's user, and let it remove them (chown, chmod, chattr -i)"


class _Stuck(NamedTuple):
    at: float
    nbytes: int
    why: str


@dataclass(eq=False)
class StuckObjects:
    """One index's objects that cannot be removed. Used on one event loop.

    remove: an effect, which raises StorageError. now: monotonic seconds.

    whole: set when an error of the whole store kept an object; whoever wants to know clears it first.
    """

    _index: LruIndex
    _effects: Effects
    _remove: Callable[[str], None]
    _now: Callable[[], float]
    refused: dict[str, _Stuck] = field(default_factory=dict)
    _unread: Sequence[str] = ()
    whole: bool = False

    def keep(self, write: Write) -> int:
        """Put the victims of a write that were not removed back into the index. Returns how many.

        Their removal has ended, also if the write goes on: from here on a purge may remove them.
        """
        for victim in write.victims:
            del self._effects.busy[victim.name]
            if not self._effects.unusable():  # else the index is empty, and nothing comes back to it
                self._index.restore(victim)
        for victim, error in write.refused:
            del self._effects.busy[victim.name]
            self._keep(victim, error)
        kept = len(write.victims) + len(write.refused)
        write.victims, write.refused = [], []
        return kept

    def _keep(self, victim: Victim, error: StorageError) -> None:
        if self._effects.unusable():
            return
        if not victim.nbytes:  # it is bad (`note`), and must not be served
            self._note(victim, error)
            return
        self._index.restore(victim)
        if is_whole(error):
            self.whole = True
            return
        entry = self._index.get(victim.name)
        assert entry is not None
        self._index.pin(entry, STUCK)
        self._note(victim, error)

    def note(self, failed: Mapping[str, StorageError]) -> None:
        """Count bad objects, which are in no index any more, and whose files cannot be moved or removed."""
        for name, error in failed.items():
            self._note(Victim(name, 0), error)

    def _note(self, victim: Victim, error: StorageError) -> None:
        if not self.refused:
            log.warning("an object cannot be removed and is set aside", problem=str(error), action=ACTION)
        self.refused[victim.name] = _Stuck(self._now(), victim.nbytes, str(error))

    def remove(self, victims: Sequence[Victim], after: Awaitable[None] | None = None) -> asyncio.Future[int]:
        """Remove objects that have just left the index, in the background. The result: how many are still stored."""
        names, ended = [victim.name for victim in victims], functools.partial(self._ended, victims)
        return self._effects.begin(names, self._remove, ended, after=after)

    def remove_bad(self, fits: Callable[[str], bool]) -> asyncio.Future[int]:
        """The same of bad objects that fit (`note`), unless another one has taken its place."""
        bad = [name for name, one in self.refused.items() if not one.nbytes and self._index.get(name) is None]
        return self.remove([Victim(name, 0) for name in bad if fits(name) and name not in self._effects.busy])

    def stored(self, names: Sequence[str]) -> None:
        """A task has just found these stored, and skips its store: they must stay, whoever wanted them to go before."""
        for name in names:
            entry = self._index.get(name) if name in self.refused else None
            if entry is not None and entry.kept & STUCK:
                self._index.unpin(entry, Use(), STUCK)
                del self.refused[name]

    def try_again(self) -> None:
        """Try once more to remove what could not be removed a while ago."""
        due: list[Victim] = []
        before = self._now() - RETRY_S
        for name, refusal in list(self.refused.items()):
            if refusal.at > before or name in self._effects.busy:
                continue
            entry = self._index.get(name)
            if entry is None or entry.kept == STUCK:
                self._index.forget(name, why=EVICTED)
                self.refused[name] = refusal._replace(at=self._now())
                due.append(Victim(name, refusal.nbytes))
            elif not entry.kept & STUCK:  # another object of this name: the old one's file is overwritten
                del self.refused[name]
            if len(due) == AT_ONCE:
                break
        if due:
            self.remove(due)

    def _ended(self, victims: Sequence[Victim], failed: Mapping[str, StorageError]) -> int:
        """The removal of these objects has ended. failed: by name, for those that are still there."""
        for victim in victims:
            if (error := failed.get(victim.name)) is not None:
                self._keep(victim, error)
            else:
                self.refused.pop(victim.name, None)
        return len(failed)

    def opened(self, refused: Sequence[str]) -> None:
        """The store was opened anew. refused: why a directory or file was left alone."""
        self.refused.clear()
        self._unread = refused
        if refused:
            log.warning("what cannot be read is left alone", members=len(refused), first=refused[0], action=ACTION)

    def statistics(self) -> dict[str, Any]:
        why = [refusal.why for refusal in self.refused.values()] or self._unread
        return {
            "stuck": len(self.refused) + len(self._unread),
            "stuck_bytes": sum(refusal.nbytes for refusal in self.refused.values()),
            "stuck_why": why[0] if why else "",
        }
