"""Mooncake's store interface over a transferd daemon, for engines that import it (docs/mooncake_store.md).

store        MooncakeDistributedStore: keys, buffers and return codes as Mooncake has them
sizes        objects of one size as an engine of slots: stores and loads them
settings     what an operator can set, in one environment variable
as_mooncake  a directory for PYTHONPATH, where `mooncake.store` is this package

`python -m transferd.adapters.mooncake_store` prints that directory.
"""

from __future__ import annotations

from transferd.adapters.mooncake_store.store import MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig

__all__ = ["MooncakeDistributedStore", "MooncakeHostMemAllocator", "ReplicateConfig"]
