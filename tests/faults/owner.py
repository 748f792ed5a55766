"""A segment owner in a process of its own: lends memory to a Mooncake pool and does nothing else.

python -m tests.faults.owner MASTER BYTES      says "lent" on its standard output, ends with its standard input
"""

from __future__ import annotations

import sys


def main(master: str, nbytes: int) -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", nbytes, 16 * 1024**2, "tcp", "", master)
    if code != 0:
        sys.exit(f"the pool did not take the segment: code {code}")
    print("lent", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
