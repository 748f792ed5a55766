"""A message that there is no memory for, in a process that has a real limit."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent("""
    import re, resource
    import numpy  # as a daemon does at its start; it takes more than what is left
    from pathlib import Path
    from transferd import SwapOutTask, WriteStorageTask
    from transferd.wire import protocol as wire

    def kib(name):
        return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

    small = wire.encode_request(1, SwapOutTask(task_id="s", gpu_block_ids=[1], cpu_block_ids=[2]))
    task = WriteStorageTask(  # kept, or its keys' memory would be free
        task_id="large", keys=["k" * 400_000 + str(i) for i in range(24)], gpu_block_ids=list(range(24)))
    large = wire.encode_request(2, task)
    wire.decode_request(small)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (kib("VmData") * 1024 + 5_000_000, hard))
    Path("/proc/self/clear_refs").write_text("5")  # begins VmHWM anew
    before = kib("VmHWM")
    for _ in range(3):
        try:
            wire.decode_request(large)
            print("decoded")
        except wire.Malformed as error:
            print(error.reason, error.seq, error.task_id)
    print("grew", kib("VmHWM") - before > 1024)
    print(wire.decode_request(small).seq)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    print(len(wire.decode_request(large).body.keys))
""")


def test_a_large_message_is_refused_before_it_takes_what_is_left() -> None:
    """What is left is libzmq's, which aborts the process if it gets none."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines() == ["out_of_memory 2 large"] * 3 + ["grew False", "1", "24"], done.stderr
