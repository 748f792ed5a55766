"""What an engine imports: the asyncio client, its blocking twin, and a way to start a private daemon.

Importing this package loads no CUDA, Mooncake, Paddle or uvloop.
"""

from transferd.client.client import Client
from transferd.client.sync_client import SyncClient

__all__ = ["Client", "SyncClient"]
