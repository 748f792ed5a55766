"""Unmodified LMCache over a transferd daemon: a plugin for the L2 of its multi-process server (docs/lmcache.md).

l2           TransferdL2: what LMCache's controllers call
attached     objects of one model and layout as an engine: stores and loads them through slots of shared memory
kinds        which objects share an engine, and what two servers must have in common to read each other's
settings     what an operator can set

LMCache and torch are imported only when the class is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transferd.adapters.lmcache.l2 import TransferdL2

__all__ = ["TransferdL2"]


def __getattr__(name: str) -> Any:
    if name == "TransferdL2":
        from transferd.adapters.lmcache.l2 import TransferdL2

        return TransferdL2
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
