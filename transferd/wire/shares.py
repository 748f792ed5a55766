"""What the connections of one acceptor share besides the loop's turns: places, and memory for what arrives.

Each is bounded for all connections together, however many there are and whatever their peers do. The waiting user who
has least is served next.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from transferd.runtime.aio import Timer

UNBUDGETED = 16 * 1024  # bytes: a smaller message needs no room
MOST_RECEIVED = 256 * 1024**2  # bytes of larger messages that are arriving, of all peers
STALLED_S = 10.0  # a message that others wait for must have arrived by then


User = int | None  # a uid, or None for all peers of tcp://, which have no uid


class Receiver(Protocol):
    """The part of a connection that `Room` needs."""

    @property
    def user(self) -> User: ...

    @property
    def closed(self) -> bool: ...

    def room_found(self) -> None:
        """Called once the connection has been given the room that it waited for."""


class Places:
    """How many connections each user has."""

    def __init__(self) -> None:
        self._of: Counter[User] = Counter()

    def enter(self, user: User) -> None:
        self._of[user] += 1

    def leave(self, user: User) -> None:
        self._of[user] -= 1
        if not self._of[user]:
            del self._of[user]

    def taken_by_another(self, user: User) -> list[User]:
        """Once all places are taken: a list of the user who must give a place to this one; [] if there is none."""
        most = max(self._of, key=self._of.__getitem__, default=user)
        return [most] if self._of[most] > self._of[user] + 1 else []


R = TypeVar("R", bound=Receiver)


class Room(Generic[R]):
    """Memory for large messages while they arrive. A connection takes it when it knows the size, or waits its turn.

    A peer that announces a message and does not send it would keep its room for ever. So while others wait, a
    connection with a message that has not arrived after STALLED_S is closed, the oldest first. Of the waiting
    connections, the next is the first one of the user who has taken least.
    """

    def __init__(self, total: int, stalled: Callable[[R], None]) -> None:
        self._total = total
        self._taken: dict[R, tuple[int, float]] = {}  # size and since when, oldest first
        self._free = total
        self._waiting: deque[tuple[R, int]] = deque()
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._timer = Timer()

    @property
    def taken(self) -> int:
        return self._total - self._free

    def take(self, connection: R, size: int) -> bool:
        """Take room, and return True; or let the connection wait until its `room_found` is called.

        What is larger than all of the room takes all of it: an encrypted frame has some bytes more than its message.
        """
        size = min(size, self._total)
        if size <= self._free and not self._waiting:
            self._grant(connection, size)
            return True
        self._waiting.append((connection, size))
        self._watch()
        return False

    def give_back(self, connection: R) -> None:
        """Return what this connection has taken, and let it wait no longer."""
        size, _ = self._taken.pop(connection, (0, 0.0))
        self._free += size
        if connection.closed and self._waiting:
            self._waiting = deque(waiting for waiting in self._waiting if waiting[0] is not connection)
        while self._waiting:
            other, size = waiting = self._next()
            if size > self._free:
                break
            self._waiting.remove(waiting)
            self._grant(other, size)
            other.room_found()

    def _next(self) -> tuple[R, int]:
        taken: Counter[User] = Counter()
        for connection, (size, _) in self._taken.items():
            taken[connection.user] += size
        return min(self._waiting, key=lambda waiting: taken[waiting[0].user])

    def _grant(self, connection: R, size: int) -> None:
        self._free -= size
        self._taken[connection] = (size, self._loop.time())

    def _watch(self) -> None:
        if self._taken and not self._timer:
            _, since = next(iter(self._taken.values()))
            self._timer.set(since + STALLED_S - self._loop.time(), self._look)

    def _look(self) -> None:
        if self._waiting:
            connection, (_, since) = next(iter(self._taken.items()))
            if self._loop.time() >= since + STALLED_S:
                self._stalled(connection)
        if self._waiting:
            self._watch()

    def close(self) -> None:
        self._waiting.clear()
        self._timer.cancel()
