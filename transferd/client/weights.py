"""Which generation of weights this client's engine serves, so that no daemon serves it another one (docs/adr/0068).

Within one boot the daemon knows the generation, and we learn it from every Welcome. A restarted daemon knows only what
it is configured with. Our Hello then asserts what we served: the new daemon adopts it, or refuses us until somebody
sets the generation. Only a client that uses the engine asserts; one that only looks must not decide.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from transferd.client.repeating import Repeating
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
        self._configured: str | None = None  # what that daemon had been configured with; None: it does not matter
        self._unset: str | None = None  # requested, and no daemon has answered
        self._repeating = Repeating()
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
        self._known, self._boot_id, self._configured = welcome.generation, welcome.boot_id, welcome.configured
        if self._unset == welcome.generation:
            self._unset = None
        return self.used and before != (self._known, self._boot_id)

    def again(self, welcome: wire.Welcome, now: float) -> list[wire.Control]:
        """Request again what no daemon has answered. now: monotonic seconds."""
        life = welcome.boot_id, welcome.session, self._unset
        if self._unset is None or not self._repeating.due(life, now, known=False):
            return []
        return [wire.SetGeneration(self._unset)]

    def registered(self, welcome: wire.Welcome, generation: str) -> None:
        """Note what this client has registered its engine with. welcome: the newest one."""
        self._known, self._boot_id, self._configured, self._unset = generation, welcome.boot_id, generation, None
        self.used = True

    def restored(self, generation: str) -> None:
        """Note that a restore of the cache by this client has set the generation."""
        self._known, self._unset = generation, None

    def unregistered(self) -> None:
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
