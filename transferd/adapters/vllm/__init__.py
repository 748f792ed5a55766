"""Unmodified vLLM over a transferd daemon (docs/vllm.md).

tier         TransferdTier: a secondary tier under vLLM's TieringOffloadingSpec; vLLM copies to and from the GPU
connector    TransferdConnector: the daemon moves blocks of the engine's own KV memory
scheduling, working, metrics   the connector's half in the scheduler, its half in a worker, and its figures
gpu          memory on a GPU with its timeline, as an engine offers it
layers       where the blocks of vLLM's tensors lie
identity     what two engines must have in common to read each other's blocks
groups, known  which blocks a request needs of each KV group, and whether they were found, loaded and saved
saving       which computed blocks are saved, and what keeps them meanwhile
versions     which generation an engine serves when its weights change in place
router_events   KV events about the store: blocks that it has, and blocks that have left it
plugin       registers both classes with vLLM, which then needs no module path
interfaces   which of vLLM's interfaces we need, and the one error if they are missing

The client, the daemon behind it and the memory are in adapters/common.
vLLM and torch are imported only when one of the two classes is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transferd.adapters.vllm import interfaces

if TYPE_CHECKING:
    from transferd.adapters.vllm.connector import TransferdConnector
    from transferd.adapters.vllm.tier import TransferdTier

__all__ = ["TransferdConnector", "TransferdTier"]


def __getattr__(name: str) -> Any:
    if name == "TransferdTier":
        interfaces.require(name, interfaces.TIER)
        from transferd.adapters.vllm.tier import TransferdTier

        return TransferdTier
    if name == "TransferdConnector":
        interfaces.require(name, interfaces.CONNECTOR)
        from transferd.adapters.vllm.connector import TransferdConnector

        return TransferdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
