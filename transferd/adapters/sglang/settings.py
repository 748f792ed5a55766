"""The settings of TransferdHiCache and of TransferdLinker, each in a JSON of SGLang's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from transferd.adapters.common.program import Program
from transferd.adapters.common.settings import CopySettings, parsed
from transferd.errors import ConfigError

SGLANG = Program("SGLang", "sglang.transferd", store="sglang")
SECTION = "hicache-storage-backend-extra-config"
# Keys of that JSON that SGLang reads itself.
OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size")


class PoolSettings(CopySettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of every adapter that copies, and those of SGLang's.

    section: the argument of SGLang that has them.
    to_share: what to say of pools that no other process can map.
    loras: the operator's name for the LoRA adapters of the server's start; "" = by their files.
    """

    section: ClassVar[str]
    to_share: ClassVar[str] = ""
    loras: str = ""


class HiCacheSettings(PoolSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the storage of HiCache."""

    section = SECTION
    to_share = (
        f'; to move them without a copy, start SGLang with "allocator": "shm" in --{SECTION}, as JSON: '
        "it does not read this key from an @file"
    )


class LinkerSettings(PoolSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the external linker."""

    section = "unified-cache-external-linker-config"


S = TypeVar("S", bound=PoolSettings)


def settings(extra: Mapping[str, Any]) -> HiCacheSettings:
    """Parse the extra config of HiCache. Raises ConfigError that names the key."""
    if not extra.get("interface_v1"):
        what = 'must be 1, or SGLang copies every page once more and calls another interface: add "interface_v1": 1'
        raise ConfigError(f"{SECTION}.interface_v1", what, extra.get("interface_v1", 0))
    return checked({key: value for key, value in extra.items() if key not in OF_SGLANG}, HiCacheSettings)


def checked(given: Mapping[str, Any], kind: type[S]) -> S:
    """Parse the keys of an adapter. Raises ConfigError that names the key."""
    return parsed(kind.section, given, kind)
