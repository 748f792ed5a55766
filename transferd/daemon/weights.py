"""Which generation an engine serves after a restart, when its clients assert one (docs/adr/0068). Pure decisions.

configured   no client has asserted one since the start: the daemon's configuration, or the registration, decides
said         a client uses the engine, or has asserted this generation
set          a client has set it: this supersedes all generations that were served before the restart
"""

from __future__ import annotations

from transferd.runtime.compat import StrEnum
from transferd.tasks import ErrorInfo
from transferd.wire import protocol as wire


class Origin(StrEnum):
    """Why an engine serves its generation."""

    CONFIGURED = "configured"
    SAID = "said"
    SET = "set"


MISMATCH = "generation_mismatch"


def contradiction(
    name: str, said: wire.Hello, *, boot_id: str, generation: str, configured: str, origin: Origin
) -> ErrorInfo | None:
    """Why a client that belongs to the engine `name` cannot be served: it has served another generation.

    Returns None if it can be served, perhaps after the engine takes the client's generation (`adopts`).
    generation, configured, origin: of the engine.
    """
    if said.generation is None or said.boot_id == boot_id or said.generation == generation or origin is Origin.SET:
        return None
    if origin is Origin.CONFIGURED and said.configured in (None, configured):
        return None
    why = "another client serves it" if origin is Origin.SAID else f"its configuration was {said.configured!r}"
    what = f"this client served the generation {said.generation!r}, and the engine {name!r} now serves {generation!r}"
    return ErrorInfo(MISMATCH, f"{what} ({why}); say which one is right with set_generation (transferd generation set)")


def adopts(said: wire.Hello, *, boot_id: str, generation: str, origin: Origin) -> bool:
    """Whether the engine takes the generation that this client served before the restart. Requires no contradiction."""
    other = said.generation not in (None, generation) and said.boot_id != boot_id
    return other and origin is Origin.CONFIGURED
