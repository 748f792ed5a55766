"""The settings of TransferdHiCache, in SGLang's --hicache-storage-backend-extra-config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transferd.adapters.common.program import Program
from transferd.adapters.common.settings import LONGEST_TIMEOUT_S, CommonSettings, check_size, parsed
from transferd.config.size import Size
from transferd.errors import ConfigError

SGLANG = Program("SGLang", "sglang.transferd", store="sglang")
SECTION = "hicache-storage-backend-extra-config"
# Keys of that JSON that SGLang reads itself.
OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size")


class HiCacheSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of every adapter, and those of this one.

    load_timeout: seconds for one load; after that its pages are computed.
    buffer: memory for the copies on their way, for each pool that is private memory.
    loras: the operator's name for the LoRA adapters of the server's start; "" = by their files.
    """

    load_timeout: float = 10.0
    loras: str = ""
    buffer: int | str = "256MiB"

    @property
    def buffer_bytes(self) -> int:
        return int(Size.parse(self.buffer))


def settings(extra: Mapping[str, Any]) -> HiCacheSettings:
    """Parse SGLang's extra config. Raises ConfigError that names the key."""
    if not extra.get("interface_v1"):
        what = 'must be 1, or SGLang copies every page once more and calls another interface: add "interface_v1": 1'
        raise ConfigError(f"{SECTION}.interface_v1", what, extra.get("interface_v1", 0))
    chosen = parsed(SECTION, {key: value for key, value in extra.items() if key not in OF_SGLANG}, HiCacheSettings)
    if not 0 < chosen.load_timeout <= LONGEST_TIMEOUT_S:
        what = f"must be above 0 and at most {LONGEST_TIMEOUT_S:g}"
        raise ConfigError(f"{SECTION}.load_timeout", what, chosen.load_timeout)
    check_size(SECTION, "buffer", chosen.buffer)
    return chosen


def private_memory(why: str) -> str:
    """What to say of host pools that no other process can map. why: what the kernel says of the memory."""
    how = 'start SGLang with "allocator": "shm" in'
    return f"{why}; to move them without a copy, {how} --{SECTION}, as JSON: it does not read this key from an @file"
