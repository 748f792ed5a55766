"""Remembers the generation of weights that this client's engine serves, and asserts it to daemons (docs/adr/0068).

Within one boot the daemon knows the generation, and we learn it from every Welcome. A restarted daemon knows only what
it is configured with. Our Hello then asserts what we served: the new daemon adopts it, or refuses us until somebody
sets the generation. Only a client that uses the engine asserts; one that only looks must not decide.

A clear of the cache closes its generation for good. We notice each clear, because the epoch grows, and report the
closed generations to a restarted daemon (docs/adr/0084).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable

import msgspec

from transferd.errors import RequestError
from transferd.wire import protocol as wire


class Weights:
    """Belongs to one client, and outlives its connections: the engine's weights do as well.

    used: whether this client has used its engine: registered, offered, attached, pushed, or set the generation.
    """

    def __init__(self, generation: str | None = None) -> None:
        """generation: what the engine serves, if it says so itself; then even the first daemon must agree."""
        self._known = generation
        self._boot_id = ""  # of the daemon that served it
        self._configured: str | None = None  # what that daemon had been configured with; None if it does not matter
        self._unset: str | None = None  # requested, and no daemon has answered
        self._repeating = Repeating()
        self._epoch = 0  # of the newest Welcome, in that boot
        self._closed: dict[str, None] = {}  # generations, the oldest first
        self._closed_in = ""  # the boot that closed the newest of them, and so knows them all
        self._closed_life: tuple[str, int, int] | None = None  # the life in which we last reported them
        self.used = generation is not None

    @property
    def generation(self) -> str | None:
        """What the engine serves as far as we know; None before the first Welcome."""
        return self._known if self._unset is None else self._unset

    def said(self, hello: wire.Hello) -> wire.Hello:
        """The Hello, with our assertion."""
        if not self.used or self.generation is None:
            return hello
        return msgspec.structs.replace(
            hello, generation=self.generation, boot_id=self._boot_id, configured=self._configured
        )

    def welcomed(self, welcome: wire.Welcome) -> bool:
        """Learn from a Welcome that names our engine; return whether the daemon should hear at once that we know."""
        before = self._known, self._boot_id
        if welcome.boot_id == self._boot_id:
            self.cleared(welcome.epoch, welcome.registered)
        self._epoch = welcome.epoch
        if welcome.ready:  # also if it was closed: then it was reopened, for the same weights
            self._closed.pop(welcome.generation, None)
        self._known, self._boot_id, self._configured = welcome.generation, welcome.boot_id, welcome.configured
        if self._unset == welcome.generation:
            self._unset = None
        return self.used and before != (self._known, self._boot_id)

    def cleared(self, epoch: int, registered: int) -> None:
        """Note a clear, if the epoch has grown since the registration: it has closed the generation that we know."""
        if self._known is None or not registered <= self._epoch < epoch or not self._epoch:
            return
        self._epoch, self._closed_in = epoch, self._boot_id
        self._closed.pop(self._known, None)
        self._closed[self._known] = None
        for oldest in list(self._closed)[: max(0, len(self._closed) - wire.MOST_CLOSED)]:
            del self._closed[oldest]

    def again(self, welcome: wire.Welcome, now: float) -> list[wire.ControlRequest]:
        """The unanswered requests to repeat, and a report of what this daemon cannot know. now: monotonic seconds."""
        again: list[wire.ControlRequest] = []
        life = welcome.boot_id, welcome.session, welcome.epoch
        said = self._closed_life == life or welcome.boot_id == self._closed_in
        if self.used and welcome.epoch and not said and (closed := [one for one in self._closed if one != self._known]):
            self._closed_life = life
            again.append(wire.ClosedGenerations(closed))
        if self._unset is not None and self._repeating.due((*life[:2], self._unset), now, known=False):
            again.append(wire.SetGeneration(self._unset))
        return again

    def registered(self, welcome: wire.Welcome, generation: str) -> None:
        """Note what this client has registered its engine with. welcome: the newest one."""
        self._known, self._boot_id, self._configured, self._unset = generation, welcome.boot_id, generation, None
        self.used = True

    def restored(self, generation: str) -> None:
        """Note that a restore of the cache by this client has set the generation."""
        self._known, self._unset = generation, None
        self._closed.pop(generation, None)

    def unregistered(self) -> None:
        self._closed.clear()
        self._known = self._configured = self._unset = None

    async def set(self, generation: str, ask: Callable[[wire.SetGeneration], Awaitable[object]]) -> None:
        """Request a generation. If no daemon answers, we assert and request it until one does: the weights are new."""
        self.used = True
        self._unset = None
        try:
            await ask(wire.SetGeneration(generation))
        except RequestError:
            raise
        except BaseException:
            self._unset = generation
            raise
        self._known = generation


FIRST_S, LONGEST_S = 0.5, 30.0


class Repeating:
    """One message that the daemon must get: repeated at once in a new life, then at growing intervals until it has it.

    A *life* is whatever the daemon knows things by: its boot, our session, the epoch. A repetition may be refused for
    a reason that passes (a leaving engine still has the name, or the memory), so one attempt a life is not enough.
    """

    def __init__(self, life: Hashable = None) -> None:
        """life: the one in which the message was sent and answered."""
        self._life = life
        self._wait_s = FIRST_S
        self._next_at = 0.0

    def due(self, life: Hashable, now: float, *, known: bool) -> bool:
        """Whether the caller must send the message now.

        known: the daemon shows that it has it.
        now: monotonic.
        """
        if life != self._life:
            self._life, self._wait_s = life, FIRST_S
        elif known or now < self._next_at:
            return False
        else:
            self._wait_s = min(2 * self._wait_s, LONGEST_S)
        self._next_at = now + self._wait_s
        return True
