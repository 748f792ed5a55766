"""Unmodified SGLang over a transferd daemon: a storage backend of its HiCache (docs/sglang.md).

hicache      TransferdHiCache: what SGLang's cache controller calls
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

__all__ = ["TransferdHiCache"]


def __getattr__(name: str) -> Any:
    if name == "TransferdHiCache":
        from transferd.adapters.sglang.hicache import TransferdHiCache

        return TransferdHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
