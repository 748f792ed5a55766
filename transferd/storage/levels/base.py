"""The abilities of a storage of several levels beyond the contract of every backend (storage/base.py)."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import NamedTuple

from transferd.errors import StorageError, TransferError
from transferd.storage.queues import Use
from transferd.storage.selection import Selection
from transferd.tasks import LevelChange, Warmed


class Hint(NamedTuple):
    """What a level that others change too has said of an object once: it is there. It orders questions, and no more.

    at: when, in monotonic seconds.
    """

    at: float


class Proof(NamedTuple):
    """A level has said within a task that it has an object. What promises that to somebody takes nothing else.

    Only proving.py makes one. level: its name. at: when it said so, in monotonic seconds.
    """

    level: str
    at: float


class Bringing(abc.ABC):
    """Objects that are brought up to one level of several, before a task needs them."""

    brought: dict[str, int]  # the lengths of objects that came up, by name
    error: TransferError | None  # the first one that kept an object from coming up

    @abc.abstractmethod
    def bring(self, objects: Sequence[tuple[str, int, int]]) -> asyncio.Future[None]:
        """Bring objects (name, length, depth in their chain) up, in this order. Done when all is over.

        The future raises nothing. Do not cancel it: `stop` ends it after the running batch.
        """

    @abc.abstractmethod
    def stop(self) -> None: ...

    @abc.abstractmethod
    def there(self, names: Sequence[str]) -> list[bool]:
        """For each object, whether it is in the level or in a faster one now."""

    @abc.abstractmethod
    def release(self) -> None:
        """Let its objects be evicted like others. Before this call, each is kept until its first use."""


class Prefetcher(abc.ABC):
    """Brings objects up. levels: their names, the fastest first."""

    levels: Sequence[str]

    @abc.abstractmethod
    def to(self, name: str, owner: Hashable) -> Bringing:
        """A Bringing to this level. Raises RequestError: `unknown_level`, `backend_cannot`."""

    @abc.abstractmethod
    async def warm(self, selection: Selection, newest: int, to: str, owner: Hashable) -> Warmed:
        """Bring up the newest `newest` bytes of objects that fit and that the next level with an order of use has.

        Fills only free room of the level `to`. Returns the objects and bytes that came up. Raises RequestError,
        StorageError.
        """


class Levels(abc.ABC):
    """The levels of a storage, numbered from 0, the fastest. names: those of the configuration.

    An object may have a copy in each level. After a load that failed a check, or that is LEFT, ask for the next one.
    """

    names: Sequence[str]

    @property
    @abc.abstractmethod
    def out(self) -> list[str]:
        """The names of levels that no load asks now."""

    @abc.abstractmethod
    def having(self, name: str) -> int:
        """The levels that have an object, as far as that is known without I/O: bit i for level i."""

    @abc.abstractmethod
    def tell(self, changed: Callable[[str], None]) -> None:
        """Call `changed(name)`, on the event loop, in the step in which other levels have an object. At most once."""

    @abc.abstractmethod
    async def where(self, names: Sequence[str]) -> dict[str, list[bool]]:
        """For each level by its name, the fastest first, which of these it has. Does not count as a use.

        A level that does not answer counts as having nothing.
        """

    @abc.abstractmethod
    def owes(self, use: Use) -> bool:
        """Whether a store by this use is `ok` only with a `prove` of its objects."""

    @abc.abstractmethod
    async def prove(
        self, objects: Sequence[tuple[str, int, int]], use: Use, since: float
    ) -> list[Proof | StorageError]:
        """Have the levels that a store by `use` must reach say that they have each object (name, length, depth).

        What they lack is copied there first, from the level above that has it. Uses no slots, so the store's have
        returned. Answers at once for a level that is known to be out. since: when the task began, in monotonic
        seconds: what a level has said since then is not asked again. May be cancelled.
        """

    @abc.abstractmethod
    async def exists_now(self, names: Sequence[str]) -> list[bool]:
        """`Storage.exists`, but no recent "not there" is believed: another node may have stored them since."""

    @abc.abstractmethod
    def slots_for(self, names: Sequence[str]) -> int:
        """How many slots at a time an in-place load of these uses, at most `Storage.slots_at_once`. Without I/O."""

    @abc.abstractmethod
    def quarantine_at(self, name: str, level: int) -> Awaitable[object]:
        """`Storage.quarantine` for the copy that one level has delivered (`Outcome.level`)."""

    @property
    @abc.abstractmethod
    def prefetcher(self) -> Prefetcher:
        """The part that brings objects up to a level."""

    @abc.abstractmethod
    async def change(self, name: str, *, leaves: bool) -> LevelChange:
        """Take a level out: copy the objects that only it has to others, then use it no more. Or put it back.

        Raises RequestError.
        """

    @abc.abstractmethod
    async def flush(self, within_s: float) -> None:
        """Copy objects out of levels that do not outlive the process, for at most so long. Called before `close`."""
