"""Descriptors of an engine's memory, passed over the daemon's unix socket (SCM_RIGHTS).

Whoever holds a descriptor may map the memory, so the daemon needs no right of its own to open it: daemon and engine may
be different users, and see neither each other's /proc nor the same /dev/shm. libzmq cannot pass descriptors. So for
each offer the client connects once more to the same socket, sends MARK, a random token and the descriptors in one
message, and leaves. The offer, on the client's ordinary connection, names the token (docs/adr/0134).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import functools
import os
import socket as sockets
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from transferd.errors import Closed, NoThreads, TierError
from transferd.runtime.compat import wait_for
from transferd.runtime.descriptors import seals_of
from transferd.runtime.threads import Crew
from transferd.wire.shares import User

MARK = b"\x01transferd"  # no greeting of ZMTP begins so
TOKEN_BYTES = 16
MOST_PASSED = 64  # descriptors of one message
ANCILLARY = sockets.CMSG_SPACE(MOST_PASSED * array.array("i").itemsize)
MOST_HELD = 256  # descriptors that may be passed and not mapped yet, of all users; of one, half
FREED_AT_ONCE = 16 * 1024**2  # bytes of memory: freeing so much takes 2 to 9 ms
WAIT_S = 5.0  # how long an offer waits for its descriptors, and they for their offer

Ancillary = Sequence[tuple[int, int, bytes]]


def pass_descriptors(endpoint: str, descriptors: Sequence[int]) -> bytes:
    """Pass descriptors to the daemon at an ipc:// endpoint; return the token by which an offer names them.

    They stay the caller's. Never waits: raises TierError if the daemon's queue is full, or nobody listens.
    """
    token, path = os.urandom(TOKEN_BYTES), endpoint.removeprefix("ipc://")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_NONBLOCK) as passing:
        try:
            passing.connect(f"\0{path[1:]}" if path.startswith("@") else path)
            sockets.send_fds(passing, [MARK + token], list(descriptors))
        except OSError as error:
            raise TierError(f"cannot pass the memory's descriptors to {endpoint}: {error.strerror}") from error
    return token


class Descriptors:
    """Descriptors that this process owns, until nothing refers to this. close: then called with them."""

    def __init__(self, numbers: Sequence[int], close: Callable[[Sequence[int]], None]) -> None:
        self.numbers = numbers
        weakref.finalize(self, close, numbers).atexit = False


class Passed:
    """What has been passed to this process, by user and token, until an offer takes it or WAIT_S are over.

    held: descriptors of each user that are not closed yet, also those that offers have taken.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: dict[tuple[User, bytes], asyncio.Future[Descriptors]] = {}
        self._closing = Crew("transferd-close", 1)
        self.held: Counter[User] = Counter()

    def room(self, user: User) -> int:
        """How many bytes of ancillary data to take from this user now."""
        return ANCILLARY if self.held[user] < MOST_HELD // 2 and self.held.total() < MOST_HELD else 0

    def received(self, user: User, ancillary: Ancillary) -> Descriptors:
        """Own what came with a message of this user."""
        numbers = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (sockets.SOL_SOCKET, sockets.SCM_RIGHTS):
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
        self.held[user] += len(numbers)
        return Descriptors(tuple(numbers), functools.partial(self._close, user))

    def arrived(self, user: User, token: bytes, descriptors: Descriptors) -> None:
        """Keep descriptors for the offer that names the token, unless they are too many."""
        if self.held[user] > MOST_HELD // 2 or self.held.total() > MOST_HELD:
            return
        waiting = self._waiting((user, token))
        if not waiting.done():
            waiting.set_result(descriptors)

    def close(self) -> None:
        """Wait for nothing that hangs."""
        self._closing.close(0.0)

    def _close(self, user: User, numbers: Sequence[int]) -> None:
        """Close what takes no time now, and the rest in a thread."""
        others = [number for number in numbers if not _closes_at_once(number)]
        for number in numbers:
            if number not in others:
                os.close(number)
        self.held[user] -= len(numbers) - len(others)
        if others:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
                self._loop.call_soon_threadsafe(self._close_apart, user, others)

    def _close_apart(self, user: User, numbers: Sequence[int]) -> None:
        def close() -> None:
            for number in numbers:
                with contextlib.suppress(OSError):
                    os.close(number)

        with contextlib.suppress(NoThreads, Closed):  # they stay open, and count
            closing = self._closing.run(close, "closing what a client has passed")
            closing.add_done_callback(lambda _: self.held.subtract({user: len(numbers)}))

    async def take(self, user: User, token: bytes) -> Descriptors:
        """What this user has passed, or is passing, with this token. Raises TierError."""
        waiting = self._waiting((user, token))
        try:
            return await wait_for(waiting, WAIT_S)
        except TimeoutError:
            what = f"the descriptors of this memory have not arrived within {WAIT_S:g} s: offer it again"
            raise TierError(what) from None
        finally:
            self._arrived.pop((user, token), None)

    def _waiting(self, key: tuple[User, bytes]) -> asyncio.Future[Descriptors]:
        waiting = self._arrived.get(key)
        if waiting is None:
            waiting = self._arrived[key] = self._loop.create_future()
            self._loop.call_later(WAIT_S, self._arrived.pop, key, None)
        return waiting


def _closes_at_once(number: int) -> bool:
    """Not so: a file on a mount, or a socket that lingers, which may hang; nor much memory, if that frees it."""
    return seals_of(number) is not None and os.fstat(number).st_blocks * 512 <= FREED_AT_ONCE
