"""The settings of the store: JSON in the environment, because engines hand over those of Mooncake only."""

from __future__ import annotations

import json
import os

from transferd.adapters.common.program import Program
from transferd.adapters.common.settings import LONGEST_TIMEOUT_S, CommonSettings, check_size, parsed
from transferd.config.size import Size
from transferd.errors import ConfigError

VARIABLE = "TRANSFERD_MOONCAKE_STORE"
MOONCAKE = Program("mooncake-store", "transferd.mooncake_store", store="mooncake-store")


class StoreSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of every adapter, and those of this one.

    load_timeout: seconds for one load; after that its objects count as missing.
    buffer: memory for the copies on their way, for each size of objects.
    """

    load_timeout: float = 10.0
    buffer: int | str = "64MiB"

    @property
    def buffer_bytes(self) -> int:
        return int(Size.parse(self.buffer))


def settings() -> StoreSettings:
    """Parse the variable. Raises ConfigError that names the key."""
    text = os.environ.get(VARIABLE) or "{}"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(VARIABLE, f"is no JSON: {error}", text) from None
    chosen = parsed(VARIABLE, given, StoreSettings)
    if not 0 < chosen.load_timeout <= LONGEST_TIMEOUT_S:
        what = f"must be above 0 and at most {LONGEST_TIMEOUT_S:g}"
        raise ConfigError(f"{VARIABLE}.load_timeout", what, chosen.load_timeout)
    check_size(VARIABLE, "buffer", chosen.buffer)
    return chosen
