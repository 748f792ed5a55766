"""The memory that a store takes for each object found at start, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

MOST = 300  # bytes an object
OBJECTS = 300_000
PROGRAM = f"""
import gc, hashlib
from transferd.runtime import heap
from transferd.storage.found import FoundObjects, UseOrder
from transferd.storage.journal import RECORD, hash_of
from transferd.storage.lru import LruIndex
import numpy as np

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def start(index):
    found = FoundObjects()
    for i in range({OBJECTS}):
        digest = hashlib.blake2b(b"%d" % (i // 2), digest_size=20).hexdigest()
        found.add("Llama-3.3-70B-Instruct/" + "f" * 16 + f"/1/{{digest}}/{{i % 2}}", 2097280, i)
    known = np.zeros({OBJECTS}, RECORD)
    known["name"] = np.sort([hash_of(name) for name in found.names])
    known["use"], known["depth"] = 1 + np.arange({OBJECTS}) // 40, np.arange({OBJECTS}) // 2 % 20
    order = UseOrder.of(found, known)
    for first in range(0, {OBJECTS}, 4096):
        index.adopt(order.adopted(first, first + 4096))

index = LruIndex(2**60)
gc.collect()
before = resident()
start(index)
heap.trim()
assert len(index) == {OBJECTS}
print((resident() - before) / {OBJECTS})
"""


def test_an_object_takes_at_most_300_bytes_of_memory() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    print(f"{float(done.stdout):.0f} bytes of memory an object")
    assert float(done.stdout) <= MOST
