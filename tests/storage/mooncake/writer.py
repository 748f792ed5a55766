"""A client of a pool in a process of its own, that a test kills in the middle of a put.

python writer.py MASTER KEY NBYTES     prints "ready", waits for a line, puts
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from transferd.config import from_tree
from transferd.storage.mooncake.client import Buffer, PoolClient


def main(master: str, key: str, nbytes: int) -> None:
    pool = {"master_server_addr": master, "global_segment_size": 0, "local_buffer_size": 0}
    tree = {"storage": {"mooncake": pool | {"local_hostname": "127.0.0.1"}}}
    section = from_tree(tree).storage.mooncake
    client = PoolClient(section)
    memory = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    client.register(address, nbytes)
    print("ready", flush=True)
    sys.stdin.readline()
    print(client.put({key: Buffer(address, nbytes)})[key], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
