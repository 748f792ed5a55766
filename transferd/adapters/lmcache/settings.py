"""The settings of TransferdL2: `adapter_params` in LMCache's --l2-adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transferd.adapters.common.program import Program
from transferd.adapters.common.settings import LONGEST_TIMEOUT_S, CommonSettings, check_size, parsed
from transferd.config.size import Size
from transferd.errors import ConfigError

LMCACHE = Program("LMCache", "lmcache.transferd", store="lmcache")
SECTION = "adapter_params"
MOST_THREADS = 64


class L2Settings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of every adapter, and those of this one.

    load_timeout: seconds for one load; after that its objects are computed.
    pin: seconds for which an object that a lookup has found is kept from being evicted; 0 = not at all.
    buffer: memory for the copies on their way, for each model and layout.
    threads: that copy.
    in_place: move objects in LMCache's own memory, if that is shared.
    """

    load_timeout: float = 10.0
    pin: float = 60.0
    buffer: int | str = "256MiB"
    threads: int = 4
    in_place: bool = False

    @property
    def buffer_bytes(self) -> int:
        return int(Size.parse(self.buffer))


def settings(given: Mapping[str, Any]) -> L2Settings:
    """Parse the plugin's parameters. Raises ConfigError that names the key."""
    chosen = parsed(SECTION, given, L2Settings)
    if not 0 < chosen.load_timeout <= LONGEST_TIMEOUT_S:
        what = f"must be above 0 and at most {LONGEST_TIMEOUT_S:g}"
        raise ConfigError(f"{SECTION}.load_timeout", what, chosen.load_timeout)
    if not 0 <= chosen.pin <= LONGEST_TIMEOUT_S:
        raise ConfigError(f"{SECTION}.pin", f"must be 0 to {LONGEST_TIMEOUT_S:g}", chosen.pin)
    if not 1 <= chosen.threads <= MOST_THREADS:
        raise ConfigError(f"{SECTION}.threads", f"must be 1 to {MOST_THREADS}", chosen.threads)
    check_size(SECTION, "buffer", chosen.buffer)
    return chosen
