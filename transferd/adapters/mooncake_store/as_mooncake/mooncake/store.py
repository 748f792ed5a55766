"""What engines import of Mooncake's store."""

from transferd.adapters.mooncake_store import MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig

__all__ = ["MooncakeDistributedStore", "MooncakeHostMemAllocator", "ReplicateConfig"]
