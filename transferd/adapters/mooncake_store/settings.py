"""The settings of the store: JSON in the environment, because engines hand over those of Mooncake only."""

from __future__ import annotations

import json
import os

from transferd.adapters.common.program import Program
from transferd.adapters.common.settings import CopySettings, parsed
from transferd.errors import ConfigError

VARIABLE = "TRANSFERD_MOONCAKE_STORE"
MOONCAKE = Program("mooncake-store", "transferd.mooncake_store", store="mooncake-store")


class StoreSettings(CopySettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of every adapter that copies. buffer: for each size of objects."""

    buffer: int | str = "64MiB"


def settings() -> StoreSettings:
    """Parse the variable. Raises ConfigError that names the key."""
    text = os.environ.get(VARIABLE) or "{}"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(VARIABLE, f"is no JSON: {error}", text) from None
    return parsed(VARIABLE, given, StoreSettings)
