"""What an engine imports: the asyncio client, its blocking twin, and a way to start a daemon of one's own.

Importing it loads no CUDA, Mooncake, Paddle or uvloop.
"""

from transferd.client.client import Client
from transferd.client.sync_client import SyncClient

__all__ = ["Client", "SyncClient"]
