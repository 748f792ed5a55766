"""What the connections of one acceptor share: places, turns of the loop, memory for what arrives and for what leaves.

Each is bounded for all connections together, however many there are and whatever their peers do. Where one user has
much and another one waits, the other one is next.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

DRAIN_LIMIT = 64  # frames per turn of the loop, of all peers: about a millisecond of work before timers run again
SHARE = 16  # of these, for one peer at a time while others wait
CHUNK = 16 * 1024  # bytes read at a time: about as much as a turn handles, and the most that waits for a turn
UNBUDGETED = 16 * 1024  # bytes: a smaller message needs no room
MOST_RECEIVED = 256 * 1024**2  # bytes of larger messages that are arriving, of all peers
STALLED_S = 10.0  # a message that others wait for must have arrived by then
MOST_UNREAD = 64 * 1024**2  # bytes of answers that one peer has not read; a single one may be larger
MOST_UNREAD_OF_ALL = 256 * 1024**2


User = int | None  # a uid, or everybody at tcp://, whom nothing tells apart


class Receiver(Protocol):
    """What `Room` asks of a connection."""

    @property
    def user(self) -> User: ...

    @property
    def closed(self) -> bool: ...

    def room_found(self) -> None:
        """The room that it waited for is its own now."""


class Sharer(Receiver, Protocol):
    """What the other shares ask of a connection."""

    def work(self, most: int) -> None:
        """Handle at most so many frames."""

    def break_off(self, reason: str) -> None:
        """End it, counted under this reason."""

    def flush(self) -> None:
        """Send what the socket takes."""


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
        """Once all places are taken: whose connection must go for one of this user, in a list; [] if nobody's."""
        most = max(self._of, key=self._of.__getitem__, default=user)
        return [most] if self._of[most] > self._of[user] + 1 else []


class LoopTurns:
    """Each turn of the loop handles DRAIN_LIMIT frames. Connections with more wait in a queue for the next turns."""

    def __init__(self) -> None:
        self.left = DRAIN_LIMIT
        self.waiting: deque[Sharer] = deque()
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None

    def take(self, frames: int) -> None:
        self.left -= frames
        if self._next is None:
            self._next = self._loop.call_soon(self._begin)

    def wait(self, connection: Sharer) -> None:
        self.waiting.append(connection)
        if self._next is None:
            self._next = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._next = None
        self.left = DRAIN_LIMIT
        for _ in range(len(self.waiting)):
            if self.left <= 0:
                break
            connection = self.waiting.popleft()
            if not connection.closed:
                connection.work(min(SHARE, self.left))
        if self.waiting and self._next is None:
            self._next = self._loop.call_soon(self._begin)

    def close(self) -> None:
        self.waiting.clear()
        if self._next is not None:
            self._next.cancel()


R = TypeVar("R", bound=Receiver)


class Room(Generic[R]):
    """Memory for large messages while they arrive. A connection takes it when it knows the size, or waits its turn.

    A peer that announces a message and does not send it would keep its room for ever. So while others wait, one whose
    message has not arrived after STALLED_S loses its connection: the one that began first. Of those who wait, the next
    is the first one of the user who has taken least.
    """

    def __init__(self, total: int, stalled: Callable[[R], None]) -> None:
        self._total = total
        self._taken: dict[R, tuple[int, float]] = {}  # size and since when, oldest first
        self._free = total
        self._waiting: deque[tuple[R, int]] = deque()
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def taken(self) -> int:
        return self._total - self._free

    def take(self, connection: R, size: int) -> bool:
        """False: the connection waits, and `room_found` will be called."""
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
        if self._timer is None and self._taken:
            _, since = next(iter(self._taken.values()))
            self._timer = self._loop.call_at(since + STALLED_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiting:
            connection, (_, since) = next(iter(self._taken.items()))
            if self._loop.time() >= since + STALLED_S:
                self._stalled(connection)
        if self._waiting:
            self._watch()

    def close(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()


class Outbox:
    """What was sent and has not been read. All that a turn of the loop sends to a peer leaves at once, at its end."""

    def __init__(self, most: int = MOST_UNREAD_OF_ALL) -> None:
        self.unread = 0  # bytes, of all connections
        self.most = most
        self._loop = asyncio.get_running_loop()
        self._new: list[Sharer] = []  # what they send has not been tried yet
        self._flush: asyncio.Handle | None = None
        self._held = False

    def add(self, connection: Sharer) -> None:
        self._new.append(connection)
        if self._flush is None and not self._held:
            self._flush = self._loop.call_soon(self.flush)

    def hold(self) -> None:
        """Send nothing before `flush`, which the caller calls in the same turn."""
        self._held = True

    def flush(self) -> None:
        self._held = False
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        new, self._new = self._new, []
        for connection in new:
            connection.flush()
