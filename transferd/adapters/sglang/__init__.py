"""Unmodified SGLang over a transferd daemon: a storage of its HiCache, or its external linker (docs/sglang.md).

hicache      TransferdHiCache: what SGLang's cache controller calls
linker       TransferdLinker: what SGLang's tree calls, for device pools without a host tier
rank         the pools of one rank at the daemon
pools        one of SGLang's host pools as an engine, and where its pages lie
identity     what two servers must have in common to read each other's pages
arguments    which of SGLang's arguments count for that
settings     what an operator can set, and what SGLang must be set to

SGLang and torch are imported only when the class is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transferd.adapters.sglang.hicache import TransferdHiCache
    from transferd.adapters.sglang.linker import TransferdLinker

__all__ = ["TransferdHiCache", "TransferdLinker"]


def __getattr__(name: str) -> Any:
    if name == "TransferdHiCache":
        from transferd.adapters.sglang.hicache import TransferdHiCache

        return TransferdHiCache
    if name == "TransferdLinker":
        from transferd.adapters.sglang.linker import TransferdLinker

        return TransferdLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
