"""Which engine a daemon serves to this client, compared at every new life (docs/adr/0116).

A daemon may come back with another model, another layout, or as another place of its tensor-parallel group: two unit
files were swapped, a template was wrong. It would answer `ok` with bytes that are not those of this client's engine. So
the client remembers which engine it has used, and while a daemon serves another one, it refuses the calls that this
would spoil.
"""

from __future__ import annotations

from transferd.wire import protocol as wire

MISMATCH = "identity_mismatch"
# These name no block, and change nothing that is served. All others another engine must not get.
HARMLESS = (
    wire.OfAnyone, wire.Unregister, wire.Cancel, wire.Detach, wire.Pause, wire.Resume, wire.Drain, wire.ClearCache
)  # fmt: skip


class Served:
    """The engine that one conversation has used, from `open` to `close`.

    used: what it was; None before the first use.
    differs: how the engine that the daemon serves now differs; "" if it does not.
    """

    def __init__(self) -> None:
        self.used: wire.Identity | None = None
        self.differs = ""

    def forget(self) -> None:
        """The client has registered an engine anew, has ended it, or starts afresh."""
        self.used, self.differs = None, ""

    def use(self, now: wire.Identity | None) -> None:
        """The client uses this engine from now on, or goes on using the earlier one."""
        self.used = self.used or now

    def compare(self, now: wire.Identity | None, in_use: bool) -> str:
        """Compare the engine of a new Welcome; return in words how it differs. None: there is none now.

        in_use: this client uses its engine, whichever it is.
        """
        if in_use:
            self.use(now)
        named = wire.Identity.__struct_fields__ if self.used is not None and now is not None else ()
        pairs = ((name, getattr(self.used, name), getattr(now, name)) for name in named)
        self.differs = ", ".join(f"{name} {new!r} instead of {old!r}" for name, old, new in pairs if old != new)
        return self.differs

    def spoils(self, body: wire.Body) -> bool:
        """Whether this request must not reach the daemon that answers now."""
        named = isinstance(body, wire.Purge) and body.keys is not None
        return bool(self.differs) and (named or not isinstance(body, HARMLESS))
