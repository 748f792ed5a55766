"""Which generation an engine serves after a restart, when its clients assert one (docs/adr/0068). Pure decisions.

configured   no client has asserted one since the start: the daemon's configuration, or the registration, decides
said         a client uses the engine, or has asserted this generation
set          a client has set it: this supersedes all generations that were served before the restart
"""

from __future__ import annotations

from transferd.errors import RequestError
from transferd.runtime.compat import StrEnum
from transferd.wire import protocol as wire


class Origin(StrEnum):
    """Why an engine serves its generation."""

    CONFIGURED = "configured"
    SAID = "said"
    SET = "set"


MISMATCH = "generation_mismatch"


def adopted(
    name: str, said: wire.Hello, *, boot_id: str, generation: str, configured: str, origin: Origin
) -> str | None:
    """The generation that the engine `name` takes from a client: what the client served before the daemon's restart.

    None if the engine goes on with its own. Raises RequestError, code `generation_mismatch`, if the client cannot be
    served, because it has served another one.

    generation, configured, origin: of the engine.
    """
    if said.generation in (None, generation) or said.boot_id == boot_id or origin is Origin.SET:
        return None
    if origin is Origin.CONFIGURED and said.configured in (None, configured):
        return said.generation
    why = "another client serves it" if origin is Origin.SAID else f"its configuration was {said.configured!r}"
    what = f"this client served the generation {said.generation!r}, and the engine {name!r} now serves {generation!r}"
    remedy = "say which one is right with set_generation (transferd generation set)"
    raise RequestError(f"{what} ({why}); {remedy}", code=MISMATCH)
