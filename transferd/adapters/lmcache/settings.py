"""The settings of TransferdL2: `adapter_params` in LMCache's --l2-adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transferd.adapters.common.program import Program
from transferd.adapters.common.settings import LONGEST_TIMEOUT_S, CopySettings, parsed
from transferd.errors import ConfigError

LMCACHE = Program("LMCache", "lmcache.transferd", store="lmcache")
SECTION = "adapter_params"
MOST_THREADS = 64


class L2Settings(CopySettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of every adapter that copies, and those of this one.

    pin: seconds for which an object that a lookup has found is kept from being evicted; 0 = not at all.
    threads: that copy.
    in_place: move objects in LMCache's own memory, if that is shared.
    """

    pin: float = 60.0
    threads: int = 4
    in_place: bool = False


def settings(given: Mapping[str, Any]) -> L2Settings:
    """Parse the plugin's parameters. Raises ConfigError that names the key."""
    chosen = parsed(SECTION, given, L2Settings)
    if not 0 <= chosen.pin <= LONGEST_TIMEOUT_S:
        raise ConfigError(f"{SECTION}.pin", f"must be 0 to {LONGEST_TIMEOUT_S:g}", chosen.pin)
    if not 1 <= chosen.threads <= MOST_THREADS:
        raise ConfigError(f"{SECTION}.threads", f"must be 1 to {MOST_THREADS}", chosen.threads)
    return chosen
