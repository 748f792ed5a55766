"""Storage in a Mooncake Store pool. `store` is the backend; the other modules are its parts."""

from transferd.storage.mooncake.store import MooncakeStorage

__all__ = ["MooncakeStorage"]
